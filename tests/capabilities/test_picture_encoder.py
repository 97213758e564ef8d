"""The encoder of a session: what it keeps, when it stops, and what it gives back; without a model."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from helpers.picture_models import picture
from rekindle._src.capabilities.pictures import encoder as picture_encoder
from rekindle._src.capabilities.pictures.encoder import PictureEncoder
from rekindle._src.capabilities.pictures.encoding_programs import Cancellation
from rekindle._src.capabilities.pictures.kept_rows import KeptRows
from rekindle._src.capabilities.pictures.owner import GivenPicture, SessionPictures
from rekindle._src.core.pictures import EncodedRows, RowsOrigin
from rekindle._src.core.records import IntArray
from rekindle._src.core.store import Store
from rekindle._src.images.picture import EncodedPicture, open_pictures
from rekindle._src.images.processor import PicturePatches
from rekindle._src.images.qwen import QwenPictures
from rekindle._src.images.settings import ProcessorSettings
from rekindle.errors import RequestAborted

pillow = pytest.importorskip("PIL.Image")
anyio_test = pytest.mark.anyio


def always() -> bool:
    return True


class Programs:
    """Programs whose steps wait until they are let on."""

    compilations = 0

    def __init__(self) -> None:
        self.begun, self.on = threading.Semaphore(0), threading.Event()
        self.on.set()
        self.leaves: list[Any] = []

    def encode(self, leaves: Any, images: Any, wanted: Callable[[], bool]) -> Any:
        self.leaves.append(leaves)
        self.begun.release()
        while not self.on.wait(0.01):
            if not wanted():
                raise Cancellation
        return np.full((1, sum(image.grid.patches for image in images) // 4, 2), len(self.leaves), np.float32)


class Leaf:
    nbytes = 100

    def __init__(self) -> None:
        self.deleted = False

    def delete(self) -> None:
        self.deleted = True


class Plan:
    tower = tensors = None


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Leaf, Leaf]]:
    """The weights that were read so far."""
    several: list[tuple[Leaf, Leaf]] = []

    def read_tower(tower: Any, tensors: Any, **options: Any) -> tuple[Leaf, Leaf]:
        several.append((Leaf(), Leaf()))
        return several[-1]

    monkeypatch.setattr(picture_encoder, "read_tower", read_tower)
    return several


def encoder_of() -> tuple[PictureEncoder, Programs]:
    plan, programs = Plan(), Programs()
    return PictureEncoder(plan, programs), programs  # type: ignore[arg-type]


def processor_of() -> QwenPictures:
    settings = ProcessorSettings({"patch_size": 16}, "a test")
    return QwenPictures.read(settings, settings, settings)


def pictures_of(most: int = 1 << 20, folder: Path | None = None) -> tuple[SessionPictures, PictureEncoder, Programs]:
    encoder, programs = encoder_of()
    kept = KeptRows(most, None if folder is None else Store(folder, verified=True, max_bytes=1 << 20))
    return SessionPictures(processor_of(), encoder, kept, identity=b"x", token=1), encoder, programs


async def rows_of(
    pictures: SessionPictures, one: GivenPicture, wanted: Callable[[], bool] = always, salt: str | None = None
) -> EncodedRows:
    return await pictures.encoded(one, wanted, caller="", salt=salt)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def given(pictures: SessionPictures, seed: int = 1, side: int = 64) -> GivenPicture:
    file = io.BytesIO()
    pillow.fromarray(picture(seed, side, side)).save(file, "PNG")
    return pictures.read([file.getvalue()])[0]


def patches() -> PicturePatches:
    return processor_of().patches(open_pictures([picture(1, 64, 64)])[0].decode())


@anyio_test
async def test_pixels_are_let_go_and_rows_that_were_evicted_are_encoded_again(read: list[Any]) -> None:
    pictures, _, _ = pictures_of(most=1)
    one, other = given(pictures), given(pictures, 2)
    assert not pictures.known(one, None)
    rows = await rows_of(pictures, one)
    assert isinstance(one.source, EncodedPicture), "its pixels are kept"
    assert pictures.known(one, None) and (await rows_of(pictures, one)).rows is rows.rows
    await rows_of(pictures, other)
    assert not pictures.known(one, None) and (await rows_of(pictures, one)).rows[0, 0, 0] == 3
    assert pictures.statistics()[:2] == (3, 0) and len(read) == 1
    pictures.close()


@anyio_test
async def test_a_request_that_is_cancelled_is_encoded_no_further(read: list[Any]) -> None:
    pictures, _, programs = pictures_of()
    programs.on.clear()
    live, errors = threading.Event(), list[BaseException]()
    live.set()

    async def ask() -> None:
        try:
            await rows_of(pictures, given(pictures), live.is_set)
        except RequestAborted as error:
            errors.append(error)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            assert await anyio.to_thread.run_sync(lambda: programs.begun.acquire(timeout=30))
            assert pictures.statistics().pictures_waiting == 1
            live.clear()
        assert len(errors) == 1 and "pictures" in str(errors[0])
        with anyio.move_on_after(0.01):
            await rows_of(pictures, given(pictures, 2))  # the task that waits is cancelled
        programs.on.set()
        await rows_of(pictures, given(pictures, 3))
    pictures.close()


@anyio_test
async def test_a_picture_of_two_requests_is_encoded_once(read: list[Any]) -> None:
    pictures, _, programs = pictures_of()
    programs.on.clear()
    origins = list[RowsOrigin]()

    async def ask() -> None:
        origins.append((await rows_of(pictures, given(pictures))).origin)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            assert await anyio.to_thread.run_sync(lambda: programs.begun.acquire(timeout=30))
            group.start_soon(ask)  # it is decoded while the other one is encoded
            await anyio.wait_all_tasks_blocked()
            programs.on.set()
    assert {*origins} == {RowsOrigin.ENCODER, RowsOrigin.MEMORY} and pictures.encoded_pictures == 1
    pictures.close()


@anyio_test
@pytest.mark.usefixtures("short_turns")
async def test_rows_are_shared_within_a_salt_alone_in_memory_and_on_disk(read: list[Any], tmp_path: Path) -> None:
    """The time to a first token told whether another salt had sent a picture."""
    salts = (None, "alice", "bob", "\udc80")
    for start in range(2):
        pictures, _, _ = pictures_of(folder=tmp_path)
        for salt in salts:
            one = given(pictures)
            assert not pictures.known(one, salt)
            expected = (RowsOrigin.ENCODER, RowsOrigin.DISK)[start]
            assert (await rows_of(pictures, one, salt=salt)).origin == expected, salt
            assert (await rows_of(pictures, given(pictures), salt=salt)).origin == RowsOrigin.MEMORY, salt
            unseen = [pictures.known(one, other) for other in salts[salts.index(salt) + 1 :]]
            assert pictures.known(one, salt) and not any(unseen)
        assert (await rows_of(pictures, given(pictures), salt="carol")).origin != RowsOrigin.MEMORY
        assert pictures.encoded_pictures == (len(salts) + 1, 0)[start]
        pictures.close()
    names = {path.name for path in files_below(tmp_path)}
    assert names and not any("alice" in name for name in names)


@anyio_test
async def test_pictures_of_those_who_left_are_not_decoded(read: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, _, programs = pictures_of()
    programs.on.clear()
    decoded, errors = list[GivenPicture](), list[BaseException]()
    original = GivenPicture.decode

    def decode(self: GivenPicture, identity: bytes) -> Any:
        decoded.append(self)
        return original(self, identity)

    monkeypatch.setattr(GivenPicture, "decode", decode)

    async def ask(seed: int, wanted: Callable[[], bool]) -> None:
        try:
            await rows_of(pictures, given(pictures, seed), wanted)
        except RequestAborted as error:
            errors.append(error)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(ask, 0, always)
            assert await anyio.to_thread.run_sync(lambda: programs.begun.acquire(timeout=30))
            for seed in range(1, 9):
                group.start_soon(ask, seed, lambda: False)
            await anyio.wait_all_tasks_blocked()
            programs.on.set()
    assert len(decoded) == 1 and len(errors) == 8
    pictures.close()


def test_sleep_stops_a_picture_which_begins_anew_with_weights_that_are_read_again(read: list[Any]) -> None:
    encoder, programs = encoder_of()
    programs.on.clear()
    rows: list[IntArray] = []
    thread = threading.Thread(target=lambda: rows.append(encoder(patches(), always)))
    thread.start()
    assert programs.begun.acquire(timeout=30)
    assert encoder.nbytes == 200 and encoder.sleep() == 200
    assert all(leaf.deleted for leaf in read[0]) and encoder.nbytes == 0 and not rows
    programs.on.set()
    assert thread.is_alive() and encoder.sleep() == 0
    encoder.wake()
    thread.join(60)
    assert len(rows) == 1 and len(read) == 2 and programs.leaves == [read[0], read[1]]
    encoder.close()
    assert all(leaf.deleted for leaf in read[1])


def test_a_picture_that_is_not_wanted_any_more_waits_for_no_sleeping_session(read: list[Any]) -> None:
    encoder, _ = encoder_of()
    live, errors = threading.Event(), list[BaseException]()
    live.set()

    def encode() -> None:
        try:
            encoder(patches(), live.is_set)
        except Cancellation as error:
            errors.append(error)

    encoder.sleep()
    thread = threading.Thread(target=encode)
    thread.start()
    live.clear()
    thread.join(60)
    encoder.wake()  # or else the thread would stay
    assert len(errors) == 1 and not read
    encoder.close()


@pytest.mark.parametrize("asleep", [False, True])
def test_closing_ends_a_picture(asleep: bool, read: list[Any]) -> None:
    encoder, programs = encoder_of()
    programs.on.clear()
    errors: list[BaseException] = []

    def encode() -> None:
        try:
            encoder(patches(), always)
        except Cancellation as error:
            errors.append(error)

    if asleep:
        encoder.sleep()
    thread = threading.Thread(target=encode)
    thread.start()
    if not asleep:
        assert programs.begun.acquire(timeout=30)
    encoder.close()
    thread.join(60)
    assert len(errors) == 1 and encoder.nbytes == 0
