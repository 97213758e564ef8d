"""The syntax of a model's replies, detected from its chat template."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rekindle._src.core.reply import Reply, ReplyEvent, fold
from rekindle._src.text.replies.call import known_tools
from rekindle._src.text.replies.call_ids import call_ids
from rekindle._src.text.replies.families import SYNTAXES
from rekindle._src.text.replies.scanner import ReplyScanner, Tags
from rekindle._src.text.replies.source import SPACE
from rekindle._src.text.replies.syntax import CallSyntax
from rekindle._src.text.template_code import takes_tools

TAGS: tuple[Tags, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# Signs of a template that describes or repeats calls, the most particular first.
_SIGNS = (
    (re.compile(r"\[TOOL_CALLS\]"), "mistral"),
    (re.compile(r"<tool_call>|<function="), "hermes"),
    (re.compile(r"<\|tool_call\|>|<\|tool\|>|functools\["), "phi4mini"),
    (re.compile(r"<function_calls>"), "olmo"),
    (re.compile(r"<\|python_start\|>|\[func_name1?\("), "pythonic"),
    (re.compile(r"<\|python_tag\|>|\"parameters\": dictionary"), "llama3_json"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The syntax of a model's calls and reasoning; None for either that it doesn't write."""

    calls: CallSyntax | None = None
    reasoning: Tags | None = None

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of_template(cls, template: str) -> ReplyFormat:
        """Return the format that a chat template implies; hermes for one that takes tools and shows no syntax."""
        name = next((name for sign, name in _SIGNS if sign.search(template)), None)
        if name is None and takes_tools(template):
            name = "hermes"
        tags = next((tags for tags in TAGS if any(tag in template for tag in tags)), None)
        return cls(None if name is None else SYNTAXES[name], tags)

    def markers(self, *, tools: bool) -> frozenset[str]:
        """Return the texts that a scanner has to see even where they are special tokens."""
        markers: set[str] = set(self.reasoning or ())
        if tools and self.calls is not None:
            markers.update(self.calls.markers)
        return frozenset(markers)

    def opens_reasoning(self, prompt: str) -> bool:
        """True if a prompt ends inside of reasoning, because its template opens the tag for the model."""
        return self.reasoning is not None and prompt.rstrip(SPACE).endswith(self.reasoning[0])

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
        return ReplyScanner(
            syntax=calls,
            tags=self.reasoning,
            reasoning_open=reasoning_open,
            known=known_tools(tools),
            new_id=call_ids(seed, 0 if calls is None else calls.id_length),
            pieces=pieces,
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
