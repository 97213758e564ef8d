"""Captures into a folder: safetensors that anybody can read, mapped, and the arrays that come without one."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from safetensors.numpy import load_file

import rekindle
from helpers import checkpoints
from helpers.sessions import eventually
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Capture, Captured, Session
from rekindle._src.capabilities.captures import request as captures
from rekindle._src.capabilities.captures.files import CaptureFiles, GrowingFile
from rekindle._src.capabilities.captures.tapped import RequestTaps
from rekindle._src.capabilities.captures.writer import MOST_UNATTENDED
from rekindle._src.core.captured import Backlog, CapturedPart
from rekindle._src.core.pictures import PictureRun, TokenGrid
from rekindle.errors import Busy, InvalidRequest, RekindleError, RequestFailed

pytestmark = pytest.mark.usefixtures("large_steps")
anyio_test = pytest.mark.anyio
MODEL = checkpoints.case("llama")
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 96, "page_size": 8,
    "disk_memory": 0, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(3, 160, count).tolist() for count in (5, 41)]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
SITES = {"residual": "all", "q": 0, "norm": True}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync(MODEL, **OPTIONS) as opened:
        yield opened


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*")]


def partial(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if not name.endswith(".safetensors") and not name.isdecimal()]


@anyio_test
async def test_a_folder_has_the_arrays_that_come_without_one(session: Session, tmp_path: Path) -> None:
    inside = await session.generate(PROMPTS, **GREEDY, capture=Capture(SITES))
    written = await session.generate(PROMPTS, **GREEDY, capture=Capture(SITES, into=tmp_path / "a" / "b"))
    folders = {done.captured.folder for done in written}
    assert folders == {tmp_path / "a" / "b" / "00000", tmp_path / "a" / "b" / "00001"}
    for plain, done in zip(inside, written, strict=True):
        assert done.token_ids == plain.token_ids
        assert {*done.captured} == {*plain.captured} and done.captured.layers == plain.captured.layers
        np.testing.assert_array_equal(done.captured.positions, plain.captured.positions)
        again = Captured.load(done.captured.folder)
        for key, array in plain.captured.items():
            name = key if isinstance(key, str) else f"{key[0]}.{key[1]}"
            tensors = load_file(done.captured.folder / f"{name}.safetensors")
            assert {*tensors} == {name, "positions"}
            np.testing.assert_allclose(done.captured[key], array, rtol=1e-3, atol=1e-4)  # other steps, other last bits
            for other in (again[key], tensors[name]):
                np.testing.assert_array_equal(done.captured[key], other)
            np.testing.assert_array_equal(tensors["positions"], plain.captured.positions)
            assert isinstance(done.captured[key], np.memmap) and not done.captured[key].flags.writeable
    part = written[1].captured.select(layers=1, positions=[3])
    patched = await session.generate(PROMPTS[1], **GREEDY, patch=part)
    assert patched.token_ids == written[1].token_ids, "what was there is put there"


@anyio_test
async def test_lines_behind_a_stop_are_cut_off_and_deltas_have_none(session: Session, tmp_path: Path) -> None:
    whole = await session.generate(PROMPTS[0], **GREEDY)
    stop = [whole.token_ids[4]]
    handle = session.submit(PROMPTS[0], **GREEDY, stop_token_ids=stop, capture=Capture(SITES, into=tmp_path))
    async for delta in handle:
        assert delta.captured is None
    done = await handle
    assert done.captured.positions.tolist() == list(range(5 + len(done.token_ids) - 1))
    assert not partial(tmp_path)


@anyio_test
async def test_what_an_interrupted_request_has_written_is_whole(session: Session, tmp_path: Path) -> None:
    handle = session.submit(PROMPTS[1], **{**GREEDY, "max_tokens": 50}, capture=Capture({"norm": True}, into=tmp_path))
    async for _ in handle:
        handle.cancel()
        break
    with pytest.raises(rekindle.RequestAborted):
        await handle
    eventually(lambda: len(names_in(tmp_path)) == 2 and not partial(tmp_path))  # the caller does not wait for the disk
    captured = Captured.load(tmp_path / "00000")
    assert len(captured.positions) >= 41 and captured["norm"].shape[0] == len(captured.positions)
    assert not partial(tmp_path)


@anyio_test
async def test_a_full_disk_ends_its_own_request(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rekindle._src.capabilities.captures.files.GrowingFile.append", full)
    failing = session.submit(PROMPTS[0], **GREEDY, capture=Capture({"norm": True}, into=tmp_path))
    beside = session.submit(PROMPTS[0], **GREEDY)
    with pytest.raises(RequestFailed):
        await failing
    assert len((await beside).token_ids) == 12
    eventually(lambda: not names_in(tmp_path))


def _file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


def _dangling(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder / "nowhere")


def _elsewhere(folder: Path) -> None:
    folder.rename(folder.with_name("other"))


def _other_folder(folder: Path) -> None:
    _elsewhere(folder)
    folder.mkdir()
    (folder / "norm.safetensors").mkdir()


def files_of(into: Path, pictures: tuple[PictureRun, ...]) -> CaptureFiles:
    """The files of a request that captures "norm", with the lines of positions 0 to 19 in them."""
    files = CaptureFiles(RequestTaps(keys=("norm",), layers=2, into=str(into)), 20, pictures)
    files.begin()
    files.add(CapturedPart(np.arange(20, dtype=np.int32), {"norm": np.zeros((20, 4), np.float32)}))
    return files


def test_a_folder_says_which_positions_are_pictures(tmp_path: Path) -> None:
    whole = PictureRun(2, 8, 0, TokenGrid(2, 3))
    tiles = [PictureRun(first, first + 2, 1, TokenGrid(1, 2, (0, column))) for column, first in enumerate((10, 13))]
    files_of(tmp_path, (whole, *tiles)).finish(14)
    captured = Captured.load(tmp_path / "00000")
    assert {position: str(patch) for position, patch in captured.patches.items()} == {
        2: "picture 0, row 0, column 0 of 2 × 3", 3: "picture 0, row 0, column 1 of 2 × 3",
        4: "picture 0, row 0, column 2 of 2 × 3", 5: "picture 0, row 1, column 0 of 2 × 3",
        6: "picture 0, row 1, column 1 of 2 × 3", 7: "picture 0, row 1, column 2 of 2 × 3",
        10: "picture 1, tile 0, 0, row 0, column 0 of 1 × 2", 11: "picture 1, tile 0, 0, row 0, column 1 of 1 × 2",
        13: "picture 1, tile 0, 1, row 0, column 0 of 1 × 2",
    }  # fmt: skip
    assert [*captured.select(positions=[1, 7, 13]).patches] == [7, 13]
    assert [*captured.select(layers=0).before(4).patches] == [2, 3]
    assert "14 positions, 9 of them of pictures" in captured._repr_html_()
    files_of(tmp_path, ()).finish(14)
    assert Captured.load(tmp_path / "00001").patches == {}
    files_of(tmp_path, (whole,)).discard()
    assert sorted(names_in(tmp_path)) == ["00000", "00001", "norm.safetensors", "norm.safetensors", "pictures.json"]


@pytest.mark.parametrize(
    "content",
    ["", "[", "[" * 100_000, " " * (1 << 20) + "[]", "{}1", "[1]", '[{"picture": 0}]', "null", '"text"', *(
        json.dumps([{"picture": 0, "start": 2, "stop": 8, "rows": 2, "columns": 3, "tile": None} | change])
        for change in ({"stop": 9}, {"rows": 0}, {"picture": -1}, {"columns": 3.0}, {"tile": [1]}, {"start": True})
    )],
)  # fmt: skip
def test_a_damaged_list_of_pictures_is_refused_by_the_folder(tmp_path: Path, content: str) -> None:
    files_of(tmp_path, (PictureRun(2, 8, 0, TokenGrid(2, 3)),)).finish(20)
    (tmp_path / "00000" / "pictures.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"damaged pictures\.json"):
        Captured.load(tmp_path / "00000")


def test_pictures_that_share_positions_are_refused(tmp_path: Path) -> None:
    """Two hundred runs of all positions had each position as often: 800 KB took more than two minutes to show."""
    files_of(tmp_path, (PictureRun(2, 8, 0, TokenGrid(2, 3)),)).finish(20)
    path = tmp_path / "00000" / "pictures.json"
    (run,) = json.loads(path.read_text())
    for second in (run, run | {"start": 7, "stop": 13}, run | {"start": 0, "stop": 6}):
        path.write_text(json.dumps([run, second]))
        with pytest.raises(InvalidRequest, match=r"damaged pictures\.json"):
            Captured.load(tmp_path / "00000")
    path.write_text(json.dumps([run, run | {"start": 8, "stop": 14}]))
    assert len(Captured.load(tmp_path / "00000").patches) == 12


def _capture_file(folder: Path, name: str, positions: Sequence[int], lines: int, kind: str = "I32") -> None:
    """Write a file as another program could."""
    numbers = np.array(positions, "<i4").tobytes()
    size = len(numbers)
    header = json.dumps(
        {
            "__metadata__": {"layers": "2"},
            "positions": {"dtype": kind, "shape": [len(positions)], "data_offsets": [0, size]},
            name: {"dtype": "F32", "shape": [lines, 1], "data_offsets": [size, size + 4 * lines]},
        }
    ).encode()
    (folder / f"{name[:12]}.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + numbers + bytes(4 * lines)
    )


def test_captures_of_others_have_a_line_of_a_site_for_each_position(tmp_path: Path) -> None:
    """Searches in positions that don't ascend find others' lines, and a site's name is shown."""
    _capture_file(tmp_path, "residual.0", [1, 2, 5], 3)
    assert Captured.load(tmp_path).positions.tolist() == [1, 2, 5]
    for name, positions, lines, kind in (
        ("residual.1", [1, 2, 6], 3, "I32"),  # other positions than the file before
        ("residual.1", [1, 2], 2, "I32"),
        ("residual.0", [1, 5, 2], 3, "I32"),
        ("residual.0", [1, 1, 2], 3, "I32"),
        ("residual.0", [-1, 1, 2], 3, "I32"),
        ("residual.0", [1, 2, 5], 2, "I32"),
        ("residual.0", [1, 2, 5], 3, "F32"),
        ("\x1b[2J.0", [1, 2, 5], 3, "I32"),
    ):
        _capture_file(tmp_path, name, positions, lines, kind)
        with pytest.raises(InvalidRequest, match=r"has a damaged .*safetensors"):
            Captured.load(tmp_path)
        (tmp_path / f"{name[:12]}.safetensors").unlink()
        _capture_file(tmp_path, "residual.0", [1, 2, 5], 3)


