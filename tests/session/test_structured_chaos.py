"""Guided requests amid cancellations, preemption, forks and pages that leave the device: all others are token-exact."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle import Handle
from rekindle.errors import RequestAborted

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
pytestmark = pytest.mark.slow
WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
SCHEMA = {
    "type": "object", "properties": {"a": WORD, "list": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 6}},
    "required": ["a", "list"], "additionalProperties": False,
}  # fmt: skip
ASKED: list[dict[str, Any]] = [
    {"schema": SCHEMA}, {}, {"regex": "[a-z ]{20,60}\\."}, {"choice": ["a cat sat on a mat", "a dog ran in the sun"]},
    {"repetition_penalty": 1.2}, {"schema": SCHEMA, "repetition_penalty": 1.1}, {"schema": SCHEMA, "logprobs": 1},
]  # fmt: skip


def options(index: int) -> dict[str, Any]:
    return {"max_tokens": 50, "temperature": 1.0, "seed": index, **ASKED[index % len(ASKED)]}


def prompt(index: int) -> str:
    return f"Once upon a time there was a {['cat', 'dog', 'girl', 'boy'][index % 4]}. " * (1 + index % 5) + str(
        index % 9
    )


@pytest.mark.parametrize("lookup", [0, 2])
def test_neighbours_are_exact_whatever_happens(tmp_path: Path, lookup: int) -> None:
    chance = random.Random(lookup)
    common: dict[str, Any] = {
        "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 256, "page_size": 16,
        "disk_memory": 0, "quiet": True, "seed": 0, "cache_dir": str(tmp_path),
    }  # fmt: skip
    with rekindle.open_sync("tiny", **common) as alone:
        wanted = [alone.generate_sync(prompt(index), **options(index)).token_ids for index in range(40)]
    # So few pages that running requests are preempted, and cached pages leave for host memory and come back.
    with rekindle.open_sync("tiny", device_pages=20, prompt_lookup=lookup, **{**common, "max_requests": 8}) as session:
        for _ in range(4):
            handles: dict[int, Handle[Any]] = {}
            cancelled: set[int] = set()
            for index in chance.sample(range(40), 24):
                handles[index] = session.submit(prompt(index), **options(index))
                if chance.random() < 0.3:
                    victim = chance.choice([*handles])
                    if chance.random() < 0.5:
                        handles[victim].wait_for_more(0)
                    handles[victim].cancel()
                    cancelled.add(victim)
            for index, handle in handles.items():
                try:
                    done = handle.result_sync()
                except RequestAborted:
                    assert index in cancelled
                    continue
                assert done.token_ids == wanted[index], options(index)
                if chance.random() < 0.3 and len(done.token_ids) > 3:
                    at = chance.randrange(1, len(done.token_ids) - 1)
                    assert session.fork(done, at=at).result_sync().token_ids == done.token_ids[at:]
            session.check_integrity()
        stats = session.stats()
        assert stats.preemptions > 0
        assert stats.failed == 0
