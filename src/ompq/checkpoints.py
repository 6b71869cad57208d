"""Checkpoints: what identifies a run, and how its state is kept and resumed."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ompq.errors import CheckpointError
from ompq.files import read_tensors, write_tensors, write_text
from ompq.parallel import process_count, share_out
from ompq.schema import json_object, read_json

if TYPE_CHECKING:
    from torch import Tensor


def run_identity(settings: Any, tensors: "Iterable[Tensor]") -> str:
    """Return a digest of everything that must match for a run to be resumed."""
    import torch

    digest = hashlib.sha256(json.dumps(settings).encode())
    for tensor in tensors:
        # As bytes: NumPy knows neither bfloat16 nor float8.
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_checkpoint(
    path: str | Path,
    tensors: "Mapping[str, Tensor]",
    text: Mapping[str, str],
    *,
    kind: str,
    identity: str,
) -> None:
    """Write a checkpoint that only runs of the same identity can resume."""
    header = {"format": f"ompq-{kind}/2", "identity": identity, "text": dict(text)}
    write_tensors(path, header, tensors)


def read_checkpoint(
    path: str | Path, *, kind: str, identity: str
) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Return the tensors and the text of a checkpoint."""
    try:
        header, tensors = read_tensors(path, f"ompq-{kind}/2")
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of {kind}: {error}. Remove it to start over"
        ) from error
    if header["identity"] != identity:
        raise CheckpointError(
            f"{path} belongs to another run (another network, data or settings); "
            "remove it, or use another path"
        )
    return tensors, header["text"]


_Result = TypeVar("_Result")


class Checkpoint(Generic[_Result]):
    """The measurements of a run so far, by name, in a JSON file."""

    def __init__(
        self,
        path: str | Path | None,
        kind: str,
        identity: str,
        read: Callable[[Any], _Result],
    ) -> None:
        """Read the file, if it exists; without a path nothing is saved.

        Args:
            kind: The kind of run, for example ``audit``.
            identity: Text that must be equal for a run to resume from the file.
            read: Converts an entry of the file to a result, or raises a ValueError.

        Raises:
            CheckpointError: The file is damaged, or belongs to another run.
        """
        self._path = path
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._about = {"format": f"ompq-{kind}-checkpoint/1", "identity": digest}
        self._results: dict[str, _Result] = {}
        if path is None or not Path(path).exists():
            return
        try:
            data = json_object(read_json(path), "a checkpoint")
            if data.get("format") != self._about["format"]:
                raise ValueError(f"its format is not {self._about['format']}")
            entries = json_object(data.get("measured"), "measured")
            self._results = {name: read(entry) for name, entry in entries.items()}
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be resumed: {error}") from error
        if data.get("identity") != digest:
            raise CheckpointError(
                f"{path} belongs to another {kind}: another network, other samples or "
                "settings. Remove it or use another file"
            )

    def get(self, name: str, measure: Callable[[], _Result]) -> _Result:
        """Return the result of this name; measure and save it if there is none yet."""
        if name not in self._results:
            self._save({name: measure()})
        return self._results[name]

    def get_all(
        self, names: Sequence[str], measure: Callable[[str], _Result]
    ) -> Iterator[_Result]:
        """Yield the results of these names; processes share what must be measured."""
        count = process_count()
        for start in range(0, len(names), count):
            part = names[start : start + count]
            new = [name for name in part if name not in self._results]
            if new:
                self._save(dict(zip(new, share_out(new, measure), strict=True)))
            yield from (self._results[name] for name in part)

    def _save(self, results: Mapping[str, _Result]) -> None:
        self._results.update(results)
        if self._path is not None:
            data = {**self._about, "measured": self._results}
            write_text(self._path, json.dumps(data, indent=1, default=asdict))
