"""Pictures are decoded and encoded by turns between callers, a small one next to a large one, and not far ahead."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from helpers.sessions import eventually
from images.files import jpeg_of_scans, jpeg_with
from rekindle._src.capabilities.pictures.stages import SMALL, PictureStages
from rekindle._src.core.pictures import EncodedRows, RowsOrigin
from rekindle._src.images import open_picture

pytestmark = pytest.mark.anyio
LARGE = SMALL + 1
ROWS = EncodedRows(np.zeros((1, 1, 1), np.float32), RowsOrigin.ENCODER)


class Pictures:
    """Pictures of callers, whose decoding and encoding wait for gates; the order in which they begin is kept."""

    def __init__(self) -> None:
        self.stages = PictureStages()
        self.decoded, self.encoded, self.done = list[str](), list[str](), list[str]()
        self.decoding, self.encoding = threading.Event(), threading.Event()

    async def bring(self, name: str, work: int) -> None:
        """Decode and encode a picture, whose caller is the first letter of its name."""
        rows = await self.stages.rows(
            name[0], work, lambda: self._decode(name, work), lambda patches: self._encode(name, patches)
        )
        assert rows is ROWS
        self.done.append(name)

    def _decode(self, name: str, work: int) -> Any:
        self.decoded.append(name)
        assert work == SMALL or self.decoding.wait(30)
        return name

    def _encode(self, name: str, patches: Any) -> EncodedRows:
        assert patches == name
        self.encoded.append(name)
        assert self.encoding.wait(30)
        return ROWS


async def until(condition: Callable[[], bool]) -> None:
    await anyio.to_thread.run_sync(eventually, condition)


async def test_a_small_picture_waits_for_no_large_one() -> None:
    """Eight JPEGs of 33 megapixels and 63 scans kept another client's small picture waiting for 41 s."""
    pictures = Pictures()
    pictures.encoding.set()
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(pictures.bring, f"a{number}", LARGE)
        await until(lambda: bool(pictures.decoded))
        with anyio.fail_after(30):
            await pictures.bring("b", SMALL)
        assert pictures.decoded[1:] == ["b"] and pictures.done == ["b"]
        pictures.decoding.set()
    assert len(pictures.done) == 9
    pictures.stages.close()


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("side", [256, pytest.param(4096, marks=pytest.mark.slow)])
async def test_pictures_that_take_longest_leave_others_their_turns(side: int) -> None:
    """Eight JPEGs with as many scans as are read; the last one is decoded once another client's small one is done."""
    large = jpeg_of_scans(side, index=5, times=53)
    stages, small_is_done, begun, done = PictureStages(), threading.Event(), list[str](), list[str]()

    def decode(name: str) -> Any:
        if name == "b":
            return open_picture(jpeg_with()).decode()
        begun.append(name)
        assert len(begun) < 8 or small_is_done.wait(60)
        return open_picture(large).decode()

    async def bring(name: str, work: int) -> None:
        assert await stages.rows(name[0], work, lambda: decode(name), lambda picture: ROWS) is ROWS
        done.append(name)

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(bring, f"a{number}", LARGE)
        with anyio.fail_after(60):
            await bring("b", SMALL)
        small_is_done.set()
    assert len(done) == 9 and done[-1] == begun[-1]
    stages.close()


async def test_callers_take_turns() -> None:
    pictures = Pictures()
    pictures.encoding.set()
    async with anyio.create_task_group() as group:
        for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
            group.start_soon(pictures.bring, name, LARGE)
            await until(lambda: bool(pictures.decoded))
            await anyio.wait_all_tasks_blocked()
        pictures.decoding.set()
    assert pictures.decoded == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]
    assert pictures.encoded == pictures.decoded
    pictures.stages.close()


async def test_decoding_goes_on_during_encoding_and_is_two_pictures_ahead_at_most() -> None:
    """Decoded pictures are large: a stranger must not pile them up before the encoder."""
    pictures = Pictures()
    pictures.decoding.set()
    async with anyio.create_task_group() as group:
        for caller in "abcd":
            for number in range(3):
                group.start_soon(pictures.bring, f"{caller}{number}", (LARGE, SMALL)[number % 2])
        await until(lambda: len(pictures.decoded) == 3)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(lambda: None)
        assert len(pictures.decoded) == 3 and len(pictures.encoded) == 1
        pictures.encoding.set()
    assert len(pictures.done) == 12
    pictures.stages.close()


async def test_rows_that_are_kept_need_no_encoder() -> None:
    stages, encoded = PictureStages(), list[Any]()
    async with stages._encoder.turns.turn("a"):
        with anyio.fail_after(30):
            assert await stages.rows("b", SMALL, lambda: ROWS, encoded.append) is ROWS  # type: ignore[arg-type,return-value]
    assert not encoded
    stages.close()


async def test_an_error_of_either_stage_leaves_its_place_to_the_next() -> None:
    stages = PictureStages()

    def broken(*_: Any) -> Any:
        raise ValueError("a broken file")

    for _ in range(3):
        for decode, encode in ((broken, lambda _: ROWS), (lambda: "patches", broken)):
            with pytest.raises(ValueError, match="a broken file"):
                await stages.rows("a", SMALL, decode, encode)  # type: ignore[arg-type,return-value]
    with anyio.fail_after(30):
        assert await stages.rows("a", SMALL, lambda: "patches", lambda _: ROWS) is ROWS  # type: ignore[arg-type,return-value]
    stages.close()


async def test_pictures_of_cancelled_tasks_are_dropped_at_once() -> None:
    """Decoded pictures of clients that come and leave would pile up while one picture is being encoded."""
    stages, busy, on = PictureStages(), threading.Event(), threading.Event()
    encoded, kept = list[Any](), list[weakref.ref[Any]]()

    class Patches:
        pass

    def decode() -> Any:
        patches = Patches()
        kept.append(weakref.ref(patches))
        return patches

    def encode(patches: Any) -> EncodedRows:
        encoded.append(kept.index(weakref.ref(patches)))
        busy.set()
        assert on.wait(30)
        return ROWS

    async def bring(scope: anyio.CancelScope) -> None:
        with scope:
            await stages.rows("a", SMALL, decode, encode)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            scopes = [anyio.CancelScope() for _ in range(4)]
            for number, scope in enumerate(scopes):
                group.start_soon(bring, scope)
                await until(lambda: busy.is_set() and len(kept) > number)  # noqa: B023
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
                await anyio.wait_all_tasks_blocked()
            await until(lambda: not any(one() for one in kept[1:]))
            on.set()
        assert await stages.rows("a", SMALL, lambda: "patches", lambda _: ROWS) is ROWS  # type: ignore[arg-type,return-value]
    assert encoded == [0]
    stages.close()
