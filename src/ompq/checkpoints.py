"""Checkpoints: files that keep results, so that long work can be resumed.

Score tables, measurements, reconstructed blocks and epochs of training are all kept in
a :class:`Store`: a file that belongs to one *identity*, a digest of everything that its
content depends on. Work of another identity never reads it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from ompq.content_identity import identity
from ompq.errors import CheckpointError
from ompq.files import read_tensors, write_tensors, write_text
from ompq.parallel import process_count, share_out
from ompq.untrusted_json import convert_json, read_json

if TYPE_CHECKING:
    from torch import Tensor

_Result = TypeVar("_Result")


class Kept(NamedTuple):
    """What a file keeps."""

    data: Any  # plain data
    tensors: "Mapping[str, Tensor]"


@dataclass(frozen=True)
class Store:
    """A file for work of one kind and identity; without a path nothing is kept."""

    path: Path | None
    kind: str  # ``training``, ``search``, ...
    identity: str  # see :mod:`ompq.content_identity`

    @classmethod
    def of(cls, path: str | Path | None, kind: str, *parts: Any) -> "Store":
        """Return the store for work that depends on these parts and nothing else."""
        if path is None:
            return cls(None, kind, "")
        return cls(Path(path), kind, identity(*parts))

    @property
    def _header(self) -> dict[str, str]:
        kind = self.kind.replace(" ", "-")
        return {"format": f"ompq-{kind}/3", "identity": self.identity}

    def read(self) -> Kept | None:
        """Return what the file keeps; None if there is no file.

        Raises:
            CheckpointError: The file is damaged, or belongs to other work.
        """
        if self.path is None or not self.path.exists():
            return None
        own = self._header
        try:
            header, tensors = _read(self.path, own["format"])
            if not {"identity", "kept"} <= {*header}:
                raise ValueError("it is incomplete")
        except ValueError as error:
            raise CheckpointError(
                f"{self.path} cannot be resumed: {error}. Remove it to start over"
            ) from error
        if header["identity"] != self.identity:
            raise CheckpointError(
                f"{self.path} belongs to another {self.kind} (another network, other "
                "data or other settings); remove it, or use another path"
            )
        return Kept(header["kept"], tensors)

    def write(self, data: Any, tensors: "Mapping[str, Tensor] | None" = None) -> None:
        """Replace what the file keeps: JSON, or a safetensors file with tensors."""
        if self.path is None:
            return
        header = {**self._header, "kept": data}
        if tensors is None:
            text = json.dumps(header, indent=1, default=msgspec.to_builtins)
            write_text(self.path, text + "\n")
        else:
            write_tensors(self.path, header, tensors)


def _read(path: Path, kind: str) -> "tuple[dict[str, Any], Mapping[str, Tensor]]":
    """Return the header and the tensors of a file; a ValueError says what is wrong."""
    try:
        with path.open("rb") as file:
            binary = b"\0" in file.read(8)  # the length of a safetensors header
    except IsADirectoryError as error:
        raise ValueError("it is a folder") from error
    if binary:
        return read_tensors(path, kind)
    header = convert_json(read_json(path), dict[str, Any], "it")
    if header.get("format") != kind:
        raise ValueError(f"its format is not {kind}")
    return header, {}


class Measurements(Generic[_Result]):
    """The measurements of a run so far, by name, in a store."""

    def __init__(self, store: Store, kind: Any) -> None:
        """Read the store, which keeps results of one type: a dataclass, or a list.

        Raises:
            CheckpointError: The file is damaged, or belongs to another run.
        """
        self._store, self._results = store, dict[str, _Result]()
        if (kept := store.read()) is None:
            return
        try:
            entries = convert_json(kept.data, dict[str, Any], "its content")
            self._results = {
                name: convert_json(entry, kind, name) for name, entry in entries.items()
            }
        except ValueError as error:
            raise CheckpointError(
                f"{store.path} cannot be resumed: {error}. Remove it to start over"
            ) from error

    def get(self, name: str, measure: Callable[[], _Result]) -> _Result:
        """Return the result of this name; measure and keep it if there is none yet."""
        if name not in self._results:
            self._keep({name: measure()})
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
                self._keep(dict(zip(new, share_out(new, measure), strict=True)))
            yield from (self._results[name] for name in part)

    def _keep(self, results: Mapping[str, _Result]) -> None:
        self._results.update(results)
        self._store.write(self._results)
