"""Grammars of calls: whatever follows one is read as calls, with arguments of the tool's schema."""

from __future__ import annotations

import contextlib
import itertools
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from helpers.chatting import with_special_tokens
from helpers.replies import tool
from helpers.thorough import by_default
from rekindle._src.core.records import mask_words
from rekindle._src.structured.grammar import Grammars
from rekindle._src.structured.reasoning import ReasoningRules
from rekindle._src.structured.spec import Spec
from rekindle._src.text.replies import ReplyFormat, ReplyPlan
from rekindle._src.text.replies.call_grammar import call_grammar
from rekindle._src.text.replies.families import SYNTAXES
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed")
VOCAB = 320
STRICT = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"enum": ["a", "b", 3]},
                "where": {"$ref": "#/$defs/place"},
                "flag": {"type": ["boolean", "null"]},
            },
            "required": ["where"],
            "$defs": {"place": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
# Calls as they have to be made, where those of earlier replies are written otherwise.
_CITY = '{"city": true, "days": 2}'
CALLS = {
    ("harmony", True): f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_CITY}",
    ("harmony", False): f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_CITY}",
    ("mistral", True): f"[TOOL_CALLS]weather[ARGS]{_CITY}",
    ("phi4mini", False): f'functools[{{"name": "weather", "arguments": {_CITY}}}]',
    ("pythonic", True): f'{{"name": "weather", "parameters": {_CITY}}}',
    ("pythonic", False): f'{{"name": "weather", "parameters": {_CITY}}}',
}
TOOLS = [tool("time"), tool("weather", city="boolean", days="integer"), STRICT]


