"""Captures with `keep=True`: a second capture of a shared prefix computes none of it, whatever became of its pages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.sessions import writer_of
from helpers.tapping import Plain, difference
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Capture, Completion, Session, Steer
from rekindle._src.capabilities.captures.kept import KeptCaptures, parts_by_page
from rekindle._src.core.captured import CapturedPart
from rekindle._src.core.prefix import PageNamespace, Prefix
from rekindle._src.models.base import LoadedModel
from rekindle.errors import ConfigError, InvalidRequest

anyio_test = pytest.mark.anyio
pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
MODEL = checkpoints.case("llama")
PLAIN = Plain(MODEL)
E = MODEL.config.hidden_size
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 96, "page_size": 8,
    "disk_memory": 0, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
RNG = np.random.default_rng(11)
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
WANTED = {"residual": "all", "norm": True}
VECTOR = RNG.standard_normal(E).astype(np.float32)
CLOSE = 2e-5


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync(MODEL, **OPTIONS) as opened:
        yield opened


def prompt(length: int = 60) -> list[int]:
    """Return a new one."""
    return RNG.integers(3, 160, length).tolist()


def keep(sites: Any = WANTED, positions: Any = None, **options: Any) -> dict[str, Any]:
    return {**GREEDY, "capture": Capture(sites, positions, keep=True, **options)}


@functools.cache
def other_weights() -> LoadedModel:
    raw = checkpoints.CASES["llama"]
    model = checkpoints.model(raw, checkpoints.tensors(raw, seed=3))
    return dataclasses.replace(model, fingerprint="test-other")  # the helper's names the config alone


@functools.cache
def steered(scale: float) -> Plain:
    """Return the model with VECTOR added after its first layer."""
    return Plain(MODEL, lambda place, x, positions: x + scale * VECTOR if place == 1 else x)


def check(done: Completion, plain: Plain = PLAIN) -> None:
    """Compare tokens and captures with a plain forward."""
    length = len(done.prompt_token_ids)
    inside = plain.inside([*done.prompt_token_ids, *done.token_ids][:-1])
    if done.captured is not None:
        for key, array in done.captured.items():
            assert difference(array, inside.of(key)[done.captured.positions]) < CLOSE, key
    assert inside.logits[length - 1 :].argmax(axis=-1).tolist() == list(done.token_ids)


@anyio_test
async def test_a_second_capture_of_a_prefix_computes_none_of_it(session: Session) -> None:
    text = prompt()
    first = await session.generate(text, **keep())
    assert first.usage.cached_tokens == 0
    again = await session.generate(text, **keep())
    longer = await session.generate([*text, *first.token_ids, 7, 8], **keep())
    assert (again.usage.cached_tokens, longer.usage.cached_tokens) == (56, 64), "all of their full pages"
    for done in (first, again, longer):
        check(done)
        assert done.captured.positions.tolist() == list(range(len(done.prompt_token_ids) + 5))
    for key, array in again.captured.items():
        np.testing.assert_array_equal(array[:56], first.captured[key][:56])
    array[:] = 0  # it is the caller's
    check(await session.generate(text, **keep()))
    plain = await session.generate(text, **GREEDY, capture=WANTED)
    assert plain.usage.cached_tokens == 0, "it is not to keep them, nor to read what was kept"


@pytest.mark.thorough
@anyio_test
async def test_a_part_of_what_was_kept_is_enough_and_others_are_computed(session: Session) -> None:
    text = prompt()
    await session.generate(text, **keep({"residual": 0}, slice(8, 40)))
    for sites, positions, cached in (
        ({"residual": 0}, [9, 20, 39], 56),
        ({"residual": 0}, slice(8, None), 40),
        ({"residual": 0}, None, 0),  # and now all of them are kept
        ({"residual": 0}, None, 56),
        ({"residual": [0, 1]}, [17, 30], 16),
        ({"residual": 1}, [17], 56),
        ({"residual": 1}, [17, 18], 16),
        ({"residual": 0, "logits": 1}, slice(24, 40), 24),
        ({"logits": 1}, [24, 39, -1], 56),
        ({"residual": 0}, "output", 56),
    ):  # fmt: skip
        done = await session.generate(text, **keep(sites, positions))
        assert done.usage.cached_tokens == cached, (sites, positions)
        inside = PLAIN.inside([*text, *done.token_ids][:-1])
        for key, array in done.captured.items():
            whole = inside.logits if key[0] == "logits" else inside.of(key)
            assert difference(array, whole[done.captured.positions]) < CLOSE, key
    session.check_integrity()


@pytest.mark.thorough
@anyio_test
async def test_streams_deliver_what_was_kept_with_their_first_token(session: Session) -> None:
    text = prompt(40)
    done = await session.generate(text, **keep())
    parts = [delta.captured async for delta in session.stream(text, **keep())]
    positions = [part.positions.tolist() for part in parts if part is not None]
    assert positions[:2] == [list(range(40)), [40]]
    several = await session.generate(text, n=2, **{**keep(), "temperature": 1.0})
    for one in several:
        np.testing.assert_array_equal(one.captured["norm"][:32], done.captured["norm"][:32])


@anyio_test
async def test_files_have_what_was_kept(session: Session, tmp_path: Path) -> None:
    text = prompt(40)
    await session.generate(text, **keep())
    done = await session.generate(text, **keep(into=tmp_path))
    assert done.usage.cached_tokens == 39 and len(done.captured.positions) == 45
    check(done)


@anyio_test
async def test_a_cleared_cache_keeps_nothing_and_new_weights_are_seen(session: Session) -> None:
    text = prompt(40)
    await session.generate(text, **keep())
    captures = session.cache.stats().captures
    assert captures is not None and captures.bytes and str(captures.bytes)
    assert "positions reused" in str(session.cache.stats())
    await session.cache.clear()
    assert session.cache.stats().captures.bytes == 0  # type: ignore[union-attr]
    assert (await session.generate(text, **keep())).usage.cached_tokens == 0
    other = other_weights()
    await session.swap_weights(other)
    for cached in (0, 39):
        done = await session.generate(text, **keep())
        assert done.usage.cached_tokens == cached
        check(done, Plain(other))
    await session.swap_weights(MODEL)


@pytest.mark.thorough
def test_captures_come_back_with_pages_and_a_small_budget_keeps_the_beginnings_of_the_latest() -> None:
    room = 10 * 8 * 3 * 4 * E  # ten pages of two layers and the norm
    options = {**OPTIONS, "device_pages": 14, "max_requests": 2, "capture_memory": room}
    with rekindle.open_sync(MODEL, **options) as small:
        writer_of(small).tiers.costs.mode = "always"
        first, second = prompt(), prompt()
        check(small.generate_sync(first, **keep()))
        for _ in range(3):
            small.generate_sync(prompt(), **GREEDY)
        again = small.generate_sync(first, **keep())
        assert again.usage.cached_tokens == 56 and small.stats().cache.host_hit_pages > 0
        check(again)
        for cached in (0, 56):
            done = small.generate_sync(second, **keep())
            assert done.usage.cached_tokens == cached
            check(done)
            small.check_integrity()
        left = small.generate_sync(first, **keep())
        assert left.usage.cached_tokens == 16, "the latest has 8 pages of the 10"
        check(left)
        assert small.cache.stats().captures.dropped > 0  # type: ignore[union-attr]


@pytest.mark.thorough
def test_a_snapshot_has_what_was_kept_of_its_pages(tmp_path: Path) -> None:
    text, other = prompt(), prompt()
    options = {**OPTIONS, "cache_dir": str(tmp_path), "disk_memory": 1 << 26}
    with rekindle.open_sync(MODEL, **options) as before:
        first = before.generate_sync(text, **keep())
        before.generate_sync(other, **keep({"residual": 1}, slice(0, 30)))
        before.save("one").result_sync()
        assert len(before.cache.snapshots()) == 1, "captures are a part of it"
    with rekindle.open_sync(MODEL, **options, restore="one") as after:
        writer_of(after).tiers.costs.mode = "always"
        assert after.cache.stats().captures.bytes == 0  # type: ignore[union-attr]
        again = after.generate_sync(text, **keep())
        assert again.usage.cached_tokens == 56
        for key, array in again.captured.items():
            np.testing.assert_array_equal(array[:56], first.captured[key][:56])
        check(again)
        less = after.generate_sync(other, **keep({"residual": 1}))
        assert less.usage.cached_tokens == 24, "its fourth page was captured in part, and is not stored"
        check(less)
        after.check_integrity()


@pytest.mark.slow
def test_damaged_captures_are_computed_again_and_those_of_other_weights_are_not_taken(tmp_path: Path) -> None:
    text, options = prompt(), {**OPTIONS, "cache_dir": str(tmp_path), "disk_memory": 1 << 26}
    for _ in range(2):
        with rekindle.open_sync(MODEL, **options) as before:
            before.generate_sync(text, **keep())
            before.save("one").result_sync()
    for path in (tmp_path / "pages").rglob("pages"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with rekindle.open_sync(MODEL, **options, restore="one") as damaged:
        check(damaged.generate_sync(text, **keep()))
        damaged.swap_weights(other_weights()).result_sync()
        for cached in (0, 56):
            done = damaged.generate_sync(text, **keep())
            assert done.usage.cached_tokens == cached
            check(done, Plain(other_weights()))


@pytest.mark.thorough
def test_steered_plain_and_capturing_requests_never_exchange_pages_when_they_run_out() -> None:
    """Many share few prompts, with and without changes, salts and captures, under preemption, eviction and aborts."""
    changes: list[tuple[Any, Plain]] = [((), PLAIN), *((Steer(0, VECTOR, n), steered(n)) for n in (3.0, -4.0))]
    shared = prompt(24)
    texts = [shared, [*shared[:16], *prompt(8)], [*shared[:20], *prompt(8)]]
    wants = [None, WANTED, Capture(WANTED, keep=True), Capture(WANTED, [3, 20, -1], keep=True)]
    seen: dict[tuple[int, int], tuple[int, ...]] = {}
    options = {**OPTIONS, "device_pages": 16, "max_requests": 3, "prompt_lookup": 2, "capture_memory": 60_000}
    with rekindle.open_sync(MODEL, **options) as small:
        writer_of(small).tiers.costs.mode = "always"
        for _ in range(3):
            handles = []
            for _ in range(16):
                text, change, want = (int(RNG.integers(len(many))) for many in (texts, changes, wants))
                ask: dict[str, Any] = {**GREEDY, "max_tokens": int(RNG.integers(30, 60)), "capture": wants[want]}
                ask["salt"] = "alice" if RNG.random() < 0.2 else None
                handles.append((text, change, small.submit(texts[text], **ask, steer=changes[change][0])))
            for _, _, handle in handles[::5]:
                handle.cancel()
            for index, (text, change, handle) in enumerate(handles):
                if index % 5:
                    done = handle.result_sync()
                    longest = max(seen.get((text, change), ()), tuple(done.token_ids), key=len)
                    assert longest[: len(done.token_ids)] == tuple(done.token_ids)
                    seen[text, change] = longest
                    check(done, changes[change][1])
            small.check_integrity()
        stats = small.stats()
        assert stats.preemptions, "there was room for all"
        assert stats.cache.host_hit_pages and stats.cached_tokens
        captures = small.cache.stats().captures
        assert captures is not None and captures.reused and captures.dropped
    for text in range(len(texts)):
        found = {seen[text, change][:20] for change in range(len(changes)) if (text, change) in seen}
        assert len(found) > 1, "changes are seen"


@pytest.mark.parametrize(
    ("options", "words"),
    [({"prefix_cache": False}, "prefix_cache is off"), ({"capture_memory": 0}, "capture_memory is 0")],
)
def test_where_nothing_can_be_kept_it_is_refused(options: dict[str, Any], words: str) -> None:
    with (
        rekindle.open_sync(MODEL, **OPTIONS | options) as opened,
        pytest.raises(InvalidRequest, match=f"can't be kept: {words}"),
    ):
        opened.generate_sync(prompt(5), **keep())


def test_wrong_values_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="is not True or False"):
        Capture(WANTED, keep="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="capture_memory"):
        rekindle.open_sync(MODEL, **OPTIONS, capture_memory=-1)
    assert repr(Capture({"norm": True}, keep=True)) == "Capture({'norm': True}, keep=True)"


def test_a_store_has_the_lines_that_were_put_into_it() -> None:
    """Random lines of random pages, against a plain dict."""
    rng = np.random.default_rng(0)
    store, known = KeptCaptures(1 << 20, 8, b"root"), {}  # type: ignore[var-annotated]
    ids = np.arange(50, dtype=np.int32)
    names, keys = store.names(Prefix(ids, PageNamespace("salt"))), ["norm", ("residual", 0), ("residual", 1)]
    assert len(set(names)) == 6 and not {*names} & {*store.names(Prefix(ids))}
    for _ in range(200):
        chosen = np.flatnonzero(rng.random(48) < 0.1).astype(np.int32)
        some = [key for key in keys if rng.random() < 0.6]
        values = {key: rng.standard_normal((len(chosen), 2)) for key in some}
        for page, part in parts_by_page(CapturedPart(chosen, values), 8):
            store.put(names[page], part.positions % 8, dict(part.arrays))
        for key in some:
            for position, value in zip(chosen.tolist(), values[key], strict=True):
                known.setdefault((key, position), value)
        store.use(names)
        store.check_integrity()
        for page in range(6):
            for key in keys:
                there = [offset for offset in range(8) if (key, page * 8 + offset) in known]
                first = next((offset for offset in range(8) if offset not in there), None)
                assert store.missing(names[page], [key], range(8)) == first
                if there:
                    lines = store.get(names[page], [key], np.array(there, np.int32))[key]
                    np.testing.assert_array_equal(lines, [known[key, page * 8 + offset] for offset in there])
    store.clear(b"other")
    assert store.missing(names[0], ["norm"], [0]) == 0 and store.nbytes == 0
