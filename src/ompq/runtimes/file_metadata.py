"""What an exported file says about itself: inputs, classes, budget and versions.

It is one text of JSON in the file's metadata, called ``ompq``.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from ompq.configs import ExportConfig
from ompq.errors import ExportError
from ompq.files import library_version, write_text

KEY = "ompq"  # the name of the text in a file
RUN = "run.py"  # the program beside a file
_PROGRAM = Path(__file__).parent / "run_template.txt"
_LARGEST = 1 << 24  # characters
Side: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Channels: TypeAlias = Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 10)]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How an image becomes an input; other networks have only the shape of one."""

    # (channels, height, width) of an image
    input_shape: Annotated[tuple[Side, ...], msgspec.Meta(min_length=1, max_length=8)]
    mean: Channels = ()  # subtracted from each channel of an image in [0, 1]
    std: Channels = ()  # each channel is then divided by it
    # Length of the shorter side before the centre crop, or (height, width) to resize to
    # without a crop. An image that has the right size is left as it is.
    # (No Meta here: msgspec 0.22 mixes limits of a number up with lengths of a tuple.)
    resize: int | tuple[int, int] = 0
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    layout: Literal["NCHW", "NHWC"] = "NCHW"  # of the file's own input

    def __post_init__(self) -> None:
        """Raise a ValueError for a negative size."""
        sizes = (self.resize,) if isinstance(self.resize, int) else self.resize
        if min(sizes) < 0:
            raise ValueError(f"resize is {self.resize}, which is not a size")

    @property
    def of_images(self) -> bool:
        """Whether the inputs are images, in grey or colour."""
        channels = self.input_shape[0]
        same = len(self.mean) == len(self.std) == channels
        return len(self.input_shape) == 3 and channels in (1, 3) and same


@dataclass(frozen=True, kw_only=True)
class FileMetadata:
    """What is known about an exported file."""

    network: str = ""  # its name: ``torchvision:resnet18``
    preprocessing: Preprocessing | None = None
    classes: tuple[str, ...] = ()  # names of the outputs, if they are known
    budget: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # package → version

    @property
    def of_images(self) -> bool:
        """Whether its inputs are known to be images."""
        return self.preprocessing is not None and self.preprocessing.of_images

    @classmethod
    def of(
        cls, config: ExportConfig, layout: str, packages: Sequence[str]
    ) -> "FileMetadata":
        """Return the metadata to write, with the versions of packages."""
        versions = {"ompq": library_version()}
        for name in ("torch", *packages):
            with suppress(PackageNotFoundError):  # the export will say so
                versions[name] = version(name)
        given, how = config.preprocessing, None
        if given is not None:
            try:
                how = msgspec.convert({**given, "layout": layout}, Preprocessing)
            except msgspec.ValidationError as error:
                raise ValueError(f"preprocessing={given!r}: {error}") from error
        return cls(
            network=config.network,
            preprocessing=how,
            classes=config.classes,
            budget=str(config.budget or ""),
            versions=versions,
        )

    @classmethod
    def read(cls, texts: Mapping[str, str], path: Path) -> "FileMetadata":
        """Return what the texts in a file say.

        Raises:
            ExportError: They are damaged.
        """
        text = texts.get(KEY, "{}")
        try:
            if len(text) > _LARGEST:
                raise ValueError(f"it has more than {_LARGEST:,} characters")
            return msgspec.json.decode(text, type=cls)
        except (ValueError, RecursionError) as error:  # those of msgspec are, too
            raise ExportError(f"{path}: its metadata is damaged: {error}") from error

    def texts(self) -> dict[str, str]:
        """Return the texts for a file, by name."""
        return {KEY: msgspec.json.encode(self).decode()}


def write_program(file: Path) -> None:
    """Write ``run.py`` beside a file, unless another program has that name."""
    program, path = _PROGRAM.read_text(encoding="utf-8"), file.with_name(RUN)
    own = program.partition("\n")[0]
    if not path.exists() or path.read_text(errors="replace").startswith(own):
        write_text(path, program)
