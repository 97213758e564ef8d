"""Whole sessions on a real GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/session/test_on_gpu.py`.

REKINDLE_TRY_GPU_TESTS=1 runs them on the device at hand, to see that they themselves are right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import pytest

import rekindle
from helpers import small, tiered
from rekindle._src.session.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu" and not os.environ.get("REKINDLE_TRY_GPU_TESTS"),
        reason="needs an NVIDIA GPU and JAX_PLATFORMS=cuda,cpu",
    ),
]
LENGTHS = 3, 17, 30, 9, 41


def opened(**changes: Any) -> Session:
    return rekindle.open_sync(small.MODEL, **small.OPTIONS | changes)


def generated(session: Session, **options: Any) -> list[tuple[int, ...]]:
    """Prompts of several lengths at once, so that steps are mixed."""
    prompts = [small.prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    settings = {"max_tokens": 12, "ignore_eos": True, **options}
    return [done.token_ids for done in session.generate_sync(prompts, **settings)]


def test_mixed_steps_give_what_the_plain_loop_gives() -> None:
    with opened() as session:
        expected = [small.plain(small.prompt(seed, length), 12) for seed, length in enumerate(LENGTHS)]
        assert generated(session) == expected
        assert generated(session) == expected, "from the prefix cache"


def test_a_seed_gives_the_same_tokens_again_and_options_do_not_disturb_neighbours() -> None:
    with opened() as session:
        options = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 7, "logprobs": 3}
        first = generated(session, **options)
        assert generated(session, **options) == first
        assert generated(session) == [
            small.plain(small.prompt(seed, length), 12) for seed, length in enumerate(LENGTHS)
        ]


def test_drafts_change_no_token() -> None:
    with opened(prompt_lookup=3) as session:
        prompt = [5, 6, 7, 8] * 6
        done = session.generate_sync(prompt, max_tokens=20, ignore_eos=True)
        assert done.token_ids == small.plain(prompt, 20)


def test_pages_leave_the_device_and_come_back(tmp_path: Path) -> None:
    with tiered.opened(tmp_path) as session:
        for index in (0, 1, 2, 3, 0, 2, 1, 3, 0):
            tiered.ask(session, index)
        stats = session.stats()
        assert stats.pages_out and stats.pages_in, "no page left the device and came back"


def test_a_snapshot_and_stored_programs_serve_the_next_session(tmp_path: Path) -> None:
    with tiered.opened(tmp_path, precompile="all") as session:
        tiered.ask(session, 0)
        session.save("mine").result_sync()
    with tiered.opened(tmp_path, precompile="all", restore="mine") as session:
        assert tiered.ask(session, 0) >= 64
        programs = session.programs()
        assert {program.origin for program in programs} == {"loaded"}
        assert (programs.counts.traces, programs.counts.compilations) == (0, 0)
