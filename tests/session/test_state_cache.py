"""States in the prefix tree: what a prompt continues, what is computed again, and that its text is the plain loop's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from helpers.python import run_python
from helpers.sessions import writer_of
from helpers.thorough import by_default
from rekindle import Completion, Session

# Sessions with folders of their own find programs of the other tests.
pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
EDGE = 64  # at multiples of it there may be states
# NAMES has a model with states and pages in each layer; these others differ in the layers' arithmetic.
OTHERS = ("qwen3.5-tied-biases", "nemotron-h-experts-in-groups", "granite4", "lfm3", "qwen3.5-moe", "ling3")
NAMES = (
    *by_default(["qwen3.5", "lfm2", "falcon-h1"]), *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)
)  # fmt: skip
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 512, "page_size": 16,
    "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 160, count).tolist()  # type: ignore[no-any-return]


def of_context(name: str, length: int) -> Any:
    raw = {**checkpoints.CASES[name], "max_position_embeddings": length}
    return checkpoints.model(raw, checkpoints.tensors(raw))


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return of_context(request.param, 512)


@pytest.fixture(scope="module")
def session(model: Any) -> Iterator[Session]:
    with rekindle.open_sync(model, **OPTIONS, disk_memory=0) as session:
        yield session


def plain(model: Any, prompt: list[int], count: int = 24) -> list[int]:
    return plain_loop(model, prompt, count)


def ask(session: Session, model: Any, prompt: list[int], count: int = 24) -> Any:
    done = session.generate_sync(prompt, **{**GREEDY, "max_tokens": count})
    assert list(done.token_ids) == plain(model, prompt, count)
    session.check_integrity()
    return done


def left_by(prompt: list[int], generated: int) -> int:
    """The last edge of a finished text, whose last token was sampled and not computed."""
    return (len(prompt) + generated - 1) // EDGE * EDGE


def test_the_next_turn_continues_the_end_of_the_last_one(session: Session, model: Any) -> None:
    chat, left = tokens(150, seed=1), 0
    for turn in range(3):
        done = ask(session, model, chat, 60)
        assert done.usage.cached_tokens == left
        left = left_by(chat, 60)
        chat = [*chat, *done.token_ids, *tokens(9, seed=turn)]


def test_prompts_that_branch_leave_a_state_where_they_do(session: Session, model: Any) -> None:
    stem = tokens(140, seed=2)
    first, second, third = ([*stem, *tokens(90, seed)] for seed in (3, 4, 5))
    assert ask(session, model, first).usage.cached_tokens == 0
    known = session.cache.explain(second)
    assert (known.cached_tokens, known.stateless_tokens) == (0, 128)
    assert "128 more are, without a state after them" in str(known)
    done = ask(session, model, second)
    assert done.usage.cached_tokens == 0
    assert "pages of 128 more were there, but no state after them" in session.explain(done).text
    done = ask(session, model, third)
    assert done.usage.cached_tokens == 128
    assert "the state after them was on the device" in session.explain(done).text
    assert ask(session, model, second).usage.cached_tokens == 192, "its prompt's last edge"


def test_requests_at_once_wait_for_the_state_that_they_share(session: Session, model: Any) -> None:
    stem = tokens(300, seed=60)
    prompts = [[*stem, *tokens(30, seed)] for seed in range(7, 11)]

    async def at_once() -> list[Completion]:
        async with session.paused():  # on busy cores the first would be past the branch before the others arrive
            handles = [session.submit(prompt, **GREEDY) for prompt in prompts]
        return [await handle for handle in handles]

    many = anyio.run(at_once)
    assert [list(done.token_ids) for done in many] == [plain(model, prompt) for prompt in prompts]
    assert sorted(done.usage.cached_tokens for done in many) == [0, 256, 256, 256]
    twins = session.generate_sync(tokens(200, seed=11), n=3, **GREEDY)
    assert [list(one.token_ids) for one in twins] == [plain(model, tokens(200, seed=11))] * 3
    assert twins[0].usage.cached_tokens in (0, 192)
    session.check_integrity()


@pytest.mark.thorough
def test_a_cancelled_request_leaves_states_that_are_right(session: Session, model: Any) -> None:
    prompt = tokens(130, seed=12)

    async def leave_early() -> None:
        handle = session.submit(prompt, **{**GREEDY, "max_tokens": 300})
        async for _ in handle:
            break
        handle.cancel()

    anyio.run(leave_early)
    assert ask(session, model, prompt).usage.cached_tokens == 128


@pytest.mark.thorough  # by default: test_families.py preempts requests of such models
def test_preempted_requests_continue_what_the_tree_kept(model: Any) -> None:
    options = {**OPTIONS, "disk_memory": 0, "device_pages": 34, "host_memory": 64 << 20}
    prompts = [tokens(count, seed=20 + count) for count in (70, 130, 150, 33)]
    with rekindle.open_sync(model, **options) as session:
        many = session.generate_sync(prompts, **{**GREEDY, "max_tokens": 120})
        assert [list(done.token_ids) for done in many] == [plain(model, prompt, 120) for prompt in prompts]
        assert session.stats().preemptions > 0, "there was room for all of them"
        session.check_integrity()
        again = session.generate_sync(prompts, **{**GREEDY, "max_tokens": 120})
        assert [done.token_ids for done in again] == [done.token_ids for done in many]
        session.check_integrity()


def chats(session: Session, turns: int, words: int, system: list[int], branch: int) -> list[tuple[int, int]]:
    """Two chats of one beginning, the second from turn `branch` on: prompt and cached tokens of each turn."""
    counts: list[tuple[int, int]] = []

    def say(chat: list[int], turn: int, voice: int) -> list[int]:
        prompt = [*chat, *tokens(words, seed=1000 * voice + turn)]
        done = session.generate_sync(prompt, **{**GREEDY, "max_tokens": 2 * words})
        counts.append((len(prompt), done.usage.cached_tokens))
        return [*prompt, *done.token_ids]

    first = system
    for turn in range(turns):
        if turn == branch:
            second = first
        first = say(first, turn, voice=1)
    for turn in range(branch, turns):
        second = say(second, turn, voice=2)
    return counts


def test_a_chat_goes_on_after_a_restart(model: Any, tmp_path: Path) -> None:
    system, options = tokens(130, seed=30), {**OPTIONS, "cache_dir": str(tmp_path)}
    with rekindle.open_sync(model, **options) as session:
        counts = chats(session, 4, 12, system, branch=2)
        assert counts[0][1] == 0
        previous = [*counts[:3], counts[1], counts[4]]
        for (length, cached), (before, _) in zip(counts[1:], previous, strict=True):
            assert cached == (before + 24 - 1) // EDGE * EDGE, length
        report = session.save("chat").result_sync()
        assert report.states >= 2
        assert "states" in str(report)
        assert [info.name for info in session.cache.snapshots()] == ["chat"]
    for name in ("chat", "auto"):
        with rekindle.open_sync(model, **options, restore=name) as session:
            done = ask(session, model, [*system, *tokens(12, seed=1000)])
            assert done.usage.cached_tokens == 128
            assert "the state after them was " in session.explain(done).text
            assert "on the device" not in session.explain(done).text
            session.cache.clear(tier="device").result_sync()
            assert ask(session, model, [*system, *tokens(12, seed=1000)]).usage.cached_tokens in (0, 128)


@pytest.mark.thorough
def test_sleep_and_other_sessions_keep_the_states(model: Any, tmp_path: Path) -> None:
    options, prompt = {**OPTIONS, "cache_dir": str(tmp_path)}, tokens(150, seed=40)
    with rekindle.open_sync(model, **options) as one, rekindle.open_sync(model, **options) as two:
        done = ask(one, model, prompt)
        chat = [*prompt, *done.token_ids, *tokens(40, seed=41)]
        one.sleep().result_sync()
        one.wake().result_sync()
        writer_of(one).tiers.costs.mode = "always"
        assert ask(one, model, prompt).usage.cached_tokens == 128
        shared = one.cache.share(secret="of a test of states").result_sync()
        assert two.cache.pull(shared.address, chat, secret="of a test of states").result_sync() >= 128
        assert ask(two, model, chat).usage.cached_tokens == 128
        one.cache.export_prefix(chat, tmp_path / "chat").result_sync()
        two.cache.clear().result_sync()
        assert ask(two, model, chat).usage.cached_tokens == 0
        two.cache.clear().result_sync()
        assert two.cache.import_prefix(tmp_path / "chat").result_sync() >= 128
        assert ask(two, model, chat).usage.cached_tokens == 128


SCRIPT = """
import json, sys
import rekindle
from session import test_state_cache as own
name, folder, restore = sys.argv[1:]
options = {**own.OPTIONS, "max_model_len": 6144, "max_tokens_per_step": 512, "cache_dir": folder}
model = own.of_context(name, 6144)
with rekindle.open_sync(model, **options, restore=restore or None) as session:
    counts = own.chats(session, 20, 8, own.tokens(4096, seed=0), branch=5)
    texts = session.generate_sync([own.tokens(4096, seed=0) + own.tokens(8, seed=77)], max_tokens=16, temperature=0.0)
    session.check_integrity()
    session.save("chat").result_sync()
print(json.dumps([counts, [list(text.token_ids) for text in texts]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "falcon-h1"])
def test_twenty_turns_behind_a_long_system_prompt_compute_what_is_new(name: str, tmp_path: Path) -> None:
    printed = [run_python("-c", SCRIPT, name, str(tmp_path), restore) for restore in ("", "chat")]
    (first, texts), (second, again) = (json.loads(lines.splitlines()[-1]) for lines in printed)
    assert texts == again
    assert len(first) == len(second) == 35
    shares = [cached / length for length, cached in (*first[1:], *second)]
    print(f"{name}: {min(shares):.1%} to {max(shares):.1%} of prompt tokens came from the cache")
    assert min(shares) >= 0.95
