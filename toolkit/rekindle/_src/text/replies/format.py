"""The syntax of a model's replies, detected from its chat template, and the plan for reading one chat's reply.

Calls of earlier replies are written as text for templates that would leave them out. Ids of calls are unique for each
call, and the same again when a request is repeated with its seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rekindle._src.core.contracts import TemplateLike
from rekindle._src.core.reply import Reply, ReplyEvent, fold
from rekindle._src.text.replies.call import SPACE, CallSyntax, NamedArguments, check_arguments, known_tools
from rekindle._src.text.replies.families import FAMILIES, HERMES
from rekindle._src.text.replies.harmony import LEAD_OF, SCANNERS, THOUGHTS_OF, HarmonyScanner
from rekindle._src.text.replies.marks import NO_MARKS, ReplyMarks, Tags, Thoughts
from rekindle._src.text.replies.response_template import ResponseTemplate
from rekindle._src.text.replies.scanner import ReplyScanner
from rekindle._src.text.replies.template_scanner import TemplateScanner
from rekindle.errors import InvalidRequest

TAGS: tuple[Tags, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
SPELLED_ENDS = ("<|role_end|>",)  # of a turn, which models write as text where it is one token
_LETTERS = string.ascii_letters + string.digits
Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The syntax of a model's calls and reasoning; None for either that it doesn't write."""

    calls: CallSyntax | None = None
    reasoning: Tags | None = None
    marks: ReplyMarks = NO_MARKS
    template: ResponseTemplate | None = None  # of the checkpoint; it is read in place of the others
    is_guess: bool = False  # the chat template takes tools and shows no syntax that is known

    @classmethod
    def of_template(cls, template: TemplateLike) -> ReplyFormat:
        """Return the format that a chat template implies; hermes for one that takes tools and shows no syntax."""
        family = next((family for family in FAMILIES if family.writes(template.writes)), None)
        tags = next((tags for tags in TAGS if any(map(template.writes, tags))), None)
        if family is None:
            return cls(HERMES if template.takes_tools else None, tags, is_guess=template.takes_tools)
        marks = family.marks
        wraps = tuple(wrap for wrap in family.wraps if template.writes(wrap[1]))
        noise = tuple(mark for mark in SPELLED_ENDS if template.writes(mark))
        begins = tuple(sorted(marks.text_begins, key=lambda text: not template.writes(text)))
        if wraps or noise or begins != marks.text_begins:
            marks = dataclasses.replace(marks, wraps=wraps, noise=marks.noise + noise, text_begins=begins)
        return cls(family.calls, family.reasoning or tags, marks)

    @classmethod
    def of_family(cls, name: str) -> ReplyFormat:
        """Return the format of a family by the name of its calls' syntax. Raise `InvalidRequest` for an unknown one."""
        family = next((family for family in FAMILIES if family.calls.name == name), None)
        if family is None:
            names = ", ".join(cls.names())
            raise InvalidRequest("reply_format", name, "is no known format of replies", f"Use one of {names}")
        marks = dataclasses.replace(family.marks, wraps=family.wraps)
        return cls(family.calls, family.reasoning or TAGS[name == "mistral"], marks)

    @staticmethod
    def names() -> list[str]:
        """Return the names that `of_family` knows."""
        return sorted(family.calls.name for family in FAMILIES)

    @property
    def in_channels(self) -> bool:
        """True if a reply consists of messages with channels, whether there are tools or not."""
        return self.calls is not None and self.calls.in_channels

    @property
    def has_parts(self) -> bool:
        """True if a reply may have parts where there are no tools."""
        has_marks = self.reasoning is not None or not self.marks.is_empty
        return has_marks or self.in_channels or self.template is not None

    def markers(self, *, tools: bool) -> frozenset[str]:
        """Return the texts that a scanner has to see even where they are special tokens."""
        if self.template is not None:
            return self.template.texts
        markers: set[str] = {*(self.reasoning or ()), *self.marks.texts()}
        if self.calls is not None and (tools or self.in_channels):
            markers.update(self.calls.markers)
        return frozenset(markers)

    @property
    def thoughts(self) -> Thoughts | None:
        """The texts around reasoning; None if the family marks none."""
        if self.calls is not None and self.in_channels:
            return THOUGHTS_OF[self.calls.name]
        if self.reasoning is None:
            return None
        return Thoughts(*self.reasoning, self.marks.bridge, self.marks.anywhere)

    @property
    def lead(self) -> str:
        """The text that an answer begins with."""
        if self.calls is not None and self.in_channels:
            return LEAD_OF[self.calls.name]
        return self.marks.text_begins[0] if self.marks.text_begins else ""

    def opens_reasoning(self, prompt: str) -> bool:
        """True if a prompt ends inside of reasoning, because its template opens the tag for the model."""
        thoughts = self.thoughts
        if thoughts is None:
            return False
        end = prompt.rstrip(SPACE)
        if self.marks.header:
            end = end.removesuffix(self.marks.header)
        return end.endswith(thoughts.opening.rstrip(SPACE))

    def thinks_after(self, prompt: str, continued: str | None) -> bool | None:
        """True if a reply begins inside of reasoning, False if that is past; None if it may begin with it."""
        if self.thoughts is None:
            return None
        opening, closing, *_ = self.thoughts
        if continued is not None:
            return is_open(continued, opening, closing) or (False if continued.strip() else None)
        if self.opens_reasoning(prompt):
            return True
        return False if prompt.rstrip(SPACE).endswith(closing) else None

    def scanner(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
        seed: bytes | None = None,
        pieces: bool = False,
    ) -> ReplyScanner:
        """Return a scanner for one reply. With `pieces` it emits calls while they arrive.

        Calls are recognized only if there are `tools`, as JSON schemas. `reasoning_open` says that the prompt
        ends inside of reasoning. Ids of calls follow from `seed`; None draws one.
        """
        calls = self.calls if tools else None
        if self.template is not None:
            known, ids = known_tools(tools), call_ids(seed, 0 if calls is None else calls.id_length)
            return TemplateScanner(self.template, calls=bool(tools), known=known, new_id=ids, pieces=pieces)
        if self.calls is not None and self.calls.in_channels:
            return SCANNERS[self.calls.name](
                calls=bool(tools), known=known_tools(tools), new_id=call_ids(seed), pieces=pieces
            )
        return ReplyScanner(
            syntax=calls,
            tags=self.reasoning,
            reasoning_open=reasoning_open,
            known=known_tools(tools),
            new_id=call_ids(seed, 0 if calls is None else calls.id_length),
            pieces=pieces,
            marks=self.marks,
        )

    def parse(
        self,
        text: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
        seed: bytes | None = None,
    ) -> Reply:
        """Return a whole reply in its parts: the sum of a scanner's events for it."""
        scanner = self.scanner(tools=tools, reasoning_open=reasoning_open, seed=seed)
        events: Iterable[ReplyEvent] = [*scanner.feed(text), *scanner.finish()]
        return fold(events)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyPlan:
    """The settings for reading the reply of one chat; each of its `n` sequences has a scanner."""

    format: ReplyFormat
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas; without them no calls are recognized
    continued: str | None = None  # the last message, if the reply goes on with it
    pieces: bool = False  # calls are emitted while they arrive

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that need a text, because the scanner reads them."""
        return self.format.markers(tools=bool(self.tools))

    def after(self, prompt: str, text: str) -> ReplyPlan:
        """Return the plan of a reply that continues `text`, the beginning of a reply to `prompt`."""
        before = self.continued
        if before is None:
            before = self.format.reasoning[0] if self.format.reasoning and self.format.opens_reasoning(prompt) else ""
        return dataclasses.replace(self, continued=before + text)

    def scanner(self, prompt: str, token_ids: bytes, seed: int | None) -> ReplyScanner:
        """Return the scanner for a reply to `prompt`. Its tokens and the seed decide the ids of calls."""
        key = hashlib.blake2b(token_ids, digest_size=32, person=b"tool calls")
        key.update(str(seed).encode())
        format, reasoning_open = self.format, self.format.opens_reasoning(prompt)
        if format.in_channels or format.template is not None:
            scanner = format.scanner(tools=self.tools, seed=key.digest(), pieces=self.pieces)
            assert isinstance(scanner, HarmonyScanner | TemplateScanner), "the format takes a prompt"
            scanner.go_on_from(prompt, self.continued or "")
            return scanner
        if self.continued is not None:
            reasoning_open = format.reasoning is not None and is_open(self.continued, *format.reasoning)
            if self.continued.strip() and not reasoning_open:
                format = dataclasses.replace(format, reasoning=None)  # the place for reasoning is past
        reader = format.scanner(tools=self.tools, reasoning_open=reasoning_open, seed=key.digest(), pieces=self.pieces)
        prefix = next((prefix for prefix in format.marks.prefixes if prompt.endswith(prefix)), None)
        if prefix is not None and self.continued is None:
            reader.begin_with(prefix)
        return reader


def is_open(text: str, opening: str, closing: str) -> bool:
    """True if `text` ends inside of these tags."""
    return text.rfind(opening) > text.rfind(closing)


def call_ids(seed: bytes | None, length: int = 0) -> Callable[[int], str]:
    """Return a function from a call's index to its id, such as `call_Zk3…`, or of `length` letters and digits.

    `seed` is a digest of all that decides the reply: prompt, seed and the index of the sequence. None draws one.
    """
    key = secrets.token_bytes(16) if seed is None else seed

    def new(index: int) -> str:
        number = int.from_bytes(hashlib.blake2b(key + index.to_bytes(8, "little"), digest_size=32).digest(), "little")
        letters = []
        for _ in range(length or 24):
            number, letter = divmod(number, len(_LETTERS))
            letters.append(_LETTERS[letter])
        return ("" if length else "call_") + "".join(letters)

    return new


def with_calls_as_text(messages: Sequence[Message], syntax: CallSyntax) -> list[Message]:
    """Return the messages, with an assistant's calls as text at the end of its content, as the model wrote them."""
    check_arguments(messages)
    result: list[Message] = []
    for message in messages:
        calls = _calls(message) if isinstance(message, Mapping) else []
        content = message.get("content") if calls else None
        if not calls or not (content is None or isinstance(content, str)):
            result.append(message)
            continue
        text = f"{content}\n" if content else ""
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        result.append({**rest, "content": text + syntax.write(calls)})
    return result


def _calls(message: Message) -> list[NamedArguments]:
    calls: list[NamedArguments] = []
    entries = message.get("tool_calls")
    for call in entries if isinstance(entries, Sequence) and not isinstance(entries, str) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                return []
        if not isinstance(function, Mapping) or not isinstance(arguments or {}, Mapping):
            return []
        calls.append((str(function.get("name")), arguments or {}))
    return calls
