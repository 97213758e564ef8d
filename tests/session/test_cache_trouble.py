"""A cache folder that becomes read-only, fills its disk or is deleted while a session uses it.

For each kind of cache, no request fails or gets another answer, the trouble is logged in one line, `save` raises a
typed error, and everything is kept again once the folder can be used. The trouble is simulated by errors of Python's
calls, because permissions do not stop tests that run as root.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import adapters
from helpers import picture_models as small
from helpers.thorough import by_default
from rekindle import Session
from rekindle._src.kvcache import writer
from rekindle.errors import StoreError
from rekindle_kernels import private_files
from session import test_damaged as damaged
from soak.faults import Refusing

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
NUMBERS = {"read-only": errno.EROFS, "full": errno.ENOSPC}
TROUBLES = (*NUMBERS, "deleted")
PICTURES = "pictures"
KINDS = ("float32", "states", "windows", "captures", "adapters", PICTURES)


@contextlib.contextmanager
def trouble(name: str, cache: Path) -> Iterator[None]:
    if name == "deleted":
        while cache.exists():  # the session adds to a folder now and then while it is being deleted
            with contextlib.suppress(OSError):
                shutil.rmtree(cache)
                break
        yield
    else:
        with Refusing(cache, NUMBERS[name]).active(1.0):
            yield


def opened(name: str, folder: Path, **options: Any) -> Session:
    """A session with few device pages and little host memory, so that the disk is asked for pages."""
    settings = {**damaged.OPTIONS, "device_pages": 48, "host_memory": 1 << 16, **options}
    if name == PICTURES:
        return rekindle.open_sync(small.written("qwen3-vl", folder), **settings)
    kind = damaged.KINDS[name]
    model = damaged.model_of(kind, folder)
    if "adapter" in kind.asked:
        settings["adapters"] = {"mine": adapters.write(folder / "adapter", model.config, seed=1, rank=4)}
    return rekindle.open_sync(model, **settings | kind.options)


def answers(session: Session, name: str, first: int, **options: Any) -> list[Any]:
    """Return the answers to two prompts that share their beginning with all others and end differently."""
    result: list[Any] = []
    for index in range(first, first + 2):
        ids = [7] * 40 + np.random.default_rng(index).integers(3, 160, 50).tolist()
        if name == PICTURES:
            prompt: Any = f"Number {index}: what is in <image>?"
            done = session.generate_sync(
                prompt, images=[small.picture(index, 96, 64)], max_tokens=8, ignore_eos=True, temperature=0, **options
            )
        else:
            asked = damaged.KINDS[name].asked
            done = session.generate_sync(ids, max_tokens=8, ignore_eos=True, temperature=0, **asked, **options)
        captured = None if done.captured is None else {key: array.tobytes() for key, array in done.captured.items()}
        result.append((done.token_ids, captured))
    return result


@pytest.mark.parametrize("name", by_default(KINDS, 1))
def test_requests_go_on_without_the_cache(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"TICK_SECONDS": 0.02, "COLD_SECONDS": 0.0, "RETRY_SECONDS": 0.05, "LONGEST_RETRY": 0.2}
    for constant, value in times.items():
        monkeypatch.setattr(writer, constant, value)
    cache = tmp_path / "cache"
    variants: list[dict[str, Any]] = [{"logprobs": 2}, {"repetition_penalty": 1.1}, {"top_k": 3}]
    with opened(name, tmp_path, cache_dir=str(tmp_path / "other"), prefix_cache=name == "captures") as session:
        expected = [answers(session, name, 2 * number) for number in range(len(TROUBLES) + 1)]
        varied = [answers(session, name, 0, **variant) for variant in variants]
    said: dict[str, list[str]] = {}
    with opened(name, tmp_path, cache_dir=str(cache)) as session:
        assert answers(session, name, 0) == expected[0]
        assert session.save("before").result_sync().pages > 0
        for number, what in enumerate(TROUBLES):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "rekindle"), trouble(what, cache):
                for _ in range(2):
                    assert answers(session, name, 2 * number + 2) == expected[number + 1], what
                    assert answers(session, name, 0) == expected[0], what
                assert answers(session, name, 0, **variants[number]) == varied[number], what
                if what in NUMBERS:
                    for _ in range(2):
                        with pytest.raises(StoreError, match=r"Read-only|No space|free"):
                            session.save("during").result_sync()
            records = [record for record in caplog.records if record.name != "rekindle.steps"]  # of a busy machine
            said[what] = [record.getMessage() for record in records]
            report = session.save("after").result_sync()
            assert report.pages > 0, what
            session.check_integrity()
        folders = {path.name for path in cache.iterdir() if path.is_dir()}
        assert {"pages", "snapshots", *([PICTURES] if name == PICTURES else [])} <= folders <= {*private_files.KINDS}
        with trouble("read-only", cache):
            answers(session, name, 100)
            session.close()
    with opened(name, tmp_path, cache_dir=str(cache), restore="after") as session:
        for number in range(len(expected)):
            assert answers(session, name, 2 * number) == expected[number]
        session.check_integrity()
    parts = [line.partition(":")[0] for lines in said.values() for line in lines]
    assert len(parts) == len({*parts}) <= 3, f"a part said it twice: {said}"
