"""Captures, changes of the model and drafters in one session, each with hostile options, next to texts that are known.

REKINDLE_ATTACK_SECONDS=600 pytest -m slow -s tests/soak/test_captures_and_drafts.py      # 20 s each without it
"""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import rekindle
from helpers.plain_loop import plain_loop
from helpers.sessions import eventually, wait_until_idle
from rekindle import Capture, Session, Steer
from rekindle._src.models.base import LoadedModel
from rekindle.errors import ConfigError, RekindleError
from session.test_draft_heads import HEAD, eager, with_eagle, with_head_of_its_own  # noqa: F401  the fixture
from session.test_state_cache import tokens
from soak.load import Load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs", "large_steps")]
SECONDS = float(os.environ.get("REKINDLE_ATTACK_SECONDS", "20"))
NEW = 24
NEIGHBOURS = [[*tokens(24, seed=number)] * 2 for number in range(3)]  # they repeat themselves, which drafters find
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
DRAFTERS = ["suffix", "mtp", "eagle3"]

_odd = st.one_of(
    st.sampled_from([None, True, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, math.nan, math.inf, "", "all", "\ud800", b"x"]),
    st.lists(st.integers(-3, 10**9), max_size=3), st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)  # fmt: skip
_sites = st.one_of(
    st.sampled_from([{"residual": "all"}, {"norm": True, "q": 0}]),
    st.dictionaries(st.sampled_from(["experts", "gates", "nonsense", "logits", "k"]), _odd, max_size=2), _odd,
)  # fmt: skip
_positions = st.one_of(
    st.sampled_from([None, "prompt", "output", [0], [-1], slice(0, 2**40), slice(-5, None), range(0)]), _odd
)
_captures = st.fixed_dictionaries(
    {"sites": _sites}, optional={"positions": _positions, "into": st.sampled_from(["here", "file", "\0", "a" * 300, 3]),
                                 "keep": st.one_of(st.booleans(), _odd)},
)  # fmt: skip
_vectors = st.sampled_from([
    None, np.ones(64, np.float32), np.ones(3), np.full(64, np.nan), np.full(64, 1e300), np.ones((2, 64)), "x", [[]],
])  # fmt: skip
_steers = st.fixed_dictionaries(
    {"layer": st.one_of(st.sampled_from([0, 1, -1]), _odd), "vector": _vectors},
    optional={"scale": st.one_of(st.sampled_from([0.0, 1.0, -1e30, 1e38]), _odd), "positions": _positions,
              "mode": st.sampled_from(["add", "replace", "project_out", "scale", "nonsense", 3]),
              "site": st.sampled_from(["residual", "attention", "mlp", "q", None])},
)  # fmt: skip
_asked = st.fixed_dictionaries(
    {},
    optional={
        "capture": _captures, "steer": st.lists(_steers, max_size=3), "patch": _odd, "n": st.sampled_from([1, 2, 3]),
        "max_tokens": st.integers(1, 30), "temperature": st.sampled_from([0.0, 1.0]), "seed": st.integers(0, 9),
        "stop_token_ids": st.lists(st.integers(3, 159), max_size=4), "logprobs": st.integers(0, 3),
        "logit_bias": st.just({9: 60.0, 10: 59.0}), "ignore_eos": st.booleans(),
    },
)  # fmt: skip
_prompts = st.one_of(
    st.sampled_from(NEIGHBOURS), st.lists(st.integers(3, 159), min_size=1, max_size=90),
    st.lists(st.integers(-5, 10**6), max_size=3),
)  # fmt: skip


def drawn(count: int) -> list[tuple[Any, dict[str, Any]]]:
    made: list[tuple[Any, dict[str, Any]]] = []

    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(_prompts, _asked)
    def collect(asked: Any, options: dict[str, Any]) -> None:
        made.append((asked, options))

    collect()
    return made


