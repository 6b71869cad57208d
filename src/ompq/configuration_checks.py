"""Fields of configurations: default, help and limits in one place, and one check.

A configuration is a frozen dataclass that derives from :class:`Config` and declares its
fields with :func:`setting`. All of them are checked whenever one is created, by
``replace`` too; documentation and command line read the same declarations.

Example:
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Walk(Config):
    ...     '''How to walk.'''
    ...     steps: int = setting(3, "Number of steps.", COUNT)
    ...     pace: Literal["slow", "fast"] = setting("slow", "How fast to go.")
    >>> Walk(pace="quick")
    Traceback (most recent call last):
    ompq.configuration_checks.SettingError: The 'pace' of Walk must be one of 'slow', \
'fast'. Got 'quick'.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from numbers import Integral, Real
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

_Value = TypeVar("_Value")
_KEY = "setting"  # of a field's metadata
_WIDTH = 84  # of the lines of a docstring, without their indent


class SettingError(ValueError):
    """A value that a field of a configuration cannot have.

    Attributes:
        config: Name of the configuration's class.
        field: Name of the field.
        requirement: What the value must be: ``one of 'slow', 'fast'``.
        value: The value given.
    """

    def __init__(self, config: str, field: str, requirement: str, value: Any) -> None:
        self.config, self.field = config, field
        self.requirement, self.value = requirement, value
        super().__init__(
            f"The '{field}' of {config} must be {requirement}. Got {value!r}."
        )


@dataclass(frozen=True)
class Bounds:
    """An interval of numbers; infinity is not in it unless ``high`` is closed."""

    low: float = -inf
    high: float = inf
    low_open: bool = False
    high_open: bool = True

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        if not self.low_open and not self.high_open and self.high < inf:
            return f"from {self.low:g} to {self.high:g}"
        low = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        high = f"{'below' if self.high_open else 'at most'} {self.high:g}"
        texts = [low] * (self.low > -inf) + [high] * (self.high < inf)
        return " and ".join(texts)


COUNT = Bounds(1)
NOT_NEGATIVE = Bounds(0)
POSITIVE = Bounds(0, low_open=True)
FRACTION = Bounds(0, 1, high_open=False)
BELOW_ONE = Bounds(0, 1)
INNER = Bounds(0, 1, low_open=True)  # neither 0 nor 1


@dataclass(frozen=True)
class Setting:
    """What a field declares besides its type and default."""

    help: str
    bounds: Bounds | None = None  # of a number, or of each number in a tuple
    metavar: str = ""  # what stands for the value in the help of the command line
    # Names that text may be; they are listed only when needed, since extensions add to
    # them. Other kinds of values, such as functions, are not restricted by them.
    names: Collection[str] | None = None
    # Returns what a value of the right type must be besides, or "".
    check: Callable[[Any], str] | None = None


def setting(
    default: _Value,
    text: str,
    bounds: Bounds | None = None,
    *,
    metavar: str = "",
    names: Collection[str] | None = None,
    check: Callable[[Any], str] | None = None,
) -> _Value:
    """Declare a field of a configuration; see :class:`Setting` for the arguments."""
    metadata = {_KEY: Setting(text, bounds, metavar, names, check)}
    if isinstance(default, Mapping):  # which has no hash, as a default must
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Config:
    """A frozen dataclass whose fields are declared with :func:`setting`."""

    def __init_subclass__(cls) -> None:
        """Append the fields to the docstring, as a section of attributes."""
        rows = [
            f"    {name}: {one.metadata[_KEY].help}"
            for name, one in vars(cls).items()
            if isinstance(one, dataclasses.Field)
        ]
        lines = [textwrap.fill(row, _WIDTH, subsequent_indent=" " * 8) for row in rows]
        cls.__doc__ = "\n".join([f"{cls.__doc__ or ''}\n\nAttributes:", *lines])

    def __post_init__(self) -> None:
        """Check every field; lists become tuples."""
        own = type(self)
        kinds = field_types(own)
        for name, one in settings(own).items():
            value = _as_tuple(getattr(self, name))
            object.__setattr__(self, name, value)
            requirement = problem(value, kinds[name], one)
            if requirement:
                raise SettingError(own.__name__, name, requirement, value)


def settings(config: type[Config]) -> Mapping[str, Setting]:
    """Return how each field of a configuration was declared, by name."""
    declared = dataclasses.fields(cast(Any, config))
    return MappingProxyType({one.name: one.metadata[_KEY] for one in declared})


def field_types(config: type[Config]) -> Mapping[str, Any]:
    """Return the type of each field of a configuration, by name."""
    return MappingProxyType(get_type_hints(config))


def _as_tuple(value: Any) -> Any:
    """Return a list, and any list in it, as a tuple; other values as they are."""
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return tuple(map(_as_tuple, value))
    return value


def problem(value: Any, kind: Any, one: Setting) -> str:
    """Return the requirement that a value of a field breaks, or ""."""
    wrong = _mismatch(value, kind, one)
    if wrong or one.check is None or value is None:
        return wrong
    return one.check(value)


def _mismatch(value: Any, kind: Any, one: Setting) -> str:
    """Return the requirement of a type that a value does not meet, or ""."""
    if is_union(kind):
        return _of_any(value, get_args(kind), one)
    origin = get_origin(kind) or kind
    if origin is Literal:
        return "" if value in get_args(kind) else one_of(get_args(kind))
    if origin is tuple:
        return _of_tuple(value, get_args(kind), one)
    if origin in (int, float):
        return _of_number(value, origin, one.bounds)
    if origin is str and isinstance(value, str) and one.names is not None:
        return "" if value in one.names else one_of(one.names)
    if origin is Callable:
        return "" if callable(value) else "a function"
    if origin in (Any, object) or isinstance(value, origin):
        return ""
    return "None" if origin is NoneType else _TYPES.get(origin, f"a {origin.__name__}")


_TYPES = {bool: "True or False", str: "text", Mapping: "a mapping", Sequence: "a list"}


def is_union(kind: Any) -> bool:
    """Return whether a type is a union of others, such as ``int | None``."""
    return get_origin(kind) in (Union, UnionType)


def one_of(values: Iterable[Any]) -> str:
    """Return the requirement to be one of some values."""
    return f"one of {', '.join(map(repr, values))}"


def _of_any(value: Any, kinds: Sequence[Any], one: Setting) -> str:
    found = [_mismatch(value, kind, one) for kind in kinds]
    return "" if "" in found else " or ".join(dict.fromkeys(found))


def _of_tuple(value: Any, kinds: Sequence[Any], one: Setting) -> str:
    if not isinstance(value, tuple):
        return "a list of values"
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(value) != len(kinds):
        return f"{len(kinds)} values"
    pairs = zip(value, kinds, strict=True)
    wrong = next((w for v, k in pairs if (w := _mismatch(v, k, one))), "")
    return f"values that are each {wrong}" if wrong else ""


def _of_number(value: Any, kind: type, bounds: Bounds | None) -> str:
    whole = kind is int
    right = isinstance(value, Integral if whole else Real)
    if not right or isinstance(value, bool) or isnan(value):
        return "a whole number" if whole else "a number"
    return "" if bounds is None or float(value) in bounds else str(bounds)
