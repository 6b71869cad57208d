"""The paper's tables and figures, scaled down to a network of five layers."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ompq
from cli_tools import NETWORK, TRAINED_NETWORK, run, run_json
from nets import TinyResNet, images, seeded
from ompq.allocation.problem import Allocation
from ompq.configs import PLAN_PROTOCOLS, TRAIN_PROTOCOLS
from ompq.datasets.named_data import load_data
from ompq.errors import ModelError
from ompq.lab import reproduction
from ompq.lab.more_scores.loss_gradients import Hessian
from ompq.lab.paper_figures import draw
from ompq.lab.paper_tables import EXPERIMENTS, HALFWAY, SIMPLER
from ompq.lab.reproduction import Bench, plan_row
from ompq.lab.weight_rules.outliers import OUTLIERS
from ompq.models.builtin_networks import CIFAR_NETWORKS
from ompq.models.named_models import NamedModel
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.progress import Stages
from ompq.quantization.record import quantization_of, with_quantization
from ompq.samples import Samples


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("net")
    (folder / "net.py").write_text(TRAINED_NETWORK)
    network = f"{folder / 'net.py'}:make"
    return ("--network", network, "--data", "random", "--quick", "--device", "cpu")


def quick(name, words, folder, *more):
    return run_json("reproduce", name, *words, "-o", folder, *more)


@pytest.mark.parametrize("name", ["table-ptq-resnet18", "table-qat-resnet50"])
def test_every_row_of_a_table_runs(name, words, tmp_path):
    pytest.importorskip("accelerate")
    rows = quick(name, words, tmp_path)["rows"]
    wanted = {row.name: row for row in EXPERIMENTS[name].rows}
    assert rows.keys() == wanted.keys()
    for key, found in rows.items():
        if wanted[key].search == "channels":
            assert "channels can be multiplied" in found["skipped"]
            continue
        if wanted[key].bits:
            assert "matches no unit" in found["skipped"]
            continue
        assert 0 <= found["top1"] <= 1
        assert found["mib"] > 0
    table = (tmp_path / f"{name}.md").read_text()
    assert "The results are not meaningful" in table
    header, _, *lines = [
        t.strip("| ").split(" | ") for t in table.splitlines() if "|" in t
    ]
    for row, cells in zip(wanted.values(), lines, strict=True):
        line = dict(zip(header, cells, strict=False))
        assert line["row"] == row.name
        if "skipped" not in rows[row.name]:
            assert line["top-1"] == f"{100 * rows[row.name]['top1']:.2f}"
        assert not [column for column in line if "paper" in column]


# Layer → its weights, channels, and the parameters of its bias or norm.
LAYERS = {
    "stem": (4 * 27, 4, 4),
    "block.conv1": (8 * 36, 8, 16),
    "block.conv2": (8 * 72, 8, 16),
    "block.shortcut": (8 * 4, 8, 8),
    "fc": (10 * 8, 10, 10),
}


def test_sizes_are_those_of_the_trained_network(words, tmp_path):
    pytest.importorskip("accelerate")
    table, more = "table-qat-resnet18", ("--rows", "[rl][vq]*")
    rows = quick(table, words, tmp_path, *more)["rows"]
    size = {name: found["mib"] * 2**20 for name, found in rows.items()}
    # A byte a weight, outliers of 4 bytes, and a scale and a bias for each channel.
    share = OUTLIERS.fraction
    assert size["rvquant"] == sum(
        weights + 4 * round(share * weights) + 8 * channels
        for weights, channels, _ in LAYERS.values()
    )
    # Half a byte a weight, and four levels and a bias for each channel; both ends have
    # a byte and eight levels.
    middle = [layer for name, layer in LAYERS.items() if name.startswith("block")]
    ends = [layer for name, layer in LAYERS.items() if not name.startswith("block")]
    assert size["lq-nets"] == sum(
        weights // 2 + 20 * channels for weights, channels, _ in middle
    ) + sum(weights + 36 * channels for weights, channels, _ in ends)


def test_sizes_are_those_of_learned_bits(words, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    made = {"stem": 3, "block.conv1": 5, "block.conv2": 2, "fc": 7}

    def train(network, *_args, **_more):
        bits = dict(quantization_of(network).allocation)
        bits |= {name: Choice(weight, 8) for name, weight in made.items()}
        record = replace(quantization_of(network), allocation=Allocation(bits))
        return with_quantization(network, record)

    monkeypatch.setattr(reproduction, "train", train)
    more = ("--rows", "fracbits-4.5")
    found = quick("table-ptq-resnet18", words, tmp_path, *more)["rows"]["fracbits-4.5"]
    bits = {name: int(text[1:].split("A")[0]) for name, text in found["bits"].items()}
    assert made.items() <= bits.items()
    total = sum((n + p) * bits[name] for name, (n, _, p) in LAYERS.items())
    assert found["mib"] * 2**20 == total / 8
    average = sum(n * bits[name] for name, (n, *_) in LAYERS.items())
    assert found["average_bits"] * sum(n for n, *_ in LAYERS.values()) == average


def test_channels_are_multiplied_as_the_budget_allows(tmp_path):
    pytest.importorskip("accelerate")
    words = ("--network", "cifar:resnet20", "--weights", "none", "--data", "random")
    more = ("--quick", "--device", "cpu", "--rows", "one-bitwidth", "--samples", "8")
    rows = quick("table-qat-resnet50", words, tmp_path, *more)["rows"]
    parameters = sum(p.numel() for p in CIFAR_NETWORKS["cifar:resnet20"]().parameters())
    share = 12.3 / EXPERIMENTS["table-qat-resnet50"].float_mib
    size = rows["one-bitwidth"]["mib"] * 2**20
    assert 0.9 * share < size / (4 * parameters) <= share


def test_the_baseline_is_the_float_network(words, tmp_path):
    rows = quick("table-ptq-resnet18", words, tmp_path, "--rows", "baseline")["rows"]
    found = rows["baseline"]
    assert found["mib"] * 2**20 == 4 * sum(n + p for n, _, p in LAYERS.values())
    assert (found["drop"], found["divergence"], found["agreement"]) == (0, 0, 1)
    table = tmp_path / "table-ptq-resnet18.md"
    assert "| baseline | Baseline | 32/32 |" in table.read_text()


@pytest.mark.parametrize(("network", "channels"), [("resnet18", 16), ("resnet56", 4)])
def test_the_networks_of_cifar_have_channels_to_multiply(
    network, channels, tmp_path, monkeypatch
):
    def build(make, *_args, **_more):
        raise ModelError(f"{make(0.25).conv1.out_channels} channels")

    monkeypatch.setattr(reproduction, "one_bitwidth", build)
    words = ("--network", f"cifar:{network}", "--weights", "none", "--data", "random")
    more = ("--quick", "--device", "cpu", "--rows", "one-bitwidth", "--samples", "8")
    rows = quick("table-qat-resnet50", words, tmp_path, *more)["rows"]
    assert rows["one-bitwidth"]["skipped"] == f"{channels} channels"


def test_the_channels_of_a_resnet_can_be_multiplied(tmp_path, monkeypatch):
    def build(make, *_args, **_more):
        made = make(0.5)
        widths = [m.out_channels for m in made.modules() if hasattr(m, "out_channels")]
        assert made(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
        raise ModelError(f"{widths[0]}, {widths[1]}, {widths[3]}, {widths[-1]}")

    monkeypatch.setattr(reproduction, "one_bitwidth", build)
    words = ("--weights", "none", "--data", "random", "--quick", "--device", "cpu")
    more = ("--rows", "one-bitwidth", "--samples", "8")
    rows = quick("table-qat-resnet50", words, tmp_path, *more)["rows"]
    # Those of ResNet-50 are 64, 64, 256 and 2,048.
    assert rows["one-bitwidth"]["skipped"] == "32, 32, 128, 1024"


def test_orthogonality_is_compared_at_one_size():
    for network in ("resnet18", "mobilenetv2"):
        rows = EXPERIMENTS[f"figure-orm-accuracy-{network}"].rows
        assert len({row.budget for row in rows}) == 1
        assert len({row.plan["score"] for row in rows}) == len(rows)


def test_layers_that_change_most_are_named(tmp_path):
    pytest.importorskip("matplotlib")
    figure = EXPERIMENTS["figure-orthogonality-bits-resnet18"]
    results = {
        row.name: {"layers": {f"layer{k}": 0.02 * k * row.at for k in range(6)}}
        for row in figure.rows
    }
    draw(figure, results, tmp_path)
    text = (tmp_path / f"{figure.name}.svg").read_text()
    assert "1 of 6 layers change by less than 0.01" in text
    assert [f">layer{k}<" in text for k in range(6)] == [False] * 2 + [True] * 4


def test_rows_of_rivals_say_what_is_simpler_here():
    for experiment in EXPERIMENTS.values():
        for row in experiment.rows:
            method = row.method.partition(",")[0]
            if method in SIMPLER and row.measure == "network":
                assert SIMPLER[method] in row.note, (experiment.name, row.name)


ABLATIONS = [
    name for name in EXPERIMENTS if name.split("-")[1] in ("functions", "granularity")
]


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_row_of_an_ablation_runs(name, words, tmp_path):
    pytest.importorskip("accelerate")
    table = EXPERIMENTS[name]
    rows = quick(name, words, tmp_path)["rows"]
    assert rows.keys() == {row.name for row in table.rows}
    # On so few layers, shifted to be positive, they find all choices equally good.
    flat = {"-x", "-x^3", "-exp(x)"}
    assert {key for key, row in rows.items() if "skipped" in row} <= flat
    pinned = {"stem", "fc"} if "resnet18" in name else set()
    free = LAYERS.keys() - pinned
    for row in table.rows:
        found = rows[row.name]
        if "skipped" in found:
            assert "every choice of every layer" in found["skipped"]
            continue
        assert 0 <= found["top1"] <= 1
        bits = {unit: text.split("A")[0] for unit, text in found["bits"].items()}
        assert all(bits[unit] == "W8" for unit in pinned)
        # One width for all that a function stands for.
        together = {"net": [free], "block": [free - {"stem", "fc"}]}
        for units in together.get(row.name, []):
            assert len({bits[unit] for unit in units}) == 1
        total = sum((n + p) * int(bits[unit][1:]) for unit, (n, _, p) in LAYERS.items())
        assert found["mib"] * 2**20 == total / 8
    text = (tmp_path / f"{name}.md").read_text()
    assert all(f"| {row.name} | {row.name} | \\*/8 |" in text for row in table.rows)


FIGURES = (
    "table-calculation-time-resnet18",
    "figure-search-cost-resnet18",
    "figure-beta-mobilenetv2",
    "figure-method-resnet18",
    "figure-orm-accuracy-resnet18",
    "figure-orthogonality-bits-resnet18",
    "figure-bits-resnet18",
    "figure-orm-matrices-resnet18",
)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(name, words, tmp_path):
    pytest.importorskip("matplotlib")
    files = quick(name, words, tmp_path)["files"]
    endings = {path.rpartition(".")[2] for path in files}
    drawn = {"svg", "pdf", "png"} if name.startswith("figure") else set()
    assert endings == {"json", "md"} | drawn
    if drawn:
        text = (tmp_path / f"{name}.svg").read_text()
        expected = {
            "search": "BRECQ",
            "beta": "β",
            "orthogonality": "of 5 layers change by less than 0.01",
        }
        if name == "figure-orm-accuracy-resnet18":
            assert "16 lists of bits in " in text
        else:
            assert expected.get(name.split("-")[1], "block.conv1") in text
    data = json.loads((tmp_path / f"{name}.json").read_text())
    assert data["rows"].keys() == {row.name for row in EXPERIMENTS[name].rows}


def test_accuracy_against_size_has_all_methods_in_one_plot(words, tmp_path):
    pytest.importorskip("matplotlib")
    name = "figure-ompq-brecq-mobilenetv2"
    quick(name, words, tmp_path, "--rows", "*0.9")
    quick(name, words, tmp_path, "--rows", "unified-[34]")
    text = (tmp_path / f"{name}.svg").read_text()
    assert all(method in text for method in ("OMPQ", "BRECQ", "ours", "unified"))


def test_a_row_is_run_once(words, tmp_path, monkeypatch):
    name = "figure-bits-resnet18"
    first = quick(name, words, tmp_path)["rows"]

    def never(*_):
        raise AssertionError("not reached")

    monkeypatch.setitem(reproduction._MEASURES, "plan", never)
    assert quick(name, words, tmp_path)["rows"] == first


# Data of another name; 64 images is what --quick judges on.
OTHER_DATA = """
import torch

