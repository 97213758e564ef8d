"""Models whose layers give back their pages before a window: every text is the plain loop's, and memory is less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from helpers.python import run_python
from helpers.sessions import client_of, writer_of
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Session

pytestmark = pytest.mark.usefixtures("large_steps")
anyio_test = pytest.mark.anyio
OTHERS = (
    "gemma2", "gemma4-shared-pages-and-embeddings-of-layers", "gemma4-values-of-keys", "gemma4-moe", "gpt-oss", "olmo3",
    "cohere2", "exaone4", "smollm3-window",
)  # fmt: skip
NAMES = ("gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))
WINDOW, SIZE = 24, 8
SPAN = WINDOW // SIZE  # pages
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 512, "page_size": SIZE,
    "device_pages": 200, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 160, count).tolist()  # type: ignore[no-any-return]


def of_context(name: str) -> Any:
    raw = {**checkpoints.CASES[name], "max_position_embeddings": 512, "sliding_window": WINDOW}
    return checkpoints.model(raw, checkpoints.tensors(raw))


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return of_context(request.param)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def session(model: Any, programs: str) -> Iterator[Session]:
    with rekindle.open_sync(model, **OPTIONS, cache_dir=programs, disk_memory=0) as session:
        yield session


def plain(model: Any, prompt: list[int], count: int = 24) -> list[int]:
    return plain_loop(model, prompt, count)


def ask(session: Session, model: Any, prompt: list[int], count: int = 24) -> Any:
    done = session.generate_sync(prompt, **{**GREEDY, "max_tokens": count})
    assert list(done.token_ids) == plain(model, prompt, count)
    session.check_integrity()
    return done


@pytest.mark.thorough
def test_a_chat_goes_on_where_its_last_turn_ended(session: Session, model: Any) -> None:
    chat, known = tokens(150, seed=1), 0
    for turn in range(3):
        done = ask(session, model, chat, 60)
        assert done.usage.cached_tokens == known // SIZE * SIZE
        known = len(chat) + 60 - 1
        chat = [*chat, *done.token_ids, *tokens(9, seed=turn)]
    assert ask(session, model, chat[:150]).usage.cached_tokens == 144, "the end of the first prompt is there still"


@pytest.mark.thorough
@anyio_test
async def test_batches_chunks_forks_and_drafts_have_the_texts_of_the_plain_loop(model: Any, programs: str) -> None:
    options = {**OPTIONS, "prompt_lookup": 3, "disk_memory": 0, "cache_dir": programs}
    prompts = [tokens(count, seed=count) for count in (5, 24, 270, 130, 33)]
    repeats = tokens(11, seed=2) * 8
    async with rekindle.open(model, **options) as session:
        many = await session.generate(prompts, **GREEDY)
        expected = [plain(model, prompt) for prompt in prompts]
        assert [list(done.token_ids) for done in many] == expected
        session.check_integrity()
        twins = await session.generate(prompts[3], n=3, **GREEDY)
        assert [list(done.token_ids) for done in twins] == [expected[3]] * 3
        forked = await session.fork(many[2], at=7)
        assert list(forked.token_ids) == expected[2][7:]
        edited = await session.fork(many[2], at=7, edit=[9, 11])
        assert list(edited.token_ids) == plain(model, [*prompts[2], *expected[2][:7], 9, 11], 15)
        drafted = await session.generate(repeats, **{**GREEDY, "max_tokens": 60})
        assert list(drafted.token_ids) == plain(model, repeats, 60)
        scheduler, held = client_of(session).engine.scheduler, []
        handle = session.submit(prompts[2], **{**GREEDY, "max_tokens": 100})
        async for _ in handle:
            held += [len(sequence.sides[0].pages) for sequence in scheduler.running_set.holders]
            if len(held) > 30:
                break
        handle.cancel()
        assert max(held) <= SPAN + 2 + 2 * 32 // SIZE, "more than a window and two steps in flight"
        scored = await session.generate(prompts[3], **GREEDY, prompt_logprobs=1)
        assert list(scored.token_ids) == expected[3]
        session.check_integrity()


@pytest.mark.thorough  # by default: test_families.py, of a model with windows
def test_preempted_requests_go_on_with_pages_from_host_memory(model: Any, programs: str) -> None:
    options = {**OPTIONS, "device_pages": 50, "host_memory": 1 << 24, "disk_memory": 0, "cache_dir": programs}
    prompts = [tokens(count, seed=20 + count) for count in (70, 130, 150, 33)]
    with rekindle.open_sync(model, **options) as session:
        writer_of(session).tiers.costs.mode = "always"  # copying, whatever it costs here
        many = session.generate_sync(prompts, **{**GREEDY, "max_tokens": 100})
        assert [list(done.token_ids) for done in many] == [plain(model, prompt, 100) for prompt in prompts]
        assert session.stats().preemptions > 0, "there was room for all of them"
        session.check_integrity()
        session.generate_sync(tokens(200, seed=3), **{**GREEDY, "max_tokens": 150})
        done = session.generate_sync(prompts[2], **GREEDY)
        assert list(done.token_ids) == plain(model, prompts[2])
        assert session.stats().cache.host_hit_pages > 0, "nothing came back from host memory"
        session.check_integrity()


@pytest.mark.thorough
def test_a_sleeping_session_keeps_the_end_of_each_turn(model: Any, programs: str) -> None:
    with rekindle.open_sync(model, **OPTIONS, disk_memory=0, cache_dir=programs) as session:
        done = session.generate_sync(tokens(150, seed=4), **GREEDY)
        session.sleep().result_sync()
        session.wake().result_sync()
        writer_of(session).tiers.costs.mode = "always"
        turn = [*tokens(150, seed=4), *done.token_ids, *tokens(9, seed=5)]
        again = session.generate_sync(turn, **GREEDY)
        assert again.usage.cached_tokens == 168
        assert list(again.token_ids) == plain(model, turn)
        session.check_integrity()


@pytest.mark.thorough
def test_other_sessions_get_the_window_with_the_pages(model: Any, programs: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "disk_memory": 1 << 26, "cache_dir": programs}
    prompt = tokens(150, seed=9)
    with rekindle.open_sync(model, **options) as one, rekindle.open_sync(model, **options) as two:
        done = one.generate_sync(prompt, **GREEDY)
        chat = [*prompt, *done.token_ids, *tokens(9, seed=10)]
        shared = one.cache.share(secret="of a test of windows").result_sync()
        assert two.cache.pull(shared.address, chat, secret="of a test of windows").result_sync() == 168
        there = two.generate_sync(chat, **GREEDY)
        assert there.usage.cached_tokens == 168
        assert list(there.token_ids) == plain(model, chat)
        shared.close()
        assert one.cache.export_prefix(chat, tmp_path / "chat").result_sync() == 168
    with rekindle.open_sync(model, **options) as three:
        three.cache.clear().result_sync()
        assert three.cache.import_prefix(tmp_path / "chat").result_sync() == 168
        again = three.generate_sync(chat, **GREEDY)
        assert (again.usage.cached_tokens, again.token_ids) == (168, there.token_ids)


SCRIPT = """
import sys
import rekindle
from session import test_window_pages as own
name, folder, restore = sys.argv[1:]
model = own.of_context(name)
with rekindle.open_sync(model, **own.OPTIONS, cache_dir=folder, restore=restore or None) as session:
    prompt = own.tokens(150, seed=6)
    done = own.ask(session, model, prompt)
    turn = own.ask(session, model, [*prompt, *done.token_ids, *own.tokens(9, seed=7)])
    report = session.save("chat").result_sync()
    print(done.usage.cached_tokens, turn.usage.cached_tokens, report.states)
"""


@pytest.mark.slow
def test_a_chat_goes_on_in_a_new_process(request: pytest.FixtureRequest, model: Any, tmp_path: Path) -> None:
    name = request.node.callspec.params["model"]
    printed = [run_python("-c", SCRIPT, name, str(tmp_path), restore) for restore in ("", "chat", "auto")]
    reports = [[*map(int, lines.split()[-3:])] for lines in printed]
    assert [report[:2] for report in reports] == [[0, 168], [144, 176], [144, 176]]
    assert reports[0][2] >= SPAN
