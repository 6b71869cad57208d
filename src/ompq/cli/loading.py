"""Networks, data and metrics, as options name them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ompq.cli.console import Console
from ompq.cli.option_groups import NetworkOptions, PlanOptions, SourceOptions, shape_of
from ompq.cli.options import check_threads, kebab
from ompq.configs import SCORE_NAMES, OrmSettings, PlanConfig
from ompq.datasets.named_data import Batches, Data, Split, load_data
from ompq.errors import DataError, suggestion
from ompq.evaluation import METRICS
from ompq.files import shown
from ompq.models.named_models import NamedModel, load_model
from ompq.offload import device_memory
from ompq.planning import chosen_score
from ompq.samples import Samples, model_device
from ompq.scores.catalogue import named_score, with_orm_settings
from ompq.user_functions import is_user_function, user_function
from ompq.workflow import PLAN_SAMPLES, paper_samples
from ompq.working_memory import host_memory

_HOST_BATCH = 16  # samples in a forward pass of evaluation on a CPU, for their memory


def load_network(options: NetworkOptions, console: Console) -> NamedModel:
    """Load the network onto its device."""
    shape = shape_of(options.input_shape)
    use_threads(options.threads)
    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        raise ValueError("--device cuda: PyTorch finds no GPU; use --device cpu")
    device = "cuda" if available and options.device != "cpu" else "cpu"
    console.until_done.enter_context(host_memory(options.memory))
    with console.stage("loading the network"):
        model = load_model(options.network, options.weights)
        model = model if shape is None else model.at(shape)
        if options.device_memory is None:
            model.module.to(device)
        else:
            limited = device_memory(options.device_memory, device)
            console.until_done.enter_context(limited)
    return model


def use_threads(threads: int | None) -> None:
    """Let PyTorch, and runtimes beside it, use this many threads."""
    if threads is not None:
        check_threads(threads)
        torch.set_num_threads(threads)


def find_data(
    options: SourceOptions, model: NamedModel, split: Split = "train"
) -> Data:
    """Find the data that ``--data`` names."""
    return load_data(
        options.data,
        model,
        split=split,
        seed=options.seed,
        skip_unreadable=options.skip_unreadable,
    )


def labelled_batches(
    options: SourceOptions,
    source: str | None,
    model: NamedModel,
    limit: int | None = None,
) -> Batches | None:
    """Return labelled batches from another source, or None if there is none."""
    if source is None:
        return None
    data = find_data(replace(options, data=source), model, "test")
    on_host = model_device(model.module).type == "cpu"
    return data.batches(batch_size=_HOST_BATCH if on_host else 64, limit=limit)


def read_samples(data: Data, count: int, console: Console) -> Samples:
    """Read unlabelled inputs."""
    with console.stage("reading samples") as progress:
        return Samples.of(data.samples(count, progress=progress))


def user_metrics(name: str | None) -> dict[str, Callable[..., Any]]:
    """Return the metric that ``--metric`` names, by its short name."""
    if name is None or name in METRICS:
        return {} if name is None else {name: METRICS[name]}
    if not is_user_function(name):
        known = ", ".join(METRICS)
        raise ValueError(f"--metric {name}: write {known} or FILE.py:FUNCTION")
    return {name.rpartition(":")[2]: user_function(name, DataError)}


def decoder_metrics(model: NamedModel) -> dict[str, Callable[..., Any]]:
    """Return the metric of a network that continues texts; none for other networks."""
    return {name: METRICS[name] for name in ("perplexity",) if model.tokenizer}


def plan_count(protocol: str | None, network: str) -> int:
    """Return how many samples to plan with; published work has its own number."""
    return PLAN_SAMPLES if protocol in (None, "ours") else paper_samples(network)


def check_score(config: PlanConfig, of_orm: list[str]) -> None:
    """Raise a ValueError if options are for ORM, but the score does not measure it."""
    try:
        chosen_score(config)
    except ValueError as error:
        raise ValueError(f"{' and '.join(of_orm)}: {error}; add --score orm") from error


def with_orm_options(
    scores: Iterable[str], planning: PlanOptions, option: str
) -> tuple[Any, ...]:
    """Return the scores, with the ORM options applied to those that measure it.

    Raises:
        ValueError: Options are given for ORM, but no score measures it.
    """
    given, settings = list(scores), planning.config().orm
    if not planning.of_orm or settings is None:
        return tuple(given)
    found = [named_score(name) for name in given]
    measuring = [isinstance(getattr(s, "settings", None), OrmSettings) for s in found]
    if not any(measuring):
        raise ValueError(
            f"{' and '.join(planning.of_orm)}: settings of ORM are for scores that "
            f"measure it, orm or orm-distortion, not {', '.join(map(kebab, given))}; "
            f"add {option} orm"
        )
    return tuple(
        with_orm_settings(score, settings) if measures else score
        for score, measures in zip(found, measuring, strict=True)
    )


def unknown_score(name: str) -> str:
    """Return the message for a score that does not exist."""
    known = [kebab(one) for one in SCORE_NAMES]
    shown = kebab(name)
    similar = suggestion(shown, known)
    return f"there is no score {shown!r}{similar}; use {', '.join(known)}"


def provenance(inputs: Data, **more: Any) -> dict[str, Any]:
    """Return what a result was made from: network, weights, data, seed, device."""
    model = inputs.model
    origin = {"network": model.name, "weights": model.weights, "data": inputs.name}
    device = str(model_device(model.module))
    about = {**origin, **more, "seed": inputs.seed, "device": device}
    # Names of files may hold anything; what they end up in must be readable.
    return {k: shown(v) if isinstance(v, str) else v for k, v in about.items()}
