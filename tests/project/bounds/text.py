"""Bounds on chat templates, tokenizers and replies."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from project.bounds.records import AUTHOR, SMALL, STRANGER, Bound, Other, within
from rekindle._src.text import template_code, template_limits, tokenizer, tokenizer_limits
from rekindle._src.text.replies import arguments, history
from rekindle.errors import CheckpointError

STRINGS = tokenizer_limits.MAX_STRINGS
BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": []}


def parsed(count: int) -> Callable[[], object]:
    """A template of so many tokens, read and compiled."""
    text = "{{a|trim}}" * (count // 5)

    def work() -> object:
        code = template_code.parsed.__wrapped__(text)
        return code, code.program()

    return work


def rendered(text: str) -> Callable[[int], Callable[[], object]]:
    """A template that goes on until it may not."""

    def feed(count: int) -> Callable[[], object]:
        if not count:
            return lambda: None  # there is no shorter run
        code = template_code.parsed(text)

        def work() -> object:
            try:
                return code.render({})
            except template_limits.TemplateLimit as limit:
                limit.__traceback__ = None
                return limit

        return work

    return feed


LOOP = "{% for a in range(1000) %}" * 3 + "{{ a }}" + "{% endfor %}" * 3
GROWING = (
    "{% set n = namespace(all=[]) %}{% set x = '😀' * 1000000 %}{% for a in range(1000) %}"
    "{% set n.all = n.all + [x ~ a] %}{% endfor %}"
)


def opened(model: Any, **parts: Any) -> Callable[[], object]:
    """Open a tokenizer."""
    folder = Path(tempfile.mkdtemp())
    content = {"version": "1.0", "model": model, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(content, separators=(",", ":"), ensure_ascii=False))

    def work() -> object:
        made = tokenizer.Tokenizer.load(folder)
        return made, made.encodes_apart

    return work


def regexes(count: int) -> Callable[[], object]:
    text = "(?i:" + r"\p{L}" * ((tokenizer_limits.LONGEST_TEXT - 20) // 6) + ")"  # JSON writes each backslash twice
    split = {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
    return opened(BPE, pre_tokenizer={"type": "Sequence", "pretokenizers": [split] * count})


def vocabulary(count: int) -> Callable[[], object]:
    return opened({"type": "BPE", "vocab": {f"{number:x}": number for number in range(count)}, "merges": []})


def merges(count: int) -> Callable[[], object]:
    vocab = {"a" * length: length - 1 for length in range(1, 65)}
    return opened({"type": "BPE", "vocab": vocab, "merges": [["a", "a"]] * (count // 2)})


def added(count: int) -> Callable[[], object]:
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = [{"id": number + 1, "content": f"{number:05x}".ljust(16, "x"), **entry} for number in range(count // 8)]
    return opened(BPE, added_tokens=tokens)


def quotes(count: int) -> Callable[[], object]:
    content = b'["' + b'\\"' * (2 * count - 8) + b'"]'

    def work() -> object:
        with contextlib.suppress(CheckpointError):
            tokenizer_limits.check_file(content, "tokenizer.json")
        return None

    return work


def pieces(count: int) -> Callable[[], object]:
    return opened({"type": "Unigram", "unk_id": 0, "vocab": [[f"{number:x}", 0.0] for number in range(count)]})


def searched(count: int) -> Callable[[], object]:
    """Characters of a reply, for each of which all steps of a pattern of a reply's template are looked at."""
    from rekindle._src.text.replies.patterns import Pattern, PatternSearch

    search = PatternSearch(Pattern.parse("(?:a?a?a?){42}b"), 0)

    def work() -> object:
        search.feed("a" * count, 0, ended=False, limit=1 << 20)
        return search

    return work


