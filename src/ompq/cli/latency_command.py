"""latency: what every layer takes in a runtime, for budgets in milliseconds."""

from dataclasses import replace
from pathlib import Path

from ompq.amounts import percent
from ompq.cli.console import Column, Console, View, facts, mute_warnings
from ompq.cli.loading import load_network
from ompq.cli.option_groups import NetworkOptions
from ompq.cli.options import check_threads, check_writable
from ompq.datasets.named_data import load_data
from ompq.runtimes.latency import Latency, measure_latency
from ompq.targets import load_target

_SAMPLES, _BASE = 4, "W8A8"


def run_latency(
    network: NetworkOptions,
    console: Console,
    target: str,
    file: Path | None,
    repeats: int,
) -> View:
    """Measure every layer of a network at every width that a runtime computes with."""
    threads = network.threads or 1
    check_threads(threads)
    if file is not None:
        check_writable(file)
    with mute_warnings():  # times do not depend on the weights, which may be random
        weights = network.weights or "none"
        given = replace(network, weights=weights, threads=threads)
        model = load_network(given, console)
        samples = load_data("random", model, split="train").samples(_SAMPLES)
    with console.stage("measuring") as progress:
        found = measure_latency(
            model.module,
            samples,
            load_target(target),
            repeats=repeats,
            threads=threads,
            progress=progress,
        )
    if file is not None:
        found.save(file)
    return latency_view(found, file)


def latency_view(found: Latency, file: Path | None) -> View:
    """Return the milliseconds of layers, and how well they add up."""
    every = list(dict.fromkeys(one for row in found.table.values() for one in row))
    # Widths that all layers compute in 8 bits are left out.
    choices = [
        one
        for one in every
        if one == _BASE
        or any(row.get(one) != row.get(_BASE) for row in found.table.values())
    ]
    columns = [Column("layer", list(found.table), "left", shorten=True)]
    for choice in choices:
        known = [row.get(choice) for row in found.table.values()]
        cells = ["" if ms is None else f"{ms:.4f}" for ms in known]
        columns.append(Column(f"{choice}, ms", cells))
    checks = [f"{told:.3g} for {real:.3g}" for told, real in found.checks]
    error = f"{percent(found.error)}: {', '.join(checks)} ms" if checks else ""
    saved = "" if file is None else f"; saved to {file}"
    rows = [
        ("runtime", found.runtime),
        ("network", f"{found.base:.4g} ms with all layers in 8 bits{saved}"),
        ("error", error or "all widths take the same time, so there is nothing to add"),
    ]
    line = f"{found.runtime}: {found.base:.4g} ms in 8 bits{saved}"
    data = {
        "runtime": found.runtime,
        "base": found.base,
        "table": found.table,
        "checks": [list(pair) for pair in found.checks],
        "error": found.error,
    }
    return View(data, line, [columns, "", facts(rows)])
