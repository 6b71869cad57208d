"""Commands whose options are dataclasses, so that commands can share them."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function as Typer wants it: every option an argument of its own.

    An argument whose type is a dataclass stands for all fields of that class; each
    field is annotated as a Typer option. The other arguments stay as they are.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(function, include_extras=True)
    for name, given in inspect.signature(function).parameters.items():
        if not is_dataclass(hints[name]):
            parameters.append(_parameter(name, hints[name], given.default))
            continue
        groups[name] = hints[name]
        inner = get_type_hints(hints[name], include_extras=True)
        parameters += [
            _parameter(one.name, inner[one.name], _default(one))
            for one in fields(hints[name])
        ]

    @wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            own = {one.name: values.pop(one.name) for one in fields(group)}
            values[name] = group(**own)
        function(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
