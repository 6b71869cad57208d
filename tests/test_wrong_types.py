"""Arguments of a wrong type are named, whatever they are."""

import pytest
import torch
from torch import nn

import ompq
from ompq.models.named_models import load_model
from ompq.packed.packed_files import load, save


@pytest.fixture(scope="module")
def made():
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    plan = ompq.plan(network, inputs, "4bits")
    return network, inputs, plan, ompq.quantize(network, plan, inputs)


WRONG = [None, 0, 2.5, "text", b"bytes", [], {}, (), object, nn.Identity(), range(3)]
VERBS = {
    "PlanConfig": lambda n, x, p, q, wrong: ompq.plan(n, x, "4bits", wrong),
    "QuantizeConfig": lambda n, x, p, q, wrong: ompq.quantize(n, p, x, wrong),
    "ReconstructConfig": lambda n, x, p, q, wrong: ompq.reconstruct(q, n, x, wrong),
    "TrainConfig": lambda n, x, p, q, wrong: ompq.train(
        q, [(x, x.argmax(1) % 3)], wrong
    ),
    "RefineConfig": lambda n, x, p, q, wrong: ompq.refine(p, n, x, wrong),
    "SmallestConfig": lambda n, x, p, q, wrong: ompq.find_smallest(
        p, n, x, ompq.Goal(max_divergence=0.1), wrong
    ),
    "ExportConfig": lambda n, x, p, q, wrong: ompq.export(q, "a.onnx", x, wrong),
}


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("kind", VERBS)
def test_configurations_are_of_their_verb(made, kind, wrong):
    words = f"config is of type {type(wrong).__name__}; it must be a {kind}"
    with pytest.raises(TypeError, match=words):
        VERBS[kind](*made, wrong)


@pytest.mark.parametrize("wrong", [one for one in WRONG if one is not None], ids=repr)
def test_outputs_and_metrics_of_a_wrong_type(made, wrong):
    network, inputs, _, quantized = made
    with pytest.raises(ValueError, match=r"output=.* must be classes, values"):
        ompq.evaluate(quantized, inputs, reference=network, output=wrong)
    if wrong and not isinstance(wrong, dict):
        with pytest.raises(TypeError, match=r"metrics is of type \w+; it must be a M"):
            ompq.evaluate(quantized, inputs, reference=network, metrics=wrong)


@pytest.mark.parametrize("wrong", [None, 0, 2.5, b"1GiB", [], {}, range(3)], ids=repr)
def test_amounts_of_memory_and_names_are_texts(wrong):
    if wrong is not None:  # no limit
        with pytest.raises(TypeError, match=r"is of type \w+; it must be a str"):
            ompq.host_memory(wrong).__enter__()
    with pytest.raises(TypeError, match=r"is of type \w+; it must be a str"):
        ompq.device_memory(wrong).__enter__()
    with pytest.raises(TypeError, match=r"name is of type \w+; it must be a str"):
        load_model(wrong)


@pytest.mark.parametrize("wrong", [None, 0, "text", [], {}], ids=repr)
def test_files_are_loaded_into_networks(made, wrong, tmp_path):
    path = tmp_path / "net.ompq.safetensors"
    save(made[3], path)
    words = r"model must be a network or a function that returns one, not \w+"
    with pytest.raises(TypeError, match=words):
        load(path, wrong)
    with pytest.raises(TypeError, match=r"steps is of type \w+; it must be a Steps"):
        ompq.IntegerNetwork(wrong)


def test_one_tensor_is_samples_to_compare(made):
    network, inputs, _, quantized = made
    wanted = ompq.evaluate(quantized, ompq.Samples.of(inputs), reference=network)
    found = ompq.evaluate(quantized, inputs, reference=network)
    assert found.divergence == wanted.divergence
    assert found.count == len(inputs)
