"""Objects end before their tokens do, and numbers have so many digits, whatever a model would write."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from helpers.guides import allowed_in
from rekindle import Sampling, tiny
from rekindle._src.core.records import GuideReport, mask_words
from rekindle._src.structured.grammar import Grammars
from rekindle._src.structured.spec import structure_of
from rekindle._src.text.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
TOKENIZER = Tokenizer.load(tiny.folder())
VOCAB = 2048


def closed(**properties: Any) -> dict[str, Any]:
    required = [name for name in properties if not name.startswith("maybe")]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
PERSON = closed(name=TEXT, age=WHOLE, tags={"type": "array", "items": TEXT})
NODE = closed(v=WHOLE, kids={"type": "array", "items": {"$ref": "#/$defs/N"}}, maybe_next={"$ref": "#/$defs/N"})
SCHEMAS: dict[str, tuple[dict[str, Any], int]] = {  # and the fewest tokens that are tried
    "an object": (PERSON, 40),
    "objects in a list": ({"type": "array", "items": PERSON}, 12),
    "what may be absent": (closed(maybe_a=NUMBER, maybe_b=PERSON, maybe_c=PERSON), 20),
    "lists in lists": (closed(rows={"type": "array", "items": closed(inner=PERSON, xs={"type": "array"})}), 24),
    "anything": ({"type": "object"}, 12),
    "itself": ({"$defs": {"N": NODE}, "$ref": "#/$defs/N"}, 30),
    "patterns": (closed(k={"enum": ["red", "green"]}, p={"type": "string", "pattern": "^[0-9]{3}-[a-z]+$"}), 40),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB)


def written(grammars: Grammars, seed: int, budget: int, prefer: str = "", **options: Any) -> tuple[str, GuideReport]:
    """What a model writes that draws its tokens, or prefers those of some characters."""
    structure = structure_of(Sampling(**options))
    assert structure is not None
    guide = grammars.compile(structure.spec).guide(frozenset(TOKENIZER.eos_ids), budget=budget)
    drawn, tokens, told = random.Random(seed), list[int](), GuideReport()
    mask = np.zeros(mask_words(VOCAB), np.int32)
    while len(tokens) < budget and not told.ended:
        assert not guide.fill(mask)
        choices = sorted(allowed_in(mask))
        texts = {token: TOKENIZER.decode([token]) for token in choices if prefer}
        preferred = [token for token, text in texts.items() if text and set(text) <= set(prefer)]
        tokens.append(drawn.choice(preferred or choices))
        told = guide.consume(tokens[-1])
        assert not told.problem
    return TOKENIZER.decode(tokens), told


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_object_is_whole_however_few_tokens_it_has(grammars: Grammars, name: str) -> None:
    schema, least = SCHEMAS[name]
    for budget in (least, 2 * least, 5 * least):
        for seed in range(5):
            text, told = written(grammars, seed, budget, schema=schema)
            assert told.ended and not told.by_eos, (budget, text)
            json.loads(text)


def test_it_says_whether_it_had_to_be_ended(grammars: Grammars) -> None:
    text, told = written(grammars, 0, 60, prefer="abc", schema=PERSON)
    assert told.ended and told.steered and json.loads(text)["tags"] == [], text
    text, told = written(grammars, 0, 60, prefer='"],0}', schema=PERSON)
    assert told.ended and not told.steered, text
    _, told = written(grammars, 0, 6, prefer="abc", schema=PERSON)
    assert not told.ended and not told.steered, "it can't be ended within so few"
    text, told = written(grammars, 0, 9, prefer="abc", schema={"type": "string"})
    assert not told.ended, "a text alone is cut, and no object"


@pytest.mark.parametrize("schema", [WHOLE, closed(n=WHOLE)])
def test_integers_are_those_of_64_bits(grammars: Grammars, schema: Any) -> None:
    for seed in range(5):
        text, _ = written(grammars, seed, 200, prefer="123456789", schema=schema)
        assert sum(map(str.isdigit, text)) == 18, text


def test_a_float_is_finite_and_strings_have_any_digits(grammars: Grammars) -> None:
    for seed in range(20):
        text, _ = written(grammars, seed, 200, prefer="e123456789", schema=NUMBER)
        assert np.isfinite(float(text)), text
    text, _ = written(grammars, 0, 60, prefer="123456789", schema=closed(card=TEXT))
    assert len(json.loads(text)["card"]) > 30
    big = {"enum": [10**30, 1]}
    texts = {written(grammars, seed, 60, prefer="0123456789", schema=big)[0] for seed in range(4)}
    assert str(10**30) in texts, "a schema's own numbers are as long as they are"


def test_a_budget_that_is_enough_changes_nothing(grammars: Grammars) -> None:
    """Tokens such as `","` and `"}` stay, until the rest is about what the end takes."""
    city = closed(name=TEXT, country=TEXT, population=WHOLE, area=NUMBER, famous_for={"type": "array", "items": TEXT})
    record = {"name": "Lima", "country": "Peru", "population": 11, "area": 2, "famous_for": ["the sea", "food", "art"]}
    wanted = json.dumps(record, separators=(",", ":"))
    structure = structure_of(Sampling(schema=city))
    assert structure is not None
    compiled = grammars.compile(structure.spec)
    lengths = []
    for budget in (400, 0):
        guide = compiled.guide(frozenset(TOKENIZER.eos_ids), budget=budget or lengths[0] + 14)
        text, told, mask = "", GuideReport(), np.zeros(mask_words(VOCAB), np.int32)
        lengths.append(0)
        while text != wanted and not told.ended:
            assert not guide.fill(mask)
            fit = [t for t in allowed_in(mask) if (word := TOKENIZER.decode([t])) and wanted.startswith(text + word)]
            assert fit, (budget, text, "what would come is not allowed")
            token = max(fit, key=lambda token: len(TOKENIZER.decode([token])))
            text += TOKENIZER.decode([token])
            told, lengths[-1] = guide.consume(token), lengths[-1] + 1
        assert text == wanted
    assert lengths[0] == lengths[1], "the same tokens"
