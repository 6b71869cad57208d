"""evaluate: how well a network does."""

from typing import Annotated, Any

from ompq.cli.options import DataOptions, NetworkOptions, OutputOptions, option
from ompq.cli.screen import opened
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


def evaluate(
    network: NetworkOptions,
    data: DataOptions,
    output: OutputOptions,
    limit: LimitOption = None,
    batch_size: BatchOption = 64,
) -> None:
    """Measure a network's accuracy, with its 95 % interval.

    Examples:
      ompq evaluate torchvision:resnet18 --data imagenet/val
      ompq evaluate torchvision:resnet18 --weights r18.pth --data imagenet/val
      ompq evaluate cifar:resnet20 --weights r20.safetensors --data cifar --limit 1000
      ompq evaluate ompq:demo --data digits --json

    The data holds one folder a class; a folder with train and test (or val) inside
    is evaluated on test.
    """
    with opened(output) as screen:
        model = load_network(network, screen)
        inputs = load_inputs(data, model, "test")
        batches = inputs.batches(batch_size=batch_size, limit=limit)
        with screen.stage("evaluating") as progress:
            result = measure(model.module, batches, progress=progress)
        about = {"network": model.name, "weights": model.weights, "data": inputs.name}
        if screen.json:
            screen.show_json({**about, **result.to_json(), "seconds": screen.seconds})
        elif screen.quiet:
            screen.show(accuracy_text(result))
        else:
            screen.show(facts(_rows(about, result, screen.seconds)))
            nothing = meaningless(about)
            if nothing:
                screen.show(warning_text(f"{nothing}: the numbers {MEANS_NOTHING}"))


def _rows(
    about: dict[str, Any], result: Evaluation, seconds: dict[str, float]
) -> list[tuple[str, str]]:
    rows = [
        ("network", f"{about['network']}, weights {about['weights']}"),
        ("data", about["data"]),
        ("top-1", accuracy_text(result)),
    ]
    if result.top5 is not None:
        rows.append(("top-5", f"{100 * result.top5:.2f} %"))
    return [
        *rows,
        ("speed", f"{result.images_per_second:,.0f} images a second"),
        ("time", time_line(seconds)),
    ]
