"""The load of a soak: neighbours whose tokens are known, and requests with every option at its extremes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import anyio.lowlevel
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from helpers.tiered import NEW, SHARED, plain, prompt
from rekindle._src.session.session import Session
from rekindle.errors import RekindleError

NEIGHBOURS = 4
_numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, 2**70, 10**30, 0.0, -0.0, 1e-300, 1e300, 5e-324]),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), True, False, None]),
    st.floats(),
    st.integers(),
)
_garbage = st.one_of(
    _numbers, st.text(max_size=8), st.lists(st.integers(), max_size=3), st.none(), st.binary(max_size=4)
)
_sound: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 12),
    "temperature": st.sampled_from([0.0, 1e-6, 0.7, 1.0, 100.0]),
    "top_k": st.integers(0, 200),
    "top_p": st.sampled_from([1e-9, 0.5, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.1, 1.0]),
    "repetition_penalty": st.sampled_from([1e-3, 0.5, 1.0, 1.3, 1e3]),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "logit_bias": st.dictionaries(
        st.integers(0, 159), st.sampled_from([-100.0, 0.0, 100.0, float("-inf")]), max_size=8
    ),
    "seed": st.integers(0, 2**63 - 1),
    "n": st.integers(1, 3),
    "stop_token_ids": st.lists(st.integers(0, 159), max_size=16),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "priority": st.integers(-5, 5),
    "salt": st.sampled_from(["a", "b", "\ud800", "x" * 1024]),
}
_prompts = st.one_of(
    st.lists(st.integers(3, 159), min_size=1, max_size=110),
    st.lists(st.integers(-5, 10**6), max_size=4),
    st.lists(st.integers(3, 159), min_size=127, max_size=300),
)


def requests(count: int, seed: int) -> list[tuple[Any, dict[str, Any]]]:
    """Prompts and options drawn by hypothesis: mostly sound ones at their extremes, some garbage."""
    made: list[tuple[Any, dict[str, Any]]] = []
    sound = st.fixed_dictionaries({}, optional=_sound)
    wild = st.dictionaries(st.sampled_from([*_sound, "stop", "min_tokens", "nonsense"]), _garbage, max_size=3)

    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(_prompts, sound, st.one_of(st.just({}), st.just({}), wild))
    def collect(asked: Any, options: dict[str, Any], odd: dict[str, Any]) -> None:
        made.append((asked, options | odd))

    collect()
    random.Random(seed).shuffle(made)
    return made


class Load:
    """Counts what became of every request; the first surprise ends the soak."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def neighbour(self, session: Session, until: float) -> None:
        """Ask known prompts over and over: their tokens never change, whatever else happens."""
        while anyio.current_time() < until:
            index = self.random.randrange(NEIGHBOURS)
            salt = self.random.choice((None, "a"))
            done = await session.generate(list(prompt(index)), max_tokens=NEW, ignore_eos=True, salt=salt)
            assert done.token_ids == plain(index), f"neighbour {index}: {done.token_ids} instead of {plain(index)}"
            self.counts["neighbours right"] += 1

    async def chaos(self, session: Session, until: float, made: list[tuple[Any, dict[str, Any]]]) -> None:
        """Send drawn requests: finish, cancel or leave each of them. Only typed errors may come back."""
        while anyio.current_time() < until:
            asked, options = self.random.choice(made)
            end = self.random.choice(("finish", "finish", "cancel", "leave", "time out"))
            try:
                await getattr(self, f"_{end.replace(' ', '_')}")(session, asked, options)
            except RekindleError as error:
                self.errors[type(error).__name__] += 1
                await anyio.lowlevel.checkpoint()  # a refusal waits for nothing
            else:
                self.counts[end] += 1

    async def _finish(self, session: Session, asked: Any, options: dict[str, Any]) -> None:
        await session.generate(asked, **options)

    async def _cancel(self, session: Session, asked: Any, options: dict[str, Any]) -> None:
        handle = session.submit(asked, **options)
        await anyio.sleep(self.random.uniform(0.0, 0.02))
        handle.cancel()

    async def _leave(self, session: Session, asked: Any, options: dict[str, Any]) -> None:
        async for _ in session.stream(asked, **options):
            break

    async def _time_out(self, session: Session, asked: Any, options: dict[str, Any]) -> None:
        with anyio.move_on_after(self.random.uniform(0.0, 0.02)):
            await session.generate(asked, **options)

    async def saver(self, session: Session, until: float, name: str) -> None:
        """Save, pin, prune and look, over and over; a disk that fails is a typed error."""
        while anyio.current_time() < until:
            await anyio.sleep(self.random.uniform(0.1, 1.0))
            what = self.random.choice(("save", "save", "pin", "prune", "look"))
            try:
                if what == "save":
                    await session.save(name)
                elif what == "pin":
                    shared = list(prompt(0)[:SHARED])  # with all of a prompt kept, another one would not fit
                    session.pin(shared)
                    session.unpin(shared)
                elif what == "prune":
                    session.cache.prune(to=self.random.choice((0, 1 << 16)))
                else:
                    session.cache.tree(limit=50), session.cache.stats(), session.cache.snapshots()
            except RekindleError as error:
                self.errors[f"{what}: {type(error).__name__}"] += 1
            else:
                self.counts[what] += 1