class Attack(Load):
    """Requests that look into the model, or change it, whose captures go into folders of all kinds."""

    def __init__(self, seed: int, folder: Path, texts: list[list[int]]) -> None:
        super().__init__(seed)
        self._folder, self._texts = folder, texts
        (folder / "file").write_text("no folder")

    async def neighbour(self, session: Session, until: float) -> None:
        while anyio.current_time() < until:
            index = self.random.randrange(len(NEIGHBOURS))
            more: dict[str, Any] = self.random.choice(({}, {"capture": Capture({"norm": True}), "logprobs": 1}))
            done = await session.generate(NEIGHBOURS[index], **GREEDY, **more)
            assert list(done.token_ids) == self._texts[index], f"neighbour {index} with {more}"
            if more:
                assert done.captured["norm"].shape[0] == len(NEIGHBOURS[index]) + NEW - 1
            self.counts["neighbours right"] += 1

    def _sent(self, options: dict[str, Any]) -> dict[str, Any]:
        """Make the captures and changes of a request, which are checked as they are made."""
        options = dict(options)
        if "capture" in options:
            capture = dict(options["capture"])
            if isinstance(capture.get("into"), str) and "\0" not in capture["into"]:
                capture["into"] = self._folder / capture["into"]
            options["capture"] = Capture(**capture)
        if "steer" in options:
            options["steer"] = [Steer(**one) for one in options["steer"]]
        if options.get("patch") == "all":  # of another request
            options["patch"] = self._captured
        return options

    @property
    def enough(self) -> bool:
        """True once there were several of each outcome."""
        ends = (
            *(self.counts[end] for end in ("finish", "cancel", "leave", "neighbours right")),
            sum(self.errors.values()),
        )
        return min(ends) > 5

    async def prepare(self, session: Session) -> None:
        done = await session.generate(NEIGHBOURS[0], **GREEDY, capture=Capture({"residual": "all"}))
        self._captured = done.captured

    async def _finish(self, session: Session, asked: Any, options: dict[str, Any]) -> None:
        await super()._finish(session, asked, self._sent(options))

    async def _cancel(self, session: Session, asked: Any, options: dict[str, Any]) -> None:
        await super()._cancel(session, asked, self._sent(options))

    async def _leave(self, session: Session, asked: Any, options: dict[str, Any]) -> None:
        await super()._leave(session, asked, self._sent(options))

    async def _time_out(self, session: Session, asked: Any, options: dict[str, Any]) -> None:
        await super()._time_out(session, asked, self._sent(options))


def with_drafter(name: str, folder: Path) -> tuple[LoadedModel, dict[str, Any]]:
    if name == "eagle3":
        pair = with_eagle(folder / "head")
        return pair.model, pair.options
    return with_head_of_its_own("qwen3.5").model, {**HEAD, "drafts": name}


@pytest.mark.timeout(SECONDS * 3 + 900)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_hostile_captures_and_drafts_end_themselves_alone(drafter: str, tmp_path: Path) -> None:
    model, options = with_drafter(drafter, tmp_path)
    texts = [plain_loop(model, prompt, NEW) for prompt in NEIGHBOURS]
    attack = Attack(3, tmp_path, texts)
    made = drawn(300)

    def drafted(session: Session) -> bool:
        counts = session.stats().drafters.get(drafter)
        return counts is not None and counts.drafted > 0

    async def run(session: Session) -> None:
        await attack.prepare(session)
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(attack.neighbour, session, math.inf)
            for _ in range(4):
                group.start_soon(attack.chaos, session, math.inf, made)
            await anyio.sleep(SECONDS)
            await anyio.to_thread.run_sync(eventually, lambda: attack.enough and drafted(session), 600)
            group.cancel_scope.cancel()

    with rekindle.open_sync(model, **{**options, "capture_memory": 1 << 20}) as session:
        anyio.run(run, session)
        wait_until_idle(session)
        session.check_integrity()
        stats = session.stats()
        print(f"{drafter}: {dict(attack.counts)}; {dict(attack.errors)}; {stats.drafters.get(drafter)}")
        for prompt, text in zip(NEIGHBOURS, texts, strict=True):
            assert list(session.generate_sync(prompt, **GREEDY).token_ids) == text


def test_hostile_options_open_or_are_refused_by_a_typed_error(tmp_path: Path) -> None:
    """`drafts`, `prompt_lookup` and `capture_memory` with any value; some of them are a head of another model."""
    model, options = with_drafter("mtp", tmp_path)
    other = with_eagle(tmp_path / "other").options["drafts"]
    (tmp_path / "empty").mkdir()
    values = [None, True, -1, 0, 3, 2**63, 10**400, 1.5, math.nan, math.inf, "", "suffix", "mtp", "none", "\ud800",
              "\0", "a" * 5_000, str(tmp_path / "empty"), str(tmp_path), other, b"mtp", [], {}]  # fmt: skip
    unnamed: list[RekindleError] = []
    draw, ends, names = random.Random(0), {"opened": 0, "refused": 0}, ("drafts", "prompt_lookup", "capture_memory")
    for number in range(len(values) * len(names)):
        given = {names[number % 3]: values[number // 3]}
        if draw.random() < 0.3:
            given[draw.choice(names)] = draw.choice(values)
        try:
            with rekindle.open_sync(model, **{**options, **given}) as session:
                done = session.generate_sync(
                    NEIGHBOURS[0], **{**GREEDY, "max_tokens": 2}, capture=Capture({"norm": True})
                )
                assert done.captured["norm"].shape[0] == len(NEIGHBOURS[0]) + 1
                ends["opened"] += 1
        except RekindleError as error:
            ends["refused"] += 1
            unnamed += [error] * (isinstance(error, ConfigError) and error.field not in names)
    assert not unnamed, unnamed
    assert min(ends.values()) > 5, ends
