"""Compiled grammars and their guides: what they allow, where they end, what is refused and why."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from helpers.guides import allowed_in
from helpers.vocabularies import over
from rekindle import Sampling, tiny
from rekindle._src.core.records import mask_words
from rekindle._src.structured import compile_worker
from rekindle._src.structured import grammar as grammars_module
from rekindle._src.structured.grammar import Grammars, Guide
from rekindle._src.structured.reasoning import ReasoningRules
from rekindle._src.structured.spec import structure_of
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
TOKENIZER = Tokenizer.load(tiny.folder())
VOCAB = 2048
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB)


def guide(grammars: Grammars, eos: Iterable[int] = TOKENIZER.eos_ids, rules: Any = None, **options: Any) -> Any:
    structure = structure_of(Sampling(**options))
    assert structure is not None
    return grammars.compile(structure.spec).guide(frozenset(eos), rules)


def allowed(guide: Guide, vocab: int = VOCAB) -> set[int]:
    mask = np.zeros(mask_words(vocab), np.int32)
    assert not guide.fill(mask)
    return allowed_in(mask)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("most", [2_000, compile_worker.MOST_STATES])
def test_the_states_of_an_automaton_are_bounded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is generated, a new state remembers where each of the last 300 characters was an "a"."""
    monkeypatch.setattr(compile_worker, "MOST_STATES", most)
    one = guide(Grammars(TOKENIZER, VOCAB), regex="(.|\n)*a(.|\n){300}")
    draw, mask, problem = random.Random(1), np.zeros(mask_words(VOCAB), np.int32), ""
    for _ in range(400):
        if problem := problem or one.fill(mask):
            break
        report = one.consume(draw.choice(sorted(allowed_in(mask) - set(TOKENIZER.eos_ids))))
        assert not report.ended or report.problem
        problem = report.problem
    assert bool(problem) == (most == 2_000), problem


def test_a_guide_follows_a_text_to_its_end(grammars: Grammars) -> None:
    one = guide(grammars, schema=OBJECT)
    assert [TOKENIZER.decode([token]) for token in one.ahead] == ['{"', "name", '":']
    told = []
    for token in ids('{"name":"Tom"}'):
        assert token in allowed(one)
        told.append(one.consume(token))
    assert [one.ended for one in told] == [False] * (len(told) - 1) + [True]
    assert [entry.forced for entry in told[:3]] == [True] * 3 and not told[-2].forced
    assert told[-1].accepting and not told[-1].by_eos
    assert one.consumed == len(told)


class CountedRuns:
    """A matcher that counts how often its forced run is found."""

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.runs = matcher, 0

    def compute_ff_tokens(self) -> list[int]:
        self.runs += 1
        return list(self.matcher.compute_ff_tokens())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


def counted(grammars: Grammars, **options: Any) -> tuple[Guide, CountedRuns]:
    one = guide(grammars, **options)
    one._matcher = matcher = CountedRuns(one._matcher)
    return one, matcher


def test_a_run_of_forced_tokens_is_found_once_and_kept(grammars: Grammars) -> None:
    one, matcher = counted(grammars, schema={"const": list(range(300))})
    whole = [*one._run]
    assert len(whole) > 500 and one.ahead == tuple(whole[:16])
    half = len(whole) // 2
    for at, token in enumerate(whole[:half]):
        assert one.consume(token).ahead == tuple(whole[at + 1 : at + 17])
    other, behind = one.copy(), one.ahead
    for token in whole[half:]:
        assert one.consume(token).forced
    assert one.ended and one.accepting and matcher.runs == 0, "the grammar's own, found when it was compiled"
    assert other.ahead == behind, "a copy goes on from its own place"


def test_a_long_run_in_another_spelling_is_seldom_found_anew(grammars: Grammars) -> None:
    text = json.dumps(list(range(300)), separators=(",", ":"))
    one, matcher = counted(grammars, schema={"const": list(range(300))})
    told = [
        one.consume(token) for byte in text.encode() for token in TOKENIZER.encode(chr(byte), add_special_tokens=False)
    ]
    assert not any(entry.problem for entry in told) and one.ended
    assert matcher.runs < len(told) / 8, f"{matcher.runs} times for {len(told)} tokens"
    short, matcher = counted(grammars, schema={"const": "ab"})
    short.consume(ids('"')[0])
    assert matcher.runs <= 1 and short.ahead, "a short one at once"


