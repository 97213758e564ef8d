"""Real signatures for functions that take `**options`: Tab completes an option's name, and `?` lists them all."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class _Annotation(str):
    """An annotation as it stands in the source; `inspect` would show a plain string in quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def takes_options(record: type, *, returns: str = "", **defaults: Any) -> Callable[[F], F]:
    """Show the fields of a dataclass instead of `**options`: in the signature, and with meanings in the docstring.

    The docstring of `record` has to end with a section "Options:". `returns` is shown as the type of the result; a
    function with overloads needs it. `defaults` are those that differ from the dataclass's own.
    """
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[field.name]
            if field.name in defaults
            else field.default_factory()
            if callable(field.default_factory)
            else field.default,
            annotation=_Annotation(field.type),
        )
        for field in dataclasses.fields(record)
    ]
    names = {field.name for field in fields}
    _, heading, table = inspect.cleandoc(record.__doc__ or "").partition("Options:\n")

    def apply(function: F) -> F:
        signature = inspect.signature(function)
        explicit = [
            parameter.replace(annotation=_bare(parameter.annotation))
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name not in names
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*explicit, *fields], return_annotation=_bare(returns or signature.return_annotation)
        )
        if function.__doc__ is not None:  # python -OO has none
            function.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\n{heading}{table}"
        return function

    return apply


def _bare(annotation: Any) -> Any:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation
