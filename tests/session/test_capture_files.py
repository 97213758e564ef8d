"""Captures into a folder: safetensors that anybody can read, mapped, and the arrays that come without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import rekindle
from helpers import checkpoints
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Capture, Captured, Session
from rekindle.errors import InvalidRequest, RequestFailed

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
    captured = Captured.load(tmp_path / "00000")
    assert len(captured.positions) >= 41 and captured["norm"].shape[0] == len(captured.positions)
    assert not partial(tmp_path)


@anyio_test
async def test_a_full_disk_ends_its_own_request(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rekindle._src.core.capture_files._Growing.append", full)
    failing = session.submit(PROMPTS[0], **GREEDY, capture=Capture({"norm": True}, into=tmp_path))
    beside = session.submit(PROMPTS[0], **GREEDY)
    with pytest.raises(RequestFailed):
        await failing
    assert len((await beside).token_ids) == 12
    assert not names_in(tmp_path)


def test_what_is_no_folder_is_refused(session: Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(InvalidRequest, match="is a file, or inside one"):
            session.generate_sync(PROMPTS[0], capture=Capture({"norm": True}, into=folder))
    with pytest.raises(InvalidRequest, match="is not the name of a folder"):
        Capture({"norm": True}, into=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="has no captures"):
        Captured.load(tmp_path)


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
