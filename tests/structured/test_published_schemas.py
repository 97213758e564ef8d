"""Thousands of published schemas and instances: what a guide accepts is valid, and what the model writes is too.

The data is not part of the repository: $REKINDLE_STRUCTURED_DATA, or `shared/structured` next to the checkout.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import rekindle
from rekindle import Sampling, tiny
from rekindle._src.core.records import mask_words
from rekindle._src.structured.grammar import Grammars
from rekindle._src.structured.spec import structure_of
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
jsonschema = pytest.importorskip("jsonschema", reason="it checks what was written")
DATA = Path(os.environ.get("REKINDLE_STRUCTURED_DATA", Path(__file__).parents[3] / "shared" / "structured"))
MASKBENCH, SUITE = DATA / "maskbench-sample.jsonl.gz", DATA / "json-schema-test-suite-2020-12.json.gz"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MASKBENCH.exists(), reason=f"{DATA} has no published schemas; set REKINDLE_STRUCTURED_DATA"),
]
TOKENIZER = Tokenizer.load(tiny.folder())
VOCAB = 2048
GENERATIONS = 5  # of each schema


class Verdict(NamedTuple):
    accepted: bool
    reason: str = ""


def maskbench() -> list[dict[str, Any]]:
    with gzip.open(MASKBENCH, "rt") as lines:
        return [json.loads(line) for line in lines]


def suite() -> list[dict[str, Any]]:
    """Groups of a schema with its instances: those that every validator has to pass.

    The optional ones ask for more than a format's shape, such as leap years and the tables of Punycode.
    """
    with gzip.open(SUITE, "rt") as file:
        files = json.load(file)
    return [group for one in files if not one["file"].startswith("optional/") for group in one["groups"]]


def follows(grammars: Grammars, schema: dict[str, Any], instance: Any) -> Verdict:
    """Whether the schema's guide lets the model write an instance."""
    structure = structure_of(Sampling(schema=schema))
    assert structure is not None
    guide = grammars.compile(structure.spec).guide(TOKENIZER.eos_ids)
    text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    mask = np.zeros(mask_words(VOCAB), np.int32)
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if guide.ended or guide.fill(mask) or not mask[token >> 5] >> (token & 31) & 1:
            return Verdict(False)
        guide.consume(token)
    return Verdict(guide.accepting)


def check_instances(groups: list[dict[str, Any]], most_valid_refused: float) -> None:
    grammars = Grammars(TOKENIZER, VOCAB)
    counts: Counter[str] = Counter()
    wrong = []
    for group in groups:
        schema = group["schema"]
        if not isinstance(schema, dict):
            counts["schemas that are true or false"] += 1
            continue
        for test in group["tests"]:
            try:
                accepted = follows(grammars, schema, test["data"]).accepted
            except InvalidRequest as error:
                counts[f"refused: {error.problem.partition(':')[2].strip()[:40]}"] += 1
                break
            counts[f"{'valid' if test['valid'] else 'invalid'}, {'accepted' if accepted else 'not accepted'}"] += 1
            if accepted and not test["valid"]:
                wrong.append((schema, test["data"]))
    print(*sorted(counts.items(), key=lambda entry: -entry[1]), sep="\n")
    assert not wrong, wrong[:5]
    accepted, refused = counts["valid, accepted"], counts["valid, not accepted"]
    assert accepted > 100 and refused <= most_valid_refused * (accepted + refused)


def test_no_invalid_instance_of_maskbench_is_accepted() -> None:
    check_instances(maskbench(), 0.05)


def test_no_invalid_instance_of_the_test_suite_is_accepted() -> None:
    # Where a schema says nothing about the type, llguidance allows what the keywords are about.
    check_instances(suite(), 0.5)


def invalid(schema: dict[str, Any], text: str) -> str:
    """Why a text does not follow a schema; empty if it does."""
    messages = [""]
    # 4.1 is a multiple of 0.01, but not of the float next to it.
    for number in (float, Decimal):
        exact = json.loads(json.dumps(schema), parse_float=number)
        found = json.loads(text, parse_float=number)
        messages = [error.message for error in jsonschema.validators.validator_for(schema)(exact).iter_errors(found)]
        if not messages:
            return ""
    return messages[0]


def test_numbers_are_checked_as_decimals() -> None:
    assert not invalid({"type": "number", "multipleOf": 0.01}, "4.10")
    assert invalid({"type": "number", "multipleOf": 0.01}, "4.105")
    assert not invalid({"type": "integer"}, "4.0")


@pytest.mark.timeout(5400)  # 900,000 tokens
def test_what_the_model_writes_at_temperature_one_is_valid() -> None:
    counts: Counter[str] = Counter()
    wrong = []
    with rekindle.open_sync("tiny", quiet=True, disk_memory=0, seed=0, max_model_len=512) as session:
        schemas = [entry["schema"] for entry in maskbench()]
        handles = []
        for index, schema in enumerate(schemas):
            sampling = Sampling(schema=schema, temperature=1.0, seed=index, n=GENERATIONS, max_tokens=300)
            handles.append((schema, session.generate("An example as JSON: ", sampling)))
        for at in range(0, len(handles), 8):
            for _, handle in handles[at : at + 8]:
                handle.submit()
            for schema, handle in handles[at : at + 8]:
                try:
                    results: Any = handle.result_sync()
                except rekindle.RekindleError as error:
                    counts[f"{type(error).__name__}: {str(error).partition(': ')[2][:60]}"] += GENERATIONS
                    continue
                for done in results:
                    if done.parse_error is not None:
                        counts[done.parse_error[:20]] += 1
                        continue
                    counts["complete"] += 1
                    if problem := invalid(schema, done.text):
                        wrong.append((schema, done.text, problem))
        session.check_integrity()
    print(*sorted(counts.items(), key=lambda entry: -entry[1]), sep="\n")
    assert not wrong, wrong[:3]
    assert sum(counts.values()) >= 2_400
    assert counts["complete"] >= 1_000
