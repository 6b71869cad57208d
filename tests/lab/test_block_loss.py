"""Scores of one unit against networks made by hand."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import ompq
from nets import Chain, TinyMobileNet, images, scenes, seeded
from ompq import lab
from ompq.lab.more_scores.block_loss import BlockLoss
from ompq.network.units import Choice
from ompq.samples import Samples, kl_divergence
from ompq.scores.catalogue import score_name, score_table
from tables import score_inputs

CHOICES = (Choice(2, 4), Choice(3, 8), Choice(32, 32))


QUICK = lab.ReconstructionScore(iterations=10, samples=32)


@pytest.fixture(scope="module")
def network():
    return seeded(Chain())


def test_it_is_what_quantize_and_reconstruct_give_for_a_unit_alone(network):
    told = []
    graph = ompq.trace(network, scenes(40))
    given = score_inputs(
        graph, network, scenes(40), CHOICES, progress=lambda *step: told.append(step)
    )
    table = score_table(QUICK, given).damage
    learned, judges = scenes(40)[:16], Samples.of(scenes(40)[16:32])
    rounding = ompq.RoundingConfig(iterations=10)
    for row, name in enumerate(graph.names):
        for column, choice in enumerate(CHOICES[:2]):
            bits = dict.fromkeys(graph.names, Choice(32, 32)) | {name: choice}
            quantized = ompq.quantize(network, ompq.Allocation(bits), learned)
            config = ompq.ReconstructConfig(rounding=rounding, tuning=None)
            found = ompq.reconstruct(quantized, network, learned, config)
            with torch.no_grad():
                logits = [net(judges.runs[0]) for net in (network.eval(), found.eval())]
            divergence = float(kl_divergence(*logits).mean())
            assert table[row, column] == pytest.approx(divergence, rel=1e-6)
    assert (table[:, 2] == 0).all()
    assert (table[:, :2] > 0).all()
    assert told[-1] == (table.size, table.size, f"reconstructing {graph.names[-1]}")
    assert len(told) == table.size


def test_plans_take_it_by_name_in_a_new_process():
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import ompq; from nets import Chain, images, seeded\n"
        "config = ompq.PlanConfig(score='reconstruction', choices=(4,))\n"
        "print(ompq.plan(seeded(Chain()), images(4), '5bits', config).score_name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["reconstruction"], done.stderr
    assert score_name(lab.ReconstructionScore()) == "reconstruction"


def test_too_few_samples_are_refused(network):
    with pytest.raises(ompq.OmpqError, match="1 samples are too few to hold some back"):
        ompq.plan(network, images(1), "4bits", ompq.PlanConfig(score=QUICK))


def test_float_weights_with_quantized_inputs_are_measured_too(network):
    graph = ompq.trace(network, images(8))
    choices = (Choice(32, 4), Choice(32, 8))
    table = score_table(QUICK, score_inputs(graph, network, images(8), choices)).damage
    assert np.isfinite(table).all()
    assert (table[:, 0] > table[:, 1]).all()


def test_block_loss_is_half_the_fisher_weighted_error_of_the_block(network):
    graph, samples = ompq.trace(network, scenes(8)), scenes(8)
    score = BlockLoss(iterations=5, samples=8)
    table = score_table(score, score_inputs(graph, network, samples, CHOICES)).damage
    unit = graph.units[-2]
    bits = dict.fromkeys(graph.names, Choice(32, 32)) | {unit.name: CHOICES[0]}
    quantized = ompq.quantize(network, ompq.Allocation(bits), samples)
    rounding = ompq.RoundingConfig(iterations=5)
    config = ompq.ReconstructConfig(rounding=rounding, tuning=None)
    quantized = ompq.reconstruct(quantized, network, samples, config)
    end = unit.norm or unit.name  # it stands alone
    outputs = []
    for net in (network, quantized):
        hook = net.get_submodule(end).register_forward_hook(
            lambda _module, _args, out: outputs.append(out) or out
        )
        with hook:
            net(samples)
    plain = outputs[0].detach().requires_grad_()
    hook = network.get_submodule(end).register_forward_hook(lambda *_: plain.clone())
    with hook:
        loss = -network(samples).log_softmax(1).amax(1).sum()
    (gradient,) = torch.autograd.grad(loss, plain)
    error = outputs[1].detach() - outputs[0].detach()
    wanted = (gradient.square() * error.square()).sum() / 2 / len(samples)
    row = graph.names.index(unit.name)
    assert table[row, 0] == pytest.approx(float(wanted), rel=1e-4)
    assert (table[:, 2] == 0).all()


def test_rates_that_few_weights_cannot_have_are_passed_over():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3)).eval()  # 12 weights
    samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    score = lab.ReconstructionScore(iterations=1)
    config = ompq.PlanConfig(storage="coded", rates=(1,), choices=(8,), score=score)
    assert ompq.plan(model, samples, "8bits", config).allocation["0"] == Choice(8, 8)


BUDGET = "3.5bits"


QUICK_AUDIT = lab.AuditConfig(
    allocations=8,
    null_scores=3,
    resamples=20,
    scores=("weight_noise", "smallest_first"),
    plan=ompq.PlanConfig(choices=(2, 3, 4, 8)),
)


@pytest.fixture(scope="module")
def audited():
    return seeded(TinyMobileNet())


@pytest.fixture(scope="module")
def found(audited):
    return lab.audit(audited, images(16), BUDGET, images(12, seed=5), QUICK_AUDIT)
