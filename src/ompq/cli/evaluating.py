"""evaluate: how well a network does."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from ompq.cli.options import DataOptions, NetworkOptions, OutputOptions, one_of, option
from ompq.cli.screen import Screen, muted, opened
from ompq.cli.settings import load_inputs, load_network
from ompq.cli.shown import (
    MEANS_NOTHING,
    accuracy_text,
    meaningless,
    time_line,
    warning_text,
)
from ompq.cli.tables import facts
from ompq.evaluation import Evaluation
from ompq.evaluation import evaluate as measure
from ompq.integer.engine import IntegerNetwork
from ompq.models import NamedModel
from ompq.packing import load
from ompq.samples import SamplesLike

LimitOption = Annotated[
    int | None,
    option(
        min=1,
        metavar="NUMBER",
        text="Take only so many images, spread over the classes. Default: all.",
    ),
]
BatchOption = Annotated[
    int, option(min=1, metavar="NUMBER", text="Images a batch. Default: 64.")
]
PackedOption = Annotated[
    Path | None,
    option(
        metavar="FILE",
        text="Evaluate this packed network, which ompq quantize or ompq train wrote.",
    ),
]
_ENGINES = ("simulated", "integer")
EngineOption = Annotated[
    str,
    one_of(
        _ENGINES,
        text="what computes a packed network: PyTorch, or integers alone on the CPU, "
        "which is slow. Default: simulated.",
    ),
]


def evaluate(
    network: NetworkOptions,
    data: DataOptions,
    output: OutputOptions,
    packed: PackedOption = None,
    engine: EngineOption = _ENGINES[0],
    limit: LimitOption = None,
    batch_size: BatchOption = 64,
) -> None:
    """Measure a network's accuracy, with its 95 % interval.

    Examples:
      ompq evaluate torchvision:resnet18 --data imagenet/val
      ompq evaluate torchvision:resnet18 --weights r18.pth --data imagenet/val
      ompq evaluate cifar:resnet20 --weights r20.safetensors --data cifar
        --limit 1000
      ompq evaluate ompq:demo --data digits --json
      ompq evaluate ompq:demo --packed out/network.ompq.safetensors --data digits
        --engine integer --limit 100

    The data holds one folder a class; a folder with train and test (or val) inside
    is evaluated on test.
    """
    if engine == "integer" and packed is None:
        raise ValueError(
            "--engine integer computes packed networks; give one with --packed FILE"
        )
    with opened(output) as screen:
        model = _loaded(network, packed, screen)
        inputs = load_inputs(data, model, "test")
        batches = inputs.batches(batch_size=batch_size, limit=limit)
        judged = model.module
        if engine == "integer":
            judged = _integers(judged, inputs.samples(1))
        with screen.stage("evaluating") as progress:
            result = measure(judged, batches, progress=progress)
        about = {"network": model.name, "weights": model.weights, "data": inputs.name}
        if packed is not None:
            about["engine"] = engine
        if screen.json:
            screen.show_json({**about, **result.to_json(), "seconds": screen.seconds})
        elif screen.quiet:
            screen.show(accuracy_text(result))
        else:
            screen.show(facts(_rows(about, result, screen.seconds)))
            nothing = meaningless(about)
            if nothing:
                screen.show(warning_text(f"{nothing}: the numbers {MEANS_NOTHING}"))


def _loaded(options: NetworkOptions, packed: Path | None, screen: Screen) -> NamedModel:
    if packed is None:
        return load_network(options, screen)
    # The file holds all weights; those of the network it was made from do not matter.
    with muted():
        model = load_network(replace(options, weights="none"), screen)
    return replace(model, module=load(packed, model.module), weights=str(packed))


def _integers(quantized: nn.Module, samples: SamplesLike) -> nn.Module:
    return IntegerNetwork.from_quantized(quantized.cpu(), samples)


def _rows(
    about: dict[str, Any], result: Evaluation, seconds: dict[str, float]
) -> list[tuple[str, str]]:
    rows = [
        ("network", f"{about['network']}, weights {about['weights']}"),
        ("data", about["data"]),
        *([("engine", about["engine"])] if "engine" in about else []),
        ("top-1", accuracy_text(result)),
    ]
    if result.top5 is not None:
        rows.append(("top-5", f"{100 * result.top5:.2f} %"))
    return [
        *rows,
        ("speed", f"{result.images_per_second:,.0f} images a second"),
        ("time", time_line(seconds)),
    ]
