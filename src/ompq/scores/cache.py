"""A folder of score tables, so that a second plan need not compute them again."""

import json
import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ompq.files import (
    json_object,
    library_version,
    read_json,
    tensors_digest,
    write_text,
)
from ompq.graph import Choice, LayerGraph
from ompq.recording import tensors_in
from ompq.samples import Samples, model_device
from ompq.scores.table import Score, ScoreTable, checked

logger = logging.getLogger(__name__)
FORMAT = "ompq-score-table/1"


def cached_table(
    folder: str | Path,
    score: Score,
    graph: LayerGraph,
    model: nn.Module,
    samples: Samples,
    choices: Sequence[Choice],
) -> ScoreTable:
    """Return the table that a folder keeps, or compute it and keep it there.

    A damaged file is computed again, with a warning. So is, always, the table of a
    score of one's own, or of one with labelled batches: what it depends on is not
    known.
    """
    own = not type(score).__module__.startswith("ompq.")
    if own or getattr(score, "batches", None) is not None:
        logger.warning(
            "the score table is not kept in %s: only those of ompq's own scores, "
            "without labels, are",
            folder,
        )
        return checked(score(graph, model, samples, choices), graph, choices)
    about = _about(score, graph, model, samples, choices)
    key = tensors_digest(about, {})[:16]
    path = Path(folder) / f"{type(score).__name__}-{key}.json"
    shape = len(graph), len(choices)
    if path.exists():
        try:
            data = json_object(read_json(path), "a score table")
            if {name: data.get(name) for name in about} != about:
                raise ValueError("it belongs to another network, data or score")
            return ScoreTable.from_json(data, *shape)
        except (ValueError, KeyError) as error:
            logger.warning("%s is damaged (%s): computing it again", path, error)
    found = checked(score(graph, model, samples, choices), graph, choices)
    saved = found.to_json()
    write_text(path, json.dumps({**about, **saved}, indent=1) + "\n")
    return ScoreTable.from_json(saved, *shape)


def _about(
    score: Score,
    graph: LayerGraph,
    model: nn.Module,
    samples: Samples,
    choices: Sequence[Choice],
) -> dict[str, Any]:
    """Return everything that a table depends on."""
    # The modules' text tells networks apart that have the same weights.
    network = [graph.to_json(), repr(model)]
    named = [name for name, _ in chain(model.named_parameters(), model.named_buffers())]
    weights = chain(model.parameters(), model.buffers())
    forms = [sorted(run) if isinstance(run, dict) else "" for run in samples.runs]
    inputs = (
        [run[key] for key in sorted(run)] if isinstance(run, dict) else run
        for run in samples.runs
    )
    return {
        "format": FORMAT,
        "written_by": library_version(),
        "score": repr(score),
        "choices": [choice.to_json() for choice in choices],
        "device": model_device(model).type,
        "network": _digest([network, named], weights),
        "samples": _digest(forms, chain.from_iterable(map(tensors_in, inputs))),
    }


def _digest(header: Any, tensors: Iterable[Tensor]) -> str:
    ready = (tensor.detach().cpu().contiguous() for tensor in tensors)
    return tensors_digest(header, {f"{i:06}": tensor for i, tensor in enumerate(ready)})