def walk(grammar: str, tokenizer: Tokenizer, seed: int) -> str:
    """A random text of the grammar, over the bytes of ASCII and the markers."""
    chance = random.Random(seed)
    llg = llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=[256])
    matcher = llguidance.LLMatcher(llg, llguidance.grammar_from("grammar", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    made: list[int] = []
    for _ in range(1500):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(t) for t in np.flatnonzero(bits) if t < 127 or t >= 256] or [
            int(t) for t in np.flatnonzero(bits)
        ]
        ends = [t for t in allowed if t == 256 or chr(t) in '"]})']  # so that it comes to an end
        token = chance.choice(ends if ends and chance.random() < 0.5 else allowed)
        if token == 256:
            break
        assert matcher.consume_token(token)
        made.append(token)
        if matcher.is_stopped():
            break
    else:
        raise AssertionError("it did not end")
    return tokenizer.decode(made, skip_special_tokens=False)


def fits(name: str, arguments: Any) -> bool:
    if name == "time":
        return arguments == {}
    if name == "weather":
        days, city = arguments.get("days", 1), arguments.get("city", True)
        return {*arguments} <= {"city", "days"} and type(days) is int and type(city) is bool
    known = {"what", "where", "flag"}
    return {*arguments} <= known and arguments["where"] in range(1, 10) and arguments.get("what", 3) in ("a", "b", 3)


@pytest.mark.parametrize(
    ("family", "marked"),
    by_default(itertools.product(sorted(SYNTAXES), (True, False)), lambda case: case[1] or case[0] == "hermes"),
)
def test_what_follows_the_grammar_is_read_as_calls(family: str, marked: bool) -> None:
    tokenizer = with_special_tokens(*(SYNTAXES[family].markers if marked else ()))
    found = set()
    for several in (False, True):
        grammar = call_grammar(SYNTAXES[family], TOOLS, tokenizer.backend.token_to_id, several=several)
        for seed in range(12):
            text = walk(grammar, tokenizer, seed + 100 * several)
            reply = ReplyFormat(SYNTAXES[family]).parse(text, tools=TOOLS)
            assert reply.content == "" and reply.tool_calls, text
            assert several or len(reply.tool_calls) == 1, text
            assert all(fits(call.name, call.arguments) for call in reply.tool_calls), text
            found |= {call.name for call in reply.tool_calls}
    assert found == {"time", "weather", "pick"}


@pytest.mark.parametrize("required", [(), ("p1",)])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_any_values_in_their_order_may_be_left_out_but_required_ones(count: int, required: tuple[str, ...]) -> None:
    names = [f"p{number}" for number in range(count)]
    one = tool("f", **dict.fromkeys(names, "integer"))
    one["function"]["parameters"]["required"] = list(required)
    tokenizer = with_special_tokens()
    grammar = call_grammar(SYNTAXES["olmo"], [one], tokenizer.backend.token_to_id, several=False)
    order = sorted(names, key=lambda name: name not in required)
    accepted = [
        chosen for size in range(count + 1) for chosen in itertools.permutations(names, size)
        if is_accepted(grammar, tokenizer, [("f", dict.fromkeys(chosen, 1))])
    ]  # fmt: skip
    assert sorted(accepted) == sorted(
        chosen for size in range(count + 1) for chosen in itertools.combinations(order, size)
        if {*required} & {*names} <= {*chosen}
    )  # fmt: skip


def is_accepted(grammar: str, tokenizer: Tokenizer, calls: list[tuple[str, dict[str, Any]]]) -> bool:
    llg = llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=[256])
    matcher = llguidance.LLMatcher(llg, llguidance.grammar_from("grammar", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(SYNTAXES["olmo"].write(calls), add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("family", ["kimi_k3", "muse", "olmo"])
def test_a_grammar_grows_with_the_properties_and_no_faster(family: str) -> None:
    def size(count: int) -> int:
        one = tool("f", **{f"p{number}": "integer" for number in range(1_000, 1_000 + count)})
        return len(call_grammar(SYNTAXES[family], [one], lambda text: None, several=False))

    assert size(400) <= 4.2 * size(100)


@pytest.mark.parametrize(
    ("family", "marked"),
    by_default(itertools.product(sorted(SYNTAXES), (True, False)), lambda case: case[0] in ("hermes", "harmony")),
)
def test_reasoning_comes_before_calls_that_have_to_be_made(family: str, marked: bool) -> None:
    """Upstream: llama.cpp and vLLM force the call where the prompt has opened reasoning, inside of it."""
    format, syntax = ReplyFormat.of_family(family), SYNTAXES[family]
    tokenizer = with_special_tokens(*(format.markers(tools=True) if marked else ()))
    grammar = call_grammar(syntax, TOOLS, tokenizer.backend.token_to_id, several=False)
    compiled = Grammars(tokenizer, VOCAB).compile(Spec("grammar", grammar))
    plan, thoughts = ReplyPlan(format, tuple(TOOLS)), format.thoughts
    call = CALLS.get((family, marked)) or syntax.write([("weather", {"city": True, "days": 2})])
    cases = [("Hi", call, True), ("Hi", "Hm." + call, False)]
    if thoughts is not None:
        opening, closing = f"{thoughts.opening}{format.marks.header}", f"{thoughts.closing}{thoughts.bridge}"
        gap = "" if thoughts.bridge else "\n\n"
        cases += [
            ("Hi", f"{opening}Hm, {{}} <x>{closing}{call}", True),
            (f"Hi{opening}\n", f"Hm.{closing}{gap}{call}", True),
        ]
        cases += [(f"Hi{opening}\n", call, False)] if not marked or thoughts.opening not in call else []
        if not format.in_channels:
            cases.append((f"Hi{opening}Hm.{closing}\n\n", call, True))
    for prompt, text, accepted in cases:
        guide = compiled.guide(tokenizer.eos_ids, thoughts and ReasoningRules.of(plan, prompt, None, calls=True))
        mask = np.zeros(mask_words(VOCAB), np.int32)
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert not guide.fill(mask) and not guide.ended, text
            if not mask[token >> 5] >> (token & 31) & 1 or guide.consume(token).problem:
                assert not accepted, (prompt, text)
                break
        else:
            assert guide.fill(mask) == "" or guide.ended
            whole = guide.ended or bool(mask[256 >> 5] & 1)  # the end may come
            assert whole == accepted, (prompt, text)
        reply = format.parse(text, tools=TOOLS, reasoning_open=format.opens_reasoning(prompt))
        assert not accepted or [one.name for one in reply.tool_calls] == ["weather"]


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_definitions_that_values_share_count_wherever_they_are_written(name: str) -> None:
    """2,000 parameters next to a megabyte of definitions: 100 kB of grammar for each was 4 GB before it was refused."""
    properties = {f"p{at}": {"type": "integer"} for at in range(2_000)}
    schema = {"type": "object", "properties": properties, "$defs": {"a": {"description": "x" * 100_000}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidRequest):
            call_grammar(SYNTAXES[name], tools, lambda marker: None, several=True)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
