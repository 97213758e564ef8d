"""Questions with a few possible answers, and their wording for the model."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from rekindle._src.core import words
from rekindle.errors import InvalidRequest

MAX_OPTIONS = 255
MAX_QUESTIONS = 200
MAX_TEXT = 1 << 20  # characters of a question with its options
_KINDS = "Pass bool, a list of texts, a range, a Literal, an Enum, or a dict of texts with their descriptions"


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerOption:
    """One possible answer: its value, its text as the model would write it, and a description."""

    value: Any
    text: str
    description: str = ""

    @property
    def line(self) -> str:
        """The option as the model reads it."""
        return f"{self.text}: {self.description}" if self.description else self.text


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question, its options, and the sentence that asks for one of them."""

    name: str
    text: str
    options: tuple[AnswerOption, ...]
    reply: str
    listed: bool = True  # the model reads the options, a line each
    ordered: bool = False  # the values are numbers

    @property
    def prompt(self) -> str:
        """The question as the model reads it, after the state."""
        lines = [option.line for option in self.options] if self.listed else []
        return "\n".join([self.text, *lines, self.reply])

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """A value that two questions share if a calibration of one holds for the other."""
        return self.prompt, tuple(option.line for option in self.options)


def questions_of(questions: object) -> list[Question]:
    """Return the questions of a mapping of names. Raise `InvalidRequest` for anything else."""
    if not isinstance(questions, Mapping) or not questions:
        fix = 'Pass a dict such as {"urgent": bool, "kind": ["bug", "praise"], "stars": range(1, 6)}'
        raise InvalidRequest("questions", questions, "are not questions by name", fix)
    if len(questions) > MAX_QUESTIONS:
        problem = f"are over {MAX_QUESTIONS}"
        raise InvalidRequest("questions", f"{len(questions):,} of them", problem, "Split them into several calls")
    return [_question(name, entry) for name, entry in questions.items()]


def _question(name: object, entry: object) -> Question:
    field = f"questions[{name!r}]"
    if not isinstance(name, str) or not name.strip():
        raise InvalidRequest("questions", name, "is not a name", "Name each question with a text")
    text = f"{name.replace('_', ' ').strip().capitalize()}?"
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and not isinstance(entry[1], str):
        text, entry = entry
        if not text.strip():
            raise InvalidRequest(field, entry, "has an empty question", "Write it as a sentence")
    elif isinstance(entry, tuple) and get_origin(entry) is None and all(isinstance(part, str) for part in entry):
        entry = list(entry)
    question = _of_kind(field, name, text, entry)
    if len(question.prompt) > MAX_TEXT:
        problem = f"has {len(question.prompt):,} characters with its options"
        raise InvalidRequest(field, text, problem, f"Use at most {MAX_TEXT:,}")
    return question


def _of_kind(field: str, name: str, text: str, kind: Any) -> Question:
    if kind is bool:
        return predicate(name, text)
    if isinstance(kind, range):
        return _numbers(field, name, text, kind)
    if get_origin(kind) is Literal:
        return choice(field, name, text, [AnswerOption(value, _written(value)) for value in get_args(kind)])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return choice(field, name, text, [AnswerOption(member, _written(member.value)) for member in kind])
    if isinstance(kind, Mapping):
        return choice(
            field, name, text, [AnswerOption(value, _written(value), str(about)) for value, about in kind.items()]
        )
    if isinstance(kind, str | bytes | type | types.GenericAlias) or not isinstance(kind, Sequence):
        raise InvalidRequest(field, kind, "is no kind of question", _KINDS)
    return choice(field, name, text, [AnswerOption(value, _written(value)) for value in kind[: MAX_OPTIONS + 1]])


def predicate(name: str, text: str) -> Question:
    """Return a question that is answered by yes or no."""
    return Question(name, text, (AnswerOption(True, "yes"), AnswerOption(False, "no")), "Answer with yes or no only.")


def choice(field: str, name: str, text: str, options: Iterable[AnswerOption]) -> Question:
    """Return a question that is answered by one of the options, which the model reads. Check them."""
    options = tuple(options)
    if not 2 <= len(options) <= MAX_OPTIONS:
        problem = f"has {words.count(len(options), 'option')}"
        raise InvalidRequest(field, [option.text for option in options[:4]], problem, f"Give it 2 to {MAX_OPTIONS}")
    try:
        distinct = len({option.value for option in options}) == len(options)
    except TypeError:
        problem = "has an option that can't be a key"
        raise InvalidRequest(field, [option.text for option in options[:4]], problem, _KINDS) from None
    seen = set[str]()
    for option in options:
        if not option.text.strip() or option.text != option.text.strip() or "\n" in option.text:
            fix = "Write each option in one line, without spaces around it"
            raise InvalidRequest(field, option.text, "is no option", fix)
        if option.text in seen:
            raise InvalidRequest(field, option.text, "is there twice", "Name each option once")
        seen.add(option.text)
    if not distinct:
        problem = "has options that are equal in Python, such as 1 and True"
        raise InvalidRequest(field, [option.text for option in options[:4]], problem, "Name each option once")
    return Question(name, text, options, "Answer with one of these only, exactly as it is written.")


def _numbers(field: str, name: str, text: str, numbers: range) -> Question:
    if not 2 <= len(numbers[: MAX_OPTIONS + 1]) <= MAX_OPTIONS:  # the length of a range may be no int of C's
        fix = f"Give it 2 to {MAX_OPTIONS}, such as range(1, 6)"
        raise InvalidRequest(field, numbers, "has too few or too many numbers", fix)
    options = tuple(AnswerOption(number, str(number)) for number in numbers)
    reply = f"Answer with a number from {numbers[0]} to {numbers[-1]} only."
    return Question(name, text, options, reply, listed=abs(numbers.step) != 1, ordered=True)


def _written(value: object) -> str:
    """Return the text of a value; other values than texts are written as in JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, bool | int | float) or value is None else str(value)


def state_text(state: object, field: str = "state") -> str:
    """Return a state as the model reads it: a text as it is, anything else as JSON."""
    if isinstance(state, str):
        text = state.strip()
        if not text:
            raise InvalidRequest(field, state, "is empty", "Pass the text to decide about")
        return text
    try:
        return json.dumps(state, ensure_ascii=False)
    except (TypeError, ValueError):
        raise InvalidRequest(field, state, "is neither text nor JSON", "Pass a text, or a dict of such") from None