def test_a_token_that_is_not_allowed_is_a_problem(grammars: Grammars) -> None:
    one = guide(grammars, regex="[0-9]+")
    told = one.consume(ids(" is")[0])
    assert told.ended and "satisfy" in told.problem


def test_every_end_token_counts_and_only_where_the_text_is_complete(grammars: Grammars) -> None:
    assert len(TOKENIZER.eos_ids) == 2
    one = guide(grammars, regex="[0-9]+")
    assert not allowed(one) & {*TOKENIZER.eos_ids}
    one.consume(ids("7")[0])
    assert allowed(one) >= {*TOKENIZER.eos_ids}
    told = one.copy().consume(TOKENIZER.eos_ids[1])
    assert told.ended and told.by_eos and told.accepting


def test_a_request_that_ignores_the_end_goes_on_as_long_as_it_can(grammars: Grammars) -> None:
    one = guide(grammars, eos=(), regex="[0-9]+")
    one.consume(ids("7")[0])
    assert allowed(one) and not allowed(one) & {*TOKENIZER.eos_ids}
    done = guide(grammars, eos=(), regex="7")
    assert done.consume(ids("7")[0]).ended


def test_a_vocabulary_larger_than_the_tokenizer() -> None:
    padded = Grammars(TOKENIZER, VOCAB + 77)
    one = guide(padded, regex="(.|\n)*")
    found = allowed(one, VOCAB + 77)
    assert found and max(found) < VOCAB


def test_a_model_without_an_end_token() -> None:
    vocab = {character: index for index, character in enumerate("ab01")}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(InvalidRequest, match="needs a model with an end token"):
        guide(Grammars(over(backend), 4), eos=(), regex="[ab]{2}")
    backend.add_special_tokens([tokenizers.AddedToken("<s>", special=True)])
    one = guide(Grammars(over(backend), 5), eos=(), regex="[ab]{2}")
    assert allowed(one, 5) == {0, 1}
    assert not one.consume(0).ended
    assert one.consume(1).ended


def test_copies_go_their_own_ways(grammars: Grammars) -> None:
    one = guide(grammars, choice=["ab", "cd"])
    other = one.copy()
    one.consume(ids("a")[0])
    assert one.consumed == 1 and other.consumed == 0
    assert ids("c")[0] in allowed(other) and ids("c")[0] not in allowed(one)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"regex": "[0-9]{3}-[a-z]+"}, "123-abc"),
        ({"choice": ["yes", 'a "quoted" \\ one\n']}, 'a "quoted" \\ one\n'),
        ({"grammar": 'root ::= "x" [0-9]+'}, "x42"),
        ({"grammar": 'start: "x" /[0-9]+/'}, "x42"),
        ({"grammar": '?start: a b\n!a: "x"\n?!b: /[0-9]+/'}, "x42"),
        ({"grammar": '!start: "x"'}, "x"),
        ({"json": True}, '{"a":[1,true,null]}'),
        ({"json": True, "whitespace_flexible": True}, '{ "a" : [1,\n 2] }'),
        ({"schema": {"type": "array", "items": {"enum": [1, "b"]}, "minItems": 2, "maxItems": 2}}, '[1,"b"]'),
    ],
)
def test_every_kind_accepts_its_text(grammars: Grammars, options: dict[str, Any], text: str) -> None:
    one = guide(grammars, **options)
    for token in ids(text):
        assert token in allowed(one), TOKENIZER.decode([token])
        told = one.consume(token)
    assert told.accepting