def images():
    return torch.randn(80, 3, 8, 8), torch.arange(80) % 10
"""


@pytest.mark.parametrize("setting", ["seed", "limit", "eval_data"])
def test_a_row_of_other_settings_is_neither_reused_nor_overwritten(
    setting, words, tmp_path
):
    (tmp_path / "other.py").write_text(OTHER_DATA)
    value = {"seed": "1", "limit": "32", "eval_data": f"{tmp_path}/other.py:images"}
    option = (f"--{setting.replace('_', '-')}", value[setting])
    name, row = "table-ptq-resnet18", ("--rows", "ompq-4")
    first = quick(name, words, tmp_path / "a", *row)["rows"]["ompq-4"]
    saved = tmp_path / "a" / name / "ompq-4.json"
    before = saved.read_text()
    result = run("reproduce", name, *words, *row, *option, "-o", tmp_path / "a")
    assert result.exit_code == 2
    message = f"was measured with a different {setting};"
    assert message in " ".join(result.stderr.split())
    assert saved.read_text() == before
    saved.unlink()  # as the message says
    again = quick(name, words, tmp_path / "a", *row, *option)["rows"]["ompq-4"]
    assert again["divergence"] != first["divergence"]
    assert again["count"] == (32 if setting == "limit" else 64)


def test_a_row_that_cannot_be_tells_why(tmp_path):
    (tmp_path / "net.py").write_text(NETWORK)  # whose norms were never trained
    words = ("--network", f"{tmp_path / 'net.py'}:make", "--data", "random", "--quick")
    folder = tmp_path / "out"
    rows = quick("table-ptq-resnet18", words, folder, "--rows", "zeroq")["rows"]
    assert "batch norms of Net hold only initial values" in rows["zeroq"]["skipped"]
    [kept] = (folder / "table-ptq-resnet18").glob("*.json")
    assert "hold only initial values" in kept.read_text()
    assert "hold only initial values" in (folder / "table-ptq-resnet18.md").read_text()


def test_the_list_names_every_table_figure_and_row():
    entries = run_json("reproduce", "--list")
    found = [(entry["name"], entry["row"]) for entry in entries]
    assert found == [(e.name, r.name) for e in EXPERIMENTS.values() for r in e.rows]
    assert len(found) == len(set(found))
    shown = run("reproduce", "--list").stdout
    assert all(name in shown for name in EXPERIMENTS)
    assert "32bits" not in shown  # one width for all has no budget
    assert "…" not in shown


def test_published_numbers_are_the_papers():
    by_name = {
        (e.name, r.name): r.published for e in EXPERIMENTS.values() for r in e.rows
    }
    assert by_name["table-ptq-mobilenetv2", "ompq-1.5"] == 71.39
    assert by_name["table-ptq-resnet18", "ompq-4.5-a4"] == 68.69
    assert by_name["table-ptq-resnet18", "zeroq"] == 21.20
    assert by_name["table-qat-resnet18", "ompq-a6"] == 72.08
    assert by_name["table-qat-resnet50", "haq"] == 75.48
    assert by_name["table-functions-resnet18", "-x"] == 72.36
    assert by_name["table-granularity-mobilenetv2", "net"] == 63.99
    others = {(e.name, r.name): r.paper for e in EXPERIMENTS.values() for r in e.rows}
    assert others["table-ptq-resnet18", "brecq-distilled"] == {"mib": 5.81}
    mixed = {"mib": 18.7, "bit_ops": 154e9}
    assert others["table-qat-resnet50", "hawq-v3-mixed"] == mixed
    times = {"inner_product": 0.12, "norm": 8.40, "ratio": 70}
    assert others["table-calculation-time-resnet18", "100x10000"] == times
    assert others["figure-search-cost-resnet18", "fracbits"] == {"images": 1_200_000}


def test_the_documented_rivals_are_those_of_the_paper():
    page = Path(__file__).parents[2] / "docs" / "method.md"
    section = page.read_text().partition("### Rivals in Table 4\n")[2].partition("#")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines()]
    documented = {
        (cells[0], *map(float, cells[2:5]))
        for cells in lines
        if len(cells) == 6 and "," in cells[0]
    }
    expected = {
        (
            f"{table.title.split(', ')[1]}, {row.method}",
            row.paper["mib"],
            row.published,
            round(table.float_top1 - row.published, 2),
        )
        for name in ("table-ptq-resnet18", "table-ptq-mobilenetv2")
        for table in [EXPERIMENTS[name]]
        for row in table.rows
        if row.published and row.method not in ("OMPQ", "Baseline") and not row.bits
    }
    assert documented == expected


def test_rows_name_what_there_is():
    for experiment in EXPERIMENTS.values():
        for row in experiment.rows:
            assert row.protocol in PLAN_PROTOCOLS
            assert row.train is None or row.train in TRAIN_PROTOCOLS


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "give a table or figure"),
        (("table-ptq-resnet81",), "did you mean table-ptq-resnet18"),
        (("table-ptq-resnet18",), "--data is missing"),
        (
            (
                *("table-ptq-resnet18", "--network", "ompq:demo"),
                *("--data", "random", "--rows", "no*"),
            ),
            "no row of table-ptq-resnet18 matches 'no*'; it has",
        ),
    ],
)
def test_wrong_arguments_are_explained(more, message, tmp_path):
    result = run("reproduce", *more, "-o", tmp_path, "--samples", "8", "--quick")
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


def bench(network, folder, name="table-qat-resnet18"):
    model = NamedModel.__new__(NamedModel)
    object.__setattr__(model, "module", network)
    object.__setattr__(model, "name", "net.py:make")
    object.__setattr__(model, "input_shape", (3, 8, 8))
    return Bench(
        EXPERIMENTS[name],
        model,
        load_data("random", model),
        Samples.of(images(16)),
        load_data("random", model).batches(limit=16),
        folder / name,
        quick=True,
    )


def test_halfway_is_between_four_and_eight_bits_everywhere(tmp_path):
    made = bench(seeded(TinyResNet()), tmp_path)
    row = next(r for r in EXPERIMENTS["table-qat-resnet18"].rows if r.budget == HALFWAY)
    plan = plan_row(replace(row, plan={"score": "weight_noise", "pinned": {}}), made)
    macs = sum(unit.macs for unit in plan.graph.units)
    assert plan.budget.bit_ops == macs * (4 * 4 + 8 * 8) / 2
    assert plan.totals["bit_ops"] <= plan.budget.bit_ops
    assert {str(choice) for choice in plan.allocation.values()} == {"W4A4", "W8A8"}


def unlabelled(data):
    return replace(data, label_problem="no labels")


def of_vectors(data):
    return replace(data, read=lambda at: (data.read(at)[0], torch.zeros(3)))


@pytest.mark.parametrize("changed", [None, unlabelled, of_vectors])
def test_hawq_has_labels_if_there_are_any(changed, tmp_path):
    made = bench(seeded(TinyResNet()), tmp_path)
    row = next(r for r in EXPERIMENTS["table-qat-resnet18"].rows if r.budget == HALFWAY)
    labelled = list(made.data.batches(batch_size=7, limit=32))
    if changed is not None:
        made, labelled = replace(made, data=changed(made.data)), None
    config = replace(
        PLAN_PROTOCOLS["hawq-v3"],
        score=Hessian(batches=labelled, samples=2, probes=1),
        **row.plan,
    )
    expected = ompq.plan(made.model.module, made.samples[:8], "32bits", config)
    assert np.allclose(plan_row(row, made).scores.damage, expected.scores.damage)
    batches = load_data("random", made.model).batches(limit=32)
    given = Hessian(batches=batches, samples=2, probes=1)
    labels = replace(config, score=given)
    found = ompq.plan(made.model.module, made.samples[:8], "32bits", labels)
    same = np.allclose(found.scores.damage, expected.scores.damage)
    assert same == (changed is None)


def test_rows_share_their_score_table_unless_they_time_it(words, tmp_path):
    quick("table-ptq-resnet18", words, tmp_path, "--rows", "ompq-4.5")
    quick("table-ptq-resnet18", words, tmp_path, "--rows", "ompq-4")
    [table] = (tmp_path / "scores").glob("Orm-*.json")
    assert table.stat().st_size > 0
    quick("figure-search-cost-resnet18", words, tmp_path)
    assert [*(tmp_path / "scores").iterdir()] == [table]


def test_the_exact_solver_has_brecqs_table(tmp_path):
    made = bench(seeded(TinyResNet()), tmp_path, "table-ptq-mobilenetv2")
    rows = {row.name: row for row in made.experiment.rows}
    genetic, exact = (plan_row(rows[n], made) for n in ("brecq-1.5", "brecq-exact-1.5"))
    assert np.array_equal(genetic.scores.damage, exact.scores.damage)
    assert (genetic.method, exact.method) == ("genetic", "exact")
    assert exact.gap == 0
    assert exact.damage <= genetic.damage


@pytest.mark.parametrize(
    ("name", "stage"), [("ompq-4", "reconstructing"), ("fracbits-4.5", "training")]
)
def test_a_row_that_was_stopped_continues_where_it_was(name, stage, tmp_path):
    pytest.importorskip("accelerate")
    [row] = [r for r in EXPERIMENTS["table-ptq-resnet18"].rows if r.name == name]
    seen = []

    def measured(folder, stop_at=None):
        @contextmanager
        def bar(shown):
            def progress(done, _total, message):
                if shown == stage:
                    seen.append(done)
                    if done == stop_at:
                        raise KeyboardInterrupt

            yield progress

        seen.clear()
        made = bench(seeded(TinyResNet()), tmp_path / folder, "table-ptq-resnet18")
        return reproduction._network(row, replace(made, stages=Stages(bar)))

    whole = measured("a")
    every = [*seen]
    with pytest.raises(KeyboardInterrupt):
        measured("b", stop_at=every[1])  # in the second block, or epoch
    assert measured("b") == whole
    assert len(seen) < len(every)
    assert not [*(tmp_path / "b" / "table-ptq-resnet18").glob(f"{name}*")]


def test_budgets_keep_their_share_on_another_network(tmp_path):
    made = bench(seeded(TinyResNet()), tmp_path, "table-ptq-resnet18")
    assert made.budget("4.0MiB") == f"{100 * 4 / 44.6:.4g}%"
    assert made.budget("3bits") == "3bits"
    rows = {row.name: row for row in made.experiment.rows}
    tiny = replace(rows["ompq-4.5"], budget="0.1MiB")
    plan = plan_row(tiny, made)  # too small: halfway instead
    assert set(plan.allocation.values()) <= {*plan.choices}
    assert trace(made.model.module, made.samples).names == plan.graph.names
    assert torch.isfinite(torch.tensor(plan.damage))


def test_both_ways_to_the_product_agree_with_the_definition():
    y, z = torch.randn(2, 30, 7, generator=torch.Generator().manual_seed(0))
    wanted = (z.double().T @ y.double()).square().sum()
    for way in (reproduction.inner_product, reproduction.squared_norm):
        assert torch.isclose(way(y, z), wanted, rtol=1e-5)
        assert way(y, z).dtype == torch.float64


def test_times_need_no_data_and_stand_beside_the_papers_ratio(tmp_path):
    name = "table-calculation-time-resnet18"
    found = run_json("reproduce", name, "--quick", "-o", tmp_path, "--device", "cpu")
    assert all(row["ratio"] >= 1 for row in found["rows"].values())
    page = (tmp_path / f"{name}.md").read_text()
    assert "the faster by a factor of, paper" in page and "| 54 |" in page


def test_a_skipped_row_keeps_its_reason_and_strict_fails(words, tmp_path):
    name = "table-qat-resnet50"
    first = quick(name, words, tmp_path, "--rows", "one-bitwidth")
    assert first["skipped"] == ["one-bitwidth"]
    again = quick(name, words, tmp_path, "--rows", "baseline")
    assert "skipped" in again["rows"]["one-bitwidth"]
    assert "channels can be multiplied" in (tmp_path / f"{name}.md").read_text()
    strict = ("--rows", "baseline", "--strict", "-o", tmp_path)
    failed = run("reproduce", name, *words, *strict)
    assert failed.exit_code == 2
    assert "1 of 2 rows were not run, and" in " ".join(failed.stderr.split())
