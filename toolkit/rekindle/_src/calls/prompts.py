"""Prompts: text or token ids, one or many, checked as far as that is possible without the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rekindle._src.core import words
from rekindle._src.core.extension import NONE, Extension, Extensions
from rekindle._src.core.options import check_batch, check_prompt
from rekindle._src.core.records import IntArray
from rekindle._src.core.soft_prompt import EmbeddedPrompt, SoftPrompt
from rekindle.errors import InvalidRequest

PromptLike = str | Sequence[int] | np.ndarray | SoftPrompt


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text, or token ids."""

    text: str | None
    token_ids: IntArray | None
    add_special_tokens: bool = True
    render: Callable[[], str] | None = None  # makes the text when the request is taken in
    error: BaseException | None = None  # the reason why it is no prompt
    extensions: Extensions = NONE  # of the request's capabilities, as far as they are known
    messages: Sequence[Mapping[str, object]] | None = None  # of a chat
    long: bool = False  # True if rendering it takes long
    shown: str | None = None  # the text as its caller wrote it, if it is another

    def plus(self, extension: Extension | None) -> Prompt:
        """Return the prompt with one extension more."""
        return self if extension is None else dataclasses.replace(self, extensions=self.extensions.plus(extension))


def parse(prompt: object, *, keep_errors: bool = False, soft: bool = False) -> tuple[list[Prompt], bool]:
    """Return the prompts of a request, and True if they came as a list of prompts.

    An entry of a list that is no prompt raises, or is in the list with its error if errors are kept. `SoftPrompt`s are
    prompts if `soft`.
    """
    if isinstance(prompt, SoftPrompt):
        return [parse_one(prompt, soft=soft)], False
    prompt = from_column(prompt)
    if is_chat(prompt):
        raise _no_prompt(prompt)
    if isinstance(prompt, str) or is_ids(prompt):
        return [parse_one(prompt)], False
    if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes) and getattr(prompt, "ndim", 1) != 0:
        check_batch(len(prompt))
        return [_numbered(entry, index, keep_errors, soft) for index, entry in enumerate(prompt)], True
    raise _no_prompt(prompt)


def from_column(values: object) -> object:
    """Return the values of a column of a DataFrame as an array, and anything else as it is."""
    return values.to_numpy() if hasattr(values, "to_numpy") and hasattr(values, "dtype") else values


def is_missing(value: Any) -> bool:
    """True for None, NaN and the other missing values of DataFrames."""
    if value is None:
        return True
    try:
        return bool(value != value)  # NaN and NaT are not equal to themselves
    except (TypeError, ValueError):  # neither pandas' NA nor an array says whether it is
        return type(value).__name__ == "NAType"


def _numbered(prompt: Any, index: int, keep_errors: bool, soft: bool) -> Prompt:
    try:
        return parse_one(prompt, soft=soft)
    except InvalidRequest as error:
        indexed = at_index(error, index)
    if keep_errors:
        return Prompt("", None, error=indexed)
    raise indexed


def at_index(error: BaseException, index: int) -> BaseException:
    """Return the error of one prompt of a list. An error about the prompt gets its index."""
    if not isinstance(error, InvalidRequest) or error.index is not None or error.field != "prompt":
        return error
    return type(error)(error.field, error.value, error.problem, error.fix, index)


def parse_one(prompt: object, *, soft: bool = False) -> Prompt:
    """Return the prompt of text or token ids, or of a `SoftPrompt`. Raise `InvalidRequest` for anything else."""
    if isinstance(prompt, SoftPrompt):
        if not soft:
            fix = "Pass it to generate, stream, submit or admit"
            raise InvalidRequest("prompt", prompt, "holds rows of numbers, which this call does not read", fix)
        return Prompt(None, np.zeros(1, np.int32)).plus(EmbeddedPrompt(prompt))  # intake places its tokens
    if isinstance(prompt, str):
        check_prompt(len(prompt), "characters")
        return Prompt(prompt, None)
    if not is_ids(prompt):
        raise _no_prompt(prompt)
    ids = np.asarray(prompt)
    if ids.min() < 0 or ids.max() >= 2**31:
        raise InvalidRequest("prompt", prompt, "holds numbers that are not token ids", "Use whole numbers from 0")
    return Prompt(None, ids.astype(np.int32))


def is_chat(value: Any) -> bool:
    """True if a value is a message of a chat, or a list that begins with one."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, Mapping) and "role" in value


def _no_prompt(value: Any) -> InvalidRequest:
    """Return the error for a value that is neither text nor token ids."""
    if is_chat(value):
        return InvalidRequest("prompt", value, "is a conversation, which a chat template makes into text", CHAT)
    if hasattr(value, "columns") and hasattr(value, "shape"):
        shown = f"a table of {words.count(len(value), 'row')} and {words.count(len(value.columns), 'column')}"
        column = next(iter(map(str, value.columns)), "text")
        return InvalidRequest("prompt", shown, "is neither text nor token ids", f"Pass a column: frame[{column!r}]")
    if isinstance(value, Mapping):
        name = next((name for name in _PROMPTS if name in value), None)
        if name is not None:
            fix = f"Pass the entry alone, without its dict: inputs[{name!r}]"
            return InvalidRequest("prompt", value, "is a dict, and neither text nor token ids", fix)
    return InvalidRequest("prompt", value, "is neither text nor token ids", PASS)


_PROMPTS = ("prompt", "prompt_token_ids", "input_ids", "text", "inputs")  # of other libraries' dicts
PASS = 'Pass a text such as "Once upon a time", a list of token ids, or a list of such prompts'
CHAT = "Use session.chat(messages), or session.render(messages) for the text alone"


def is_ids(prompt: object) -> bool:
    """True if a prompt is a list of token ids."""
    if isinstance(prompt, str | bytes | Mapping):
        return False
    if hasattr(prompt, "dtype"):
        return (
            getattr(prompt, "ndim", 0) == 1
            and len(_bounded_ids(prompt)) > 0
            and getattr(prompt.dtype, "kind", "") in ("i", "u")
        )
    return (
        isinstance(prompt, Sequence)
        and len(_bounded_ids(prompt)) > 0
        and all(hasattr(token, "__index__") and not isinstance(token, bool) for token in prompt)
    )


def _bounded_ids(prompt: Any) -> Any:
    """Return the prompt. Raise if it is too long to be checked id by id."""
    check_prompt(len(prompt), "token ids")
    return prompt
