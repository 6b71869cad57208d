"""reproduce: the paper's tables and figures, with its settings and its rivals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from ompq.cli.console import Console, View, opened, render, say
from ompq.cli.options import (
    OutputOptions,
    argument,
    check_folder,
    flag,
    number,
    one_of,
    option,
    output_path,
)
from ompq.cli.settings import NetworkOptions, read_samples
from ompq.cli.views import Column, fitted
from ompq.datasets.sources import load_data
from ompq.reproduction import (
    EXPERIMENTS,
    Bench,
    Experiment,
    Row,
    reproduce as run_experiment,
)
from ompq.reproduction.registry import ANY
from ompq.userfiles import suggestion

CALIBRATION, QUICK_SAMPLES, QUICK_IMAGES = 1024, 16, 64
FOLDER = Path("reproduced")


def reproduce(
    output: OutputOptions,
    name: Annotated[
        str | None, argument("NAME", "A table or figure, from --list.")
    ] = None,
    listed: bool = flag("List every table, figure and row.", "--list"),
    data: str | None = option(
        None, "SOURCE", "Labelled images to train with and to take samples from."
    ),
    eval_data: str | None = option(
        None, "SOURCE", "Labelled images to measure accuracy on. Default: --data."
    ),
    network: str | None = option(
        None, "NETWORK", "Another network than the paper's, as for ompq plan."
    ),
    weights: str | None = option(None, "FILE", "As for ompq plan."),
    device: str = one_of("auto", ("auto", "cpu", "cuda"), "where to run."),
    rows: str = option("*", "PATTERN", "Rows to run: ompq-*. Default: all."),
    folder: Path = output_path(
        f"Where the files go. Default: {FOLDER}/.", "DIR", FOLDER
    ),
    samples: int | None = number(
        None, "Images to calibrate with.", f"{CALIBRATION}, or all", least=8
    ),
    limit: int | None = number(None, "Measure on so many images only.", "all"),
    seed: int = number(0, "Seed for the choice of images and the order.", least=None),
    quick: bool = flag(
        "Scale every row down, to try it in minutes; the numbers mean nothing.",
        "--quick",
    ),
) -> None:
    """Run a table or a figure of the paper, row by row, rivals included.

    Examples:
      ompq reproduce --list
      ompq reproduce table-ptq-mobilenetv2 --data imagenet/ --weights mbv2.pth
        -o out/
      ompq reproduce table-ptq-resnet18 --data imagenet/ --rows 'ompq-*' -o out/
      ompq reproduce figure-beta-mobilenetv2 --network ompq:demo --data digits
        --quick

    Writes NAME.json, NAME.md (a table beside the paper's numbers) and the figure as
    SVG, PDF and PNG. Each row is kept when it is there: a stopped run continues with
    the same command. Training rows take days on ImageNet; --rows leaves them out.
    """
    with opened(output) as console:
        if listed:
            render(_list_view(), console)
            return
        experiment = _experiment(name)
        if data is None:
            raise ValueError("--data is missing: give a folder of labelled images")
        check_folder(folder)
        options = NetworkOptions(
            network=network or experiment.network, weights=weights, device=device
        )
        model = options.load(console)
        inputs = load_data(data, model, split="train", seed=seed)
        judged = load_data(eval_data or data, model, split="test", seed=seed)
        count = samples or min(CALIBRATION, len(inputs))
        count = min(count, QUICK_SAMPLES) if quick else count
        images = read_samples(inputs, count, console)
        bench = Bench(
            experiment,
            model,
            inputs,
            images,
            judged.batches(limit=_limit(limit, len(judged), quick=quick)),
            folder / experiment.name,
            quick=quick,
            seed=seed,
            stages=console.stages,
        )
        found: dict[str, Mapping[str, Any]] = {}
        files = run_experiment(
            bench, folder, rows=rows, told=lambda *one: _tell(console, found, *one)
        )
        names = [str(path) for path in files]
        line = f"{experiment.name}: {len(found)} rows, {', '.join(names)}"
        render(View({"rows": found, "files": names}, line, lambda _: [line]), console)


def _experiment(name: str | None) -> Experiment:
    if name is None:
        raise ValueError("name a table or figure; ompq reproduce --list shows them")
    if name not in EXPERIMENTS:
        raise ValueError(
            f"there is no {name!r}{suggestion(name, EXPERIMENTS)}; "
            "ompq reproduce --list shows what there is"
        )
    return EXPERIMENTS[name]


def _limit(asked: int | None, length: int, *, quick: bool) -> int | None:
    return asked or (min(QUICK_IMAGES, length) if quick else None)


def _tell(
    console: Console, found: dict[str, Mapping[str, Any]], row: Row, result: Any
) -> None:
    found[row.name] = result
    top1 = result.get("top1")
    text = "" if top1 is None else f" top-1 {100 * top1:.2f}"
    text = f" not run: {result['skipped']}" if "skipped" in result else text
    paper = "" if row.published is None else f" (the paper: {row.published:.2f})"
    if not console.quiet:
        say(console.err, f"{row.name}:{text}{paper}, {result['seconds']:.1f} s")


def _list_view() -> View:
    entries = [(one, row) for one in EXPERIMENTS.values() for row in one.rows]
    data = [
        {
            "name": one.name,
            "title": one.title,
            "network": one.network,
            "row": row.name,
            "method": row.method,
            "budget": row.budget,
            "train": row.train,
            "published": row.published,
        }
        for one, row in entries
    ]
    names = ["" if one.rows[0] is not row else one.name for one, row in entries]
    columns = [
        Column("table or figure", names, "left"),
        Column("row", [row.name for _, row in entries], "left"),
        Column("method", [row.method for _, row in entries], "left", rank=2),
        Column("budget", ["" if r.budget == ANY else r.budget for _, r in entries]),
        Column("training", [row.train or "" for _, row in entries], "left", rank=1),
        Column("top-1, paper", [_shown(row.published) for _, row in entries]),
    ]
    line = f"{len(EXPERIMENTS)} tables and figures, {len(entries)} rows"
    return View(data, line, lambda width: [fitted(columns, width)])


def _shown(top1: float | None) -> str:
    return "" if top1 is None else f"{top1:.2f}"
