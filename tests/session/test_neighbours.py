"""What one request asks for, or brings along, can't fail or change the requests that share its steps (float32)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.bounds import Within
from helpers.plain_loop import plain_loop
from helpers.sessions import front_of, writer_of
from helpers.tiered import MODEL, NEW, ask, opened, plain, prompt
from rekindle._src.session.session import Session
from rekindle.errors import InvalidRequest, RekindleError, StoreError

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
NEIGHBOUR = 3


def beside(session: Session, offending: list[int], **options: Any) -> Any:
    """Runs a request alongside a neighbour, which has to be exact; returns what the request gave or raised."""
    neighbour = session.submit(list(prompt(NEIGHBOUR)), max_tokens=NEW, ignore_eos=True)
    other = session.submit(offending, **options)
    assert neighbour.result_sync().token_ids == plain(NEIGHBOUR)
    try:
        return other.result_sync()
    except RekindleError as error:
        return error


def test_more_end_tokens_than_min_tokens_can_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as session:
        monkeypatch.setattr(front_of(session).tokenizer, "eos_ids", frozenset(range(100, 140)))
        failed = beside(session, [5, 6, 7, 8], max_tokens=4, min_tokens=2)
        assert isinstance(failed, InvalidRequest) and "40 end tokens" in str(failed)
        assert beside(session, [5, 6, 7, 8], max_tokens=4).token_ids, "without min_tokens nothing has to be masked"
        assert beside(session, [5, 6, 7, 8], max_tokens=4, repetition_penalty=1.1).token_ids
        ask(session, 0)


def test_end_ids_beyond_any_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as session:
        monkeypatch.setattr(front_of(session).tokenizer, "eos_ids", frozenset({2**70, -5}))
        assert len(beside(session, [5, 6, 7, 8], max_tokens=4, min_tokens=2).token_ids) == 4


def test_options_beyond_float32_where_warnings_are_errors(tmp_path: Path) -> None:
    extremes: list[dict[str, Any]] = [
        {"temperature": 1e300}, {"temperature": 1e300, "top_p": 0.9}, {"repetition_penalty": 1e-300}
    ]  # fmt: skip
    with opened(tmp_path) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in extremes:
            done = beside(session, [5, 6, 7, 8], max_tokens=4, ignore_eos=True, seed=3, **options)
            assert len(done.token_ids) == 4, options


@pytest.mark.parametrize("wrong", ["shape", *(pytest.param(one, marks=pytest.mark.slow) for one in ("dtype", "count"))])
def test_an_imported_page_of_another_layout(tmp_path: Path, wrong: str) -> None:
    with opened(tmp_path, disk_memory=0) as session:
        ask(session, 0)
        for index in (1, 2):  # push its pages off the device
            ask(session, index)
        tiers = writer_of(session).tiers
        assert tiers is not None
        for digest, payload in tiers.host._payloads.items():
            if wrong == "shape":
                changed = tuple(leaf[..., :3] for leaf in payload)
            elif wrong == "dtype":
                changed = tuple(leaf.astype(np.float16) for leaf in payload)
            else:
                changed = (*payload, payload[0])
            tiers.host._payloads[digest] = changed
        assert len(tiers.host) > 0
        neighbour = session.submit([9, 8, 7], max_tokens=30, ignore_eos=True)
        failed = session.submit(list(prompt(0)), max_tokens=NEW, ignore_eos=True)
        with pytest.raises(StoreError, match="where this session's pages have"):
            failed.result_sync()
        assert neighbour.result_sync().token_ids == tuple(plain_loop(MODEL, [9, 8, 7], 30, context=128))
        ask(session, 0)  # computed, since the page is not offered again


def test_too_large_requests_are_refused_while_a_neighbour_streams(tmp_path: Path, within: Within) -> None:
    """10,000 stop strings for each of 64 sequences held the neighbour for 1.4 s, and refusing n = 2e8 took 1.1 s."""
    too_much: list[dict[str, Any]] = [
        {"n": 200_000_000},
        {"n": 10**30},
        {"n": 64, "stop": [f"stop string number {index}" for index in range(10_000)]},
        {"logit_bias": dict.fromkeys(range(100_000), 1.0)},
    ]
    with opened(tmp_path) as session:
        neighbour = session.submit([9, 8, 7], max_tokens=30, ignore_eos=True)
        for options in too_much:
            with within(1), pytest.raises(InvalidRequest):
                session.submit([5, 6, 7], **options)
        with pytest.raises(InvalidRequest, match="sequences that one call may ask for"):
            session.generate([[5, 6, 7]] * 1000, n=1000)
        assert neighbour.result_sync().token_ids == tuple(plain_loop(MODEL, [9, 8, 7], 30, context=128))