def test_spaces_are_not_allowed_by_default(grammars: Grammars) -> None:
    one = guide(grammars, schema=OBJECT)
    assert allowed(one) == {ids('{"')[0]} or all(" " not in TOKENIZER.decode([token]) for token in allowed(one))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schema": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}}, "oneOf"),
    ({"schema": {"not": {"type": "string"}}}, "not"),
    ({"schema": {"type": "colour"}}, "colour"),
    ({"schema": {"type": "string", "format": "colour"}}, "colour"),
    ({"schema": {"$ref": "https://example.com/schema.json"}}, "is not present"),
    ({"schema": {"$ref": "#"}}, "nothing fits it"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look"),
    ({"grammar": "no grammar at all"}, "GBNF"),
    ({"grammar": "start: missing_rule"}, "missing_rule"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED)
def test_an_impossible_grammar_raises_with_llguidances_words(
    grammars: Grammars, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        guide(grammars, **options)
    assert caught.value.field == next(iter(options))
    assert says in str(caught.value.problem)
    assert "<state>" not in str(caught.value) and "<non-verbose" not in str(caught.value)


def test_lenient_leaves_out_what_can_not_be_checked(grammars: Grammars) -> None:
    structure = structure_of(Sampling(schema={"type": "string", "format": "colour"}, lenient=True))
    assert structure is not None
    assert grammars.compile(structure.spec).warnings


def test_options_inside_a_schema_do_not_override_those_of_the_request(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest):
        guide(grammars, schema={"type": "string", "format": "colour", "x-guidance": {"lenient": True}})


def test_equal_requests_share_a_grammar_and_the_oldest_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "KEPT", 3)
    made = Grammars(TOKENIZER, VOCAB)
    for _ in range(3):
        guide(made, regex="a")
    assert made.compiled == 1
    for text in "bcda":
        guide(made, regex=text)
    assert made.compiled == 5, "a was compiled again"


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "KEPT_BYTES", 8 << 20)
    made, draw = Grammars(TOKENIZER, VOCAB), random.Random(0)
    for index in range(40):  # each about 0.4 MB
        guide(made, choice=[f"{index} {draw.random()}" for _ in range(90)])
        assert made.kept_bytes == sum(grammar.nbytes for grammar in made.kept) <= 8 << 20
    assert 10 < len(made.kept) < 30
    guide(made, regex="a|b")
    assert made.kept_bytes > 1 << 20, "what a short expression takes is not said by its length"
    large = [f"{index} {draw.random()}" for index in range(3_000)]
    guide(made, choice=large)
    assert len(made.kept) == 1 and made.kept_bytes > 8 << 20, "one is kept, however large it is"
    compiled = made.compiled
    guide(made, choice=large)
    assert made.compiled == compiled


def test_a_grammar_whose_masks_are_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_worker, "SLOWEST_MASK", -1.0)
    with pytest.raises(InvalidRequest, match="which all would wait for"):
        guide(Grammars(TOKENIZER, VOCAB), regex="abc")


def test_a_grammar_begins_after_the_reasoning(grammars: Grammars) -> None:
    rules = ReasoningRules("<think>", ("</think>",), inside=True)
    inside = guide(grammars, schema=OBJECT, rules=rules)
    assert len(allowed(inside)) == VOCAB - len(TOKENIZER.eos_ids), "it may think anything but may not end"
    for token in ids("what to say</think>"):
        assert not inside.consume(token).forced
    assert allowed(inside) == allowed(guide(grammars, schema=OBJECT)) and inside.ahead
    optional = guide(grammars, schema=OBJECT, rules=dataclasses.replace(rules, inside=False))
    opens = ids("<think>")[0]
    assert allowed(optional) == {opens} | allowed(guide(grammars, schema=OBJECT))
    at_once = optional.copy()
    for token in ids('{"name":'):
        at_once.consume(token)
    assert opens not in allowed(at_once)
    at_once.consumed = 0
    assert opens not in allowed(at_once), "nor after what a fork continues"
    for token in ids("<think>"):
        optional.consume(token)
    assert len(allowed(optional)) > 1000


def test_a_schema_of_objects_in_objects(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": OBJECT}, "required": ["a"], "additionalProperties": False}
    one = guide(grammars, schema=schema)
    text = json.dumps({"a": {"name": "x"}}, separators=(",", ":"))
    for token in ids(text):
        assert token in allowed(one)
        one.consume(token)
    assert one.ended