def test_a_list_of_pictures_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A FIFO would be waited for, for ever."""
    files_of(tmp_path, (PictureRun(2, 8, 0, TokenGrid(2, 3)),)).finish(20)
    path = tmp_path / "00000" / "pictures.json"
    for make in (os.mkfifo, os.mkdir):
        path.unlink()
        make(path)
        with pytest.raises(InvalidRequest, match=r"damaged pictures\.json"):
            Captured.load(tmp_path / "00000")


EXCHANGES = [_file, _dangling, shutil.rmtree, _elsewhere, _other_folder]


@pytest.mark.usefixtures("short_turns")
@anyio_test
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.__name__.strip("_"))
async def test_a_folder_that_is_exchanged_ends_its_own_request(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: Callable[[Path], object]
) -> None:
    plain = await session.generate(PROMPTS[0], **GREEDY)
    finish = GrowingFile.finish

    def exchanged(self: GrowingFile, *arguments: Any) -> None:
        exchange(self._path.parent)
        finish(self, *arguments)

    monkeypatch.setattr(GrowingFile, "finish", exchanged)
    failing = session.submit(PROMPTS[1], **GREEDY, capture=Capture({"norm": True}, into=tmp_path))
    beside = session.submit(PROMPTS[0], **GREEDY)
    with pytest.raises(RequestFailed, match="captures could not be written to"):
        await failing
    assert (await beside).token_ids == plain.token_ids
    monkeypatch.undo()
    after = await session.generate(PROMPTS[0], **GREEDY, capture=Capture({"norm": True}, into=tmp_path / "after"))
    assert after.token_ids == plain.token_ids and len(after.captured["norm"]) == len(after.captured.positions)


@anyio_test
@pytest.mark.parametrize("call", ["append", "finish", "close", "remove"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "denied"), ValueError()])
async def test_whatever_a_file_raises_it_raises_for_its_own_request(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    plain = await session.generate(PROMPTS[0], **GREEDY)

    def failing(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(GrowingFile, call, failing)
    if call in ("close", "remove"):  # called where a write has failed
        monkeypatch.setattr(GrowingFile, "append", failing)
    handle = session.submit(PROMPTS[1], **GREEDY, capture=Capture({"norm": True}, into=tmp_path))
    beside = session.submit(PROMPTS[0], **GREEDY)
    with pytest.raises(RequestFailed, match="captures could not be written to") as raised:
        await handle
    assert raised.value.__cause__ is error
    assert (await beside).token_ids == plain.token_ids


@anyio_test
async def test_a_disk_that_hangs_delays_its_own_request_alone(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await session.generate(PROMPTS[0], **GREEDY)
    works, append = threading.Event(), GrowingFile.append

    def hanging(self: GrowingFile, *arguments: Any) -> None:
        assert works.wait(60), "the disk was never mended"
        append(self, *arguments)

    monkeypatch.setattr(GrowingFile, "append", hanging)
    slow = session.submit(PROMPTS[1], **GREEDY, capture=Capture({"norm": True}, into=tmp_path))
    given_up = session.submit(PROMPTS[1], **GREEDY, capture=Capture({"norm": True}, into=tmp_path))
    with anyio.fail_after(60):
        async for delta in slow:
            if delta.finish_reason is not None:
                break
        assert len(slow.token_ids) == 12 and not slow.done, "its tokens are there, its files are not"
        streamed = [token async for delta in session.stream(PROMPTS[0], **GREEDY) for token in delta.token_ids]
        assert tuple(streamed) == plain.token_ids, "it went on while the disk did not"
        given_up.cancel()
        with pytest.raises(rekindle.RequestAborted):
            await given_up
        assert not slow.done
        works.set()
        done = await slow
    assert len(done.captured["norm"]) == len(done.captured.positions) == len(PROMPTS[1]) + 11
    assert Captured.load(done.captured.folder)["norm"].shape == done.captured["norm"].shape
    eventually(lambda: not partial(tmp_path))


def writers() -> int:
    """Return how many threads write captures now."""
    return sum(thread.name == "rekindle captures" for thread in threading.enumerate())


async def refusals(session: Session, folder: Path, count: int) -> list[type[RekindleError]]:
    """Return how `count` requests at once that capture into a folder are refused."""
    errors: list[type[RekindleError]] = []

    async def refused() -> None:
        with pytest.raises((Busy, InvalidRequest)) as caught:
            await session.generate(PROMPTS[0], **GREEDY, capture=Capture({"norm": True}, into=folder))
        errors.append(type(caught.value))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(refused)
    return errors


@anyio_test
async def test_a_folder_that_hangs_at_the_door_has_a_bounded_number_of_threads(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, begin = threading.Event(), CaptureFiles.begin

    def hanging(self: CaptureFiles) -> None:
        assert works.wait(60), "the disk was never mended"
        begin(self)

    monkeypatch.setattr(CaptureFiles, "begin", hanging)
    monkeypatch.setattr(captures, "PATIENCE", 0.3)
    eventually(lambda: not writers())  # one of the test before may still be ending
    errors = await refusals(session, tmp_path, 4 * MOST_UNATTENDED)
    assert errors.count(InvalidRequest) == MOST_UNATTENDED and Busy in errors
    assert writers() == MOST_UNATTENDED
    with pytest.raises(Busy, match=r"8 folders of other requests' captures, such as .*, do not answer") as busy:
        await session.generate(PROMPTS[0], capture=Capture({"norm": True}, into=tmp_path / "elsewhere"))
    assert busy.value.retry_after > 0 and writers() == MOST_UNATTENDED
    assert len((await session.generate(PROMPTS[0], **GREEDY)).token_ids) == 12
    works.set()
    eventually(lambda: not writers())
    monkeypatch.setattr(captures, "PATIENCE", 10.0)
    done = await session.generate(PROMPTS[0], **GREEDY, capture=Capture({"norm": True}, into=tmp_path / "after"))
    assert done.captured is not None and len(done.captured.positions) == len(PROMPTS[0]) + 11


@anyio_test
async def test_requests_that_are_over_and_left_their_files_to_a_disk_that_hangs_are_counted(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, append = threading.Event(), GrowingFile.append

    def hanging(self: GrowingFile, *arguments: Any) -> None:
        assert works.wait(60), "the disk was never mended"
        append(self, *arguments)

    monkeypatch.setattr(GrowingFile, "append", hanging)
    monkeypatch.setattr(captures, "PATIENCE", 0.3)
    with anyio.fail_after(60):
        for _ in range(MOST_UNATTENDED):
            handle = session.submit(PROMPTS[0], **GREEDY, capture=Capture({"norm": True}, into=tmp_path))
            async for _ in handle:
                break
            handle.cancel()
            with pytest.raises(rekindle.RequestAborted):
                await handle
        assert await refusals(session, tmp_path, 2) == [Busy, Busy]
    assert writers() == MOST_UNATTENDED
    works.set()
    eventually(lambda: not writers())


@anyio_test
async def test_what_waits_for_a_disk_is_bounded(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, append, waiting = threading.Event(), GrowingFile.append, list[int]()

    def hanging(self: GrowingFile, *arguments: Any) -> None:
        assert works.wait(60), "the disk was never mended"
        append(self, *arguments)

    class Small(Backlog):
        def __init__(self) -> None:
            super().__init__(1)

        def add(self, count: int) -> None:
            super().add(count)
            waiting.append(self.waiting)

    monkeypatch.setattr(GrowingFile, "append", hanging)
    monkeypatch.setattr("rekindle._src.capabilities.captures.request.Backlog", Small)
    options = {**GREEDY, "max_tokens": 40}
    slow = session.submit(PROMPTS[0], **options, capture=Capture({"norm": True}, into=tmp_path))
    same = PROMPTS[0] + PROMPTS[1]
    with anyio.fail_after(60):
        async for _ in slow:
            break
        for prompt in (PROMPTS[0], same, PROMPTS[1]):  # also one that could wait for the pages of the slow one
            assert len((await session.generate(prompt, **GREEDY)).token_ids) == 12
        assert len(slow.token_ids) < 8, "no step has it while its parts wait"
        works.set()
        done = await slow
    assert len(done.token_ids) == 40 and len(done.captured.positions) == 5 + 39
    # What one step captures, and that of the step which was in flight then.
    assert max(waiting) <= 3 * MODEL.config.hidden_size * 4 * 5


def test_what_is_no_folder_is_refused(session: Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", tmp_path / "dangling"):
        with pytest.raises(InvalidRequest, match="is a file, or inside one") as refused:
            session.generate_sync(PROMPTS[0], capture=Capture({"norm": True}, into=folder))
        assert refused.value.field == "capture"
    wrong: list[Any] = ["~nosuchuser/here", tmp_path / ("x" * 300), "a\ud800b", "/proc/nothing/here"]
    for folder in wrong:
        with pytest.raises(InvalidRequest, match="Name a folder that can be written to") as refused:
            session.generate_sync(PROMPTS[0], capture=Capture({"norm": True}, into=folder))
        assert refused.value.field == "capture"
    for no_path in (3, b"bytes", "", "a\0b", _Bytes(), _Raising()):
        with pytest.raises(InvalidRequest, match="is not the name of a folder"):
            Capture({"norm": True}, into=no_path)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="has no captures"):
        Captured.load(tmp_path)


def test_a_folder_without_leave_to_write_is_refused(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, *arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", denied)  # who runs as root may write anywhere
    with pytest.raises(InvalidRequest, match="can't be written to: Permission denied"):
        session.generate_sync(PROMPTS[0], capture=Capture({"norm": True}, into=tmp_path))


class _Bytes:
    def __fspath__(self) -> bytes:
        return b"bytes"


class _Raising:
    def __fspath__(self) -> str:
        raise RuntimeError


def test_a_relative_folder_is_that_of_the_call(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ("9" * 200)).mkdir()  # no number of a folder of ours
    done = session.generate_sync(PROMPTS[0], **GREEDY, capture=Capture({"norm": True}, into="here"))
    assert done.captured.folder == tmp_path / "here" / "00000"


@anyio_test
async def test_closing_leaves_what_was_written_whole(tmp_path: Path) -> None:
    async with rekindle.open(MODEL, **OPTIONS) as opened:
        handle = opened.submit(
            PROMPTS[0], **{**GREEDY, "max_tokens": 80}, capture=Capture({"norm": True}, into=tmp_path)
        )
        async for _ in handle:
            break
    with pytest.raises(rekindle.SessionClosed):
        await handle
    eventually(lambda: len(names_in(tmp_path)) == 2 and not partial(tmp_path))
    assert len(Captured.load(tmp_path / "00000").positions) >= 5


@anyio_test
async def test_a_session_that_drains_waits_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, works, finish = threading.Event(), threading.Event(), GrowingFile.finish

    def late(self: GrowingFile, *arguments: Any) -> None:
        begun.set()
        assert works.wait(60)
        finish(self, *arguments)

    monkeypatch.setattr(GrowingFile, "finish", late)
    opened = await rekindle.open(MODEL, **OPTIONS)
    handle = opened.submit(PROMPTS[0], **GREEDY, capture=Capture({"norm": True}, into=tmp_path))
    async with anyio.create_task_group() as group:
        await anyio.to_thread.run_sync(begun.wait, 60)
        group.start_soon(lambda: opened.aclose(drain=60))
        await anyio.sleep(0.05)
        assert not handle.done
        works.set()
    assert len((await handle).captured["norm"]) == 5 + 11


@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")  # treescope looks at all of NumPy
def test_captures_are_frames_and_trees(session: Session) -> None:
    captured = session.generate_sync(PROMPTS[0], **GREEDY, capture=Capture({"residual": [0], "q": 1, "norm": True}))
    assert captured.captured is not None
    frame = captured.captured.to_pandas()
    size = MODEL.config.hidden_size
    assert frame.index.tolist() == captured.captured.positions.tolist()
    assert frame.columns.names == ["site", "layer", "number"]
    np.testing.assert_array_equal(frame["residual", 0].to_numpy(), captured.captured["residual", 0])
    assert frame["norm", -1].shape[1] == size
    treescope = pytest.importorskip("treescope")
    assert "residual" in treescope.render_to_text(captured.captured)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        b"[" * 100_000,
        b"5",
        b"{}",
        b'{"__metadata__":{"layers":"x"}}',
        b'{"__metadata__":{"layers":"1"},"positions":{"dtype":"I32","shape":[1000000000000],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"layers":"1"},"positions":{"dtype":"I32","shape":[1],"data_offsets":[-99,4]}}',
        b'{"__metadata__":{"layers":"1"},"positions":{"dtype":["I32"],"shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"layers":"1"},"positions":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_captures_of_others_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "norm.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(4))
    with pytest.raises(InvalidRequest, match=r"has a damaged norm\.safetensors"):
        Captured.load(tmp_path)