def anchored(count: int) -> Callable[[], object]:
    """Prompts whose end goes through all steps of a template's patterns, after a search for its anchor."""
    from rekindle._src.text.replies.response_template import PROMPT_STEPS, ResponseTemplate
    from rekindle._src.text.replies.template_scanner import TemplateScanner

    fields = {"content": {}, "tool_calls": {"open_pattern": "(?:a?a?a?){21}b", "close": "c"}}
    template = ResponseTemplate.load({"start_anchor_pattern": "(?:a?a?a?){21}x", "fields": fields})
    prompt = "x" + "a" * (PROMPT_STEPS // template.steps - 1)

    def work() -> object:
        scanners = []
        for _ in range(count):
            scanner = TemplateScanner(template, calls=True, known={}, new_id=str)
            scanner.go_on_from(prompt, "")
            scanners.append(scanner)
        return scanners

    return work


def tags(count: int) -> Callable[[], object]:
    """Regions of calls whose tags take all steps that they may."""
    from rekindle._src.text.replies.call import MalformedCall
    from rekindle._src.text.replies.response_template import ResponseTemplate

    pattern = "(?P<key>a)(?P<value>)(?:(?:a?a?a?){40}.*b)?"
    call = {
        "open": "<", "close": ">", "content": "xml-inline", "content_args": {"tag_pattern": pattern},
        "transform": {"function": {"name": "f", "arguments": "{content}"}},
    }  # fmt: skip
    (field,) = ResponseTemplate.load({"start_anchor": "@", "fields": {"tool_calls": call}}).fields

    def work() -> object:
        for _ in range(count):
            with contextlib.suppress(MalformedCall):
                field.values("a" * 4_096, {})
        return None

    return work


def restored(count: int) -> Callable[[], object]:
    """A prompt with so many earlier replies, each of which the template has written in another way."""
    from rekindle._src.text.replies import ReplyFormat, ReplyPlan
    from rekindle._src.text.replies.history import WrittenReplies

    plan, text = ReplyPlan(ReplyFormat.of_family("hermes")), "a b" * (history.MAX_TOKENS // history.MAX_KEPT // 3 - 1)
    written, prompt = WrittenReplies(), [1]

    def decode(ids: Any) -> str:
        return "".join(map(chr, ids))

    for _ in range(count):
        spelled = [*map(ord, text), 10]
        written.add(np.asarray(prompt, np.int32), spelled, plan.format.parse(text), plan, decode)
        prompt += [*spelled, 0]
    asked = np.asarray([token for token in prompt if token != 10], np.int32)
    return lambda: (written, written.restored(asked, [0], decode))


def parameters(count: int) -> Callable[[], object]:
    """Return parameters of a required tool; each refers to more schemas than the bound permits."""
    from rekindle._src.text.replies.call_grammar import call_grammar
    from rekindle._src.text.replies.families import SYNTAXES

    several = {f"of{at}": {"anyOf": [{"$ref": f"#/$defs/of{at + 1}"}] * 64} for at in range(3)}
    schema = {
        "properties": {f"{at:x}": {"$ref": "#/$defs/of0"} for at in range(count)},
        "$defs": several | {"of3": {"enum": ["x"] * arguments.MAX_CHOICES}},
    }
    tools = [{"function": {"name": "f", "parameters": schema}}]
    return lambda: call_grammar(SYNTAXES["minimax_m2"], tools, lambda marker: None, several=True)


BOUNDS: list[Bound] = [
    AUTHOR(
        "text/template_code.py: MAX_TEMPLATE", counts="tokens of a template", most=template_code._TOKENS,
        unit="a filter", feed=parsed, count=template_code._TOKENS // 2, seconds=3, mib=128,
    ),
    AUTHOR(
        "text/template_limits.py: SECONDS, ITEMS", counts="renderings of a template", most=1,
        unit="one that never ends", feed=rendered(LOOP), count=1, seconds=template_limits.SECONDS + 1, mib=512,
    ),
    AUTHOR(
        "text/template_limits.py: WORK, CHARACTERS", counts="renderings that keep what they make", most=1,
        unit="texts of emoji", feed=rendered(GROWING), count=1, seconds=template_limits.SECONDS + 1, mib=768,
    ),
    AUTHOR(
        "text/tokenizer_limits.py: REGEXES, LONGEST_TEXT", counts="regexes of a tokenizer",
        most=tokenizer_limits.REGEXES, unit="one of 4,096 bytes", feed=regexes, count=4, seconds=10, mib=1_024,
    ),
    AUTHOR(
        "text/tokenizer_limits.py: MAX_STRINGS", counts="tokens of a vocabulary", most=STRINGS, unit="a short token",
        feed=vocabulary, count=STRINGS // 16, seconds=12, mib=1_536,
    ),
    AUTHOR(
        "text/tokenizer_limits.py: MAX_STRINGS", counts="parts of merges", most=STRINGS, unit="a short merge",
        feed=merges, count=STRINGS // 16, seconds=12, mib=1_536,
    ),
    AUTHOR(
        "text/tokenizer_limits.py: MAX_STRINGS, ADDED_BYTES", counts="strings of added tokens", most=STRINGS,
        unit="an added token of 16 bytes", feed=added, count=STRINGS // 16, seconds=24, mib=1_024,
    ),
    AUTHOR(
        "text/tokenizer_limits.py: MAX_STRINGS", counts="quotes of a tokenizer.json, by pairs", most=STRINGS,
        unit="an escaped quote", feed=quotes, count=STRINGS // 4, seconds=3, mib=256,
    ),
    AUTHOR(
        "text/tokenizer_limits.py: PIECE_CHARACTERS, LONGEST_PIECE", counts="unigram pieces", most=STRINGS,
        unit="a short piece", feed=pieces, count=STRINGS // 16, seconds=12, mib=2_560,
    ),
    AUTHOR(
        "text/replies/patterns.py: MAX_PROGRAM, MAX_PATTERN, MAX_REPEAT", counts="characters of a reply and a pattern",
        most=4_096, unit="one that all steps read", feed=searched, count=256, seconds=2, mib=16,
    ),
    AUTHOR(
        "text/replies/response_template.py: PROMPT_CHARACTERS, PROMPT_STEPS", counts="ends of prompts before a reply",
        most=1, unit="one that all steps read", feed=anchored, count=1, seconds=3, mib=16,
    ),
    AUTHOR(
        "text/replies/response_template.py: TAG_STEPS", counts="calls whose tags a pattern finds", most=1,
        unit="one that takes all steps", feed=tags, count=1, seconds=3, mib=16,
    ),
    STRANGER(
        "text/replies/arguments.py: MAX_SCHEMAS, MAX_CHOICES", counts="parameters of a tool that has to be called",
        most=2_048, unit="one that refers to many schemas", feed=parameters, count=512, seconds=2, mib=16,
    ),
    STRANGER(
        "text/replies/history.py: MAX_KEPT, MAX_TOKENS, LONGEST, MOST_COMPARED", counts="earlier replies",
        most=history.MAX_KEPT, unit="one that the template has written otherwise", feed=restored, count=32, seconds=3,
        mib=64,
    ),
]  # fmt: skip

OTHERS: dict[str, dict[str, Other]] = {
    "text/gguf/reading.py": {"MOST": Other("tokens of a partial tokenizer, built in a tenth of a second")},
    "text/gguf/vocabulary.py": {"LONGEST": within("characters that are cut")},
    "text/replies/arguments.py": {"_MAX_DEPTH": SMALL},
    "text/replies/call.py": {
        "MAX_ARGUMENTS": SMALL, "MAX_ALL_ARGUMENTS": SMALL, "MAX_SPACE": SMALL, "MAX_NAME": SMALL,
    },
    "text/replies/harmony.py": {"_LONGEST": SMALL},
    "text/replies/patterns.py": {"_MAX_NESTED": SMALL, "_MAX_RANGES": SMALL},
    "text/replies/response_template.py": {
        "MAX_FIELDS": within("characters of a reply and a pattern: those of all fields have its steps together"),
        "MAX_LITERALS": SMALL, "MAX_LITERAL": SMALL, "_MAX_NODES": SMALL, "MAX_DELIMITERS": SMALL,
    },
    "text/replies/template_scanner.py": {"MAX_MATCH": within("characters of a reply and a pattern")},
    "text/replies/json_reader.py": {"MAX_DEPTH": SMALL, "MAX_WORD": SMALL},
    "text/tokenizer.py": {
        "MAX_FILE": within("tokens of a vocabulary"), "MAX_JSON": within("values of a checkpoint's JSON"),
    },
}  # fmt: skip
