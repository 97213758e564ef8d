"""Changes inside the model over HTTP: those that the server was started with, by name, and no arrays of strangers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers.asgi import get, post
from helpers.sessions import engine_of
from helpers.small import MODEL, OPTIONS, plain, prompt
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Steer
from rekindle._src.capabilities.captures.files import read_changes
from rekindle._src.cli import main
from rekindle._src.cli.usage import paths_by_name
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle.errors import ConfigError
from rekindle.serve import app

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_programs", "large_steps")]
IDS = prompt(1, 9)
VECTOR = np.random.default_rng(0).standard_normal(MODEL.config.hidden_size)
STEER = Steer(0, VECTOR, 5.0)
BODY = {"prompt": IDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with rekindle.open_sync(MODEL, steering={"polite": STEER}, **{**OPTIONS, "precompile": "lazy"}) as opened:
        yield opened


def kinds_ahead(session: Any) -> set[ProgramVariant]:
    """The variants of the steps whose programs are made ahead."""
    programs = engine_of(session).runner.programs
    assert {*programs.lattice.ahead} <= {*programs.keys}
    return {bucket.variants for bucket in programs.lattice.ahead}


async def test_programs_of_steps_with_named_changes_are_made_ahead(session: Any) -> None:
    assert kinds_ahead(session) == {PLAIN_VARIANT, ProgramVariant.STEERING}
    with rekindle.open_sync(MODEL, **{**OPTIONS, "precompile": "lazy"}) as without:
        assert kinds_ahead(without) == {PLAIN_VARIANT}


@pytest.mark.thorough
async def test_names_change_what_is_served(session: Any) -> None:
    served = app(session)

    async def tokens(**fields: Any) -> list[int]:
        answer = await post(served, "/v1/completions", {**BODY, **fields})
        assert answer.status == 200, answer.body
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}
    expected = list((await session.generate(IDS, steer=STEER, **options)).token_ids)
    negative = list((await session.generate(IDS, steer=Steer(0, VECTOR, -10.0), **options)).token_ids)
    assert await tokens(steer="polite") == await tokens(steer=["polite"]) == expected
    assert await tokens(steer={"polite": -2}) == negative
    assert await tokens() == await tokens(steer=[]) == list(plain(IDS, 6))
    assert len({tuple(expected), tuple(negative), plain(IDS, 6)}) == 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"steer": "rude"}, "steer", "is not a steering vector of this session"),
        ({"steer": [0.5, 0.25]}, "steer[0]", "is not a string"),
        ({"steer": [["polite"]]}, "steer[0]", "is not a string"),
        ({"steer": {"layer": 0, "vector": [0.5]}}, "steer.vector", "must be a number"),
        ({"steer": {"polite": True}}, "steer.polite", "must be a number"),
        ({"steer": {"polite": 1e9}}, "steer.polite", "must be between"),
        ({"steer": ["polite"] * 65}, "steer", "65"),
        ({"steer": 3}, "steer", "a name"),
        ({"capture": {"residual": [0]}}, "capture", "callers in the server's own process"),
        ({"patch": {"residual": [0]}}, "patch", "callers in the server's own process"),
        ({"taps": ["mine"]}, "taps", "open()"),
    ],
)
async def test_arrays_and_unknown_names_are_refused_by_field(session: Any, fields: Any, param: str, words: str) -> None:
    answer = await post(app(session), "/v1/completions", {**BODY, **fields})
    assert answer.status == 400
    assert answer.error["param"] == param and words in answer.error["message"], answer.error
    assert "rekindle.Steer" not in answer.error["message"] and "open(steering" not in answer.error["message"]


@pytest.mark.thorough
async def test_vectors_may_come_from_files(tmp_path: Path, session: Any) -> None:
    from safetensors.numpy import save_file

    file = tmp_path / "polite.safetensors"
    save_file({"residual.0": VECTOR}, file, {"scale": "5.0"})
    save_file({"residual.0": VECTOR.astype(np.float16), "mlp.1": VECTOR}, tmp_path / "two.safetensors")
    assert read_changes(file) == (STEER,)
    assert [(change.site, change.layer) for change in read_changes(tmp_path / "two.safetensors")] == [
        ("residual", 0), ("mlp", 1)
    ]  # fmt: skip
    arguments = main.parser().parse_args(["serve", "--steering", f"polite={file}"])
    assert paths_by_name("--steering", arguments.steering, "file") == {"polite": str(file)}
    two = tmp_path / "two.safetensors"
    with rekindle.open_sync(
        MODEL, steering={"polite": file, "two": two}, **{**OPTIONS, "precompile": "lazy"}
    ) as opened:
        options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0, "steer": "polite"}
        expected = await session.generate(IDS, **options)
        assert opened.generate_sync(IDS, **options).token_ids == expected.token_ids != plain(IDS, 6)
        assert kinds_ahead(opened) == {PLAIN_VARIANT, ProgramVariant.STEERING, ProgramVariant.INNER_STEERING}


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({}, {}, "has no vectors"),
        ({"residual": VECTOR}, {}, "has a tensor 'residual' of shape"),
        ({"q.0": VECTOR}, {}, "has a tensor 'q.0'"),
        ({"residual.0": VECTOR[None]}, {}, "of shape (1, "),
        ({"residual.0": VECTOR.astype(np.int32)}, {}, "is no safetensors file of float vectors"),
        ({"residual.0": VECTOR * np.inf}, {}, "is not a vector of finite numbers"),
        ({"residual.0": VECTOR}, {"scale": "much"}, "has a scale 'much'"),
        ({"residual.0": VECTOR}, {"mode": "push"}, "is not a mode"),
        ({"residual.0": VECTOR[:3]}, {}, "does not fit the model"),
        ({"residual.7": VECTOR}, {}, "does not fit the model"),
    ],
)
async def test_wrong_files_are_refused_when_a_session_opens(
    tmp_path: Path, tensors: Any, metadata: Any, words: str
) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, tmp_path / "wrong.safetensors", metadata or None)
    with pytest.raises(ConfigError, match=re.escape(words)):
        await rekindle.open(MODEL, steering={"wrong": tmp_path / "wrong.safetensors"}, **OPTIONS)


def stored(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


ONE = b'"residual.0":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
STRANGE = [
    stored(b"[" * 100_000), stored(b'{"__metadata__":5,%b}' % ONE), stored(b'{"__metadata__":["mode"],%b}' % ONE),
    stored(b'{"residual.0":{"dtype":"F32","shape":[1],"data_offsets":["a",null]}}'),
]  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", *STRANGE, None])
async def test_what_is_no_file_of_vectors_is_refused(tmp_path: Path, data: bytes | None) -> None:
    file = tmp_path / "wrong.safetensors"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ConfigError, match="can't be read" if data is None else "is no safetensors file"):
        await rekindle.open(MODEL, steering={"wrong": str(file)}, **OPTIONS)


async def test_the_field_is_described(session: Any) -> None:
    description = (await get(app(session), "/openapi.json")).json()
    assert "steer" in str(description["paths"]["/v1/completions"])


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b'{"__metadata__":{"scale":[1]},%b}' % ONE, "has a scale '[1]'"),
        (
            b'{"residual.%b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' % (b"9" * 5000),
            "has a tensor 'residual.9",
        ),
        (b'{"residual.0":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"__metadata__":{"mode":["add"]}}', "change"),
    ],
)
def test_what_a_file_of_vectors_says_is_refused_in_words(tmp_path: Path, header: bytes, words: str) -> None:
    (tmp_path / "wrong.safetensors").write_bytes(stored(header))
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        read_changes(tmp_path / "wrong.safetensors")
    assert len(str(raised.value)) < 600


def shared(*places: tuple[int, int]) -> bytes:
    """A file of eight numbers, which its vectors may share."""
    fields = {
        f"residual.{layer}": {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}
        for layer, (begin, end) in enumerate(places)
    }
    return stored(json.dumps(fields).encode()) + np.ones(8, np.float32).tobytes()


def test_vectors_share_no_bytes(tmp_path: Path) -> None:
    """Twelve thousand names of the same 256 kB took 6 GB and 12 s, of a file of 1 MB."""
    file = tmp_path / "shared.safetensors"
    file.write_bytes(shared((0, 16), (16, 32)))
    assert [change.layer for change in read_changes(file)] == [0, 1]
    for places in ([(0, 32), (0, 4)], [(0, 20), (12, 32)], [(-32, 0)], [(0, 36)], [(32, 0), (0, 32), (0, 32)]):
        file.write_bytes(shared(*places))
        with pytest.raises(ConfigError, match="is no safetensors file of float vectors"):
            read_changes(file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no FIFOs")
def test_a_fifo_is_no_file_of_vectors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "wrong.safetensors")
    with pytest.raises(ConfigError, match="can't be read: not a regular file"):
        read_changes(tmp_path / "wrong.safetensors")
