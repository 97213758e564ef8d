"""Checkpoints of models that embed: the vectors are those that sentence-transformers computed (tests/golden)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rekindle
from helpers import embedders
from helpers.asgi import post
from helpers.sessions import wait_until_idle
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from rekindle import Session
from rekindle.errors import ConfigError, InvalidRequest, PromptTooLong
from rekindle_kernels import unavailable_reason

pytestmark = pytest.mark.usefixtures("large_steps")
GOLDEN = Path(__file__).parents[1] / "golden" / "embedders.npz"
TEXTS = embedders.texts()
TOLERANCE = 1e-4  # of a vector's length
OPTIONS: dict[str, Any] = {
    "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 96, "page_size": 16, "device_pages": 64,
    "precompile": "lazy", "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def golden() -> dict[str, NDArray[np.float32]]:
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory, cache_dir: str) -> Iterator[Session]:
    folder = embedders.write(tmp_path_factory.mktemp("embedder"), "gemma3")
    with rekindle.open_sync(folder, cache_dir=cache_dir, **OPTIONS) as session:
        yield session
        wait_until_idle(session)


def check(vectors: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert vectors.shape == expected.shape and vectors.dtype == np.float32
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors / lengths, expected / lengths, rtol=0, atol=TOLERANCE)


VARIED = ("qwen3-without-head", "modernbert-mean")  # CI asks them


@pytest.mark.parametrize(
    "name",
    [
        *by_default(name for name in embedders.CASES if name not in VARIED),
        *(pytest.param(name, marks=pytest.mark.slow) for name in VARIED),
    ],
)
def test_vectors_are_those_of_sentence_transformers(
    name: str, golden: dict[str, NDArray[np.float32]], cache_dir: str, tmp_path: Path
) -> None:
    """Pooling, linear layers, norm and prompts are the checkpoint's own; texts of many lengths are in a step."""
    with rekindle.open_sync(embedders.write(tmp_path, name), cache_dir=cache_dir, **OPTIONS) as session:
        check(session.embed_sync(TEXTS), golden[f"{name}/own"])
        check(session.embed_sync(TEXTS[:3], prompt_name="query"), golden[f"{name}/query"])
        check(session.embed_sync(TEXTS[::-1]), golden[f"{name}/own"][::-1])
        check(np.stack([session.embed_sync(text) for text in TEXTS[3:6]]), golden[f"{name}/own"][3:6])
        check(session.embed_sync(TEXTS[:2], prompt_name=""), golden[f"{name}/plain"][:2])
        ids = [session.tokenizer.encode(text) for text in TEXTS]  # have no prompt
        check(session.embed_sync(ids), golden[f"{name}/plain"])
        wait_until_idle(session)


@pytest.mark.thorough
@pytest.mark.anyio
async def test_options_replace_the_checkpoints_own(gemma: Session) -> None:
    vectors = await gemma.embed(TEXTS[:4])
    assert vectors.shape == (4, 48) and np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    long = await gemma.embed(TEXTS[:4], normalize=False)
    assert np.all(np.abs(np.linalg.norm(long, axis=1) - 1.0) > 1e-3)
    short = await gemma.embed(TEXTS[:4], dimensions=16)
    np.testing.assert_allclose(short, long[:, :16] / np.linalg.norm(long[:, :16], axis=1, keepdims=True), atol=1e-6)
    others = [await gemma.embed(TEXTS[4], pooling=pooling) for pooling in ("mean", "last", "cls")]
    np.testing.assert_allclose(others[0], (await gemma.embed(TEXTS[4])), atol=1e-6)
    assert np.abs(others[0] - others[1]).max() > 0.01 and np.abs(others[1] - others[2]).max() > 0.01
    with pytest.raises(
        InvalidRequest, match=r"prompt_name='answer'.*is not a prompt of this model.*'query', 'document'"
    ):
        await gemma.embed(TEXTS[:1], prompt_name="answer")
    with pytest.raises(InvalidRequest, match=r"prompt_name='query'.*token ids have none"):
        await gemma.embed([[5, 6]], prompt_name="query")
    with pytest.raises(InvalidRequest, match="dimensions=49"):
        await gemma.embed(TEXTS[:1], dimensions=49)


@pytest.mark.anyio
async def test_a_text_is_computed_in_one_step_and_nothing_of_it_is_kept(gemma: Session) -> None:
    """Tokens see those after them, so no part of a text can be computed before the rest."""
    assert gemma.config.max_tokens_per_step == 96  # 32 was asked for: the longest text has to fit
    ids = [list(range(5, 5 + length)) for length in (60, 30, 96, 7, 1, 2)]
    async with gemma.paused():
        handles: Any = gemma.embed(ids, normalize=False)
        for handle in handles._batch.handles:
            handle.submit()
        steps = []
        while sum(map(len, steps)) < len(ids):
            report = await gemma.step()
            assert report is not None
            steps.append([row.stop - row.start for row in report.rows])
    assert steps == [[60, 30], [96], [7, 1, 2]]
    vectors = await handles
    for length, vector in zip(map(len, ids), vectors, strict=True):
        alone = await gemma.embed(list(range(5, 5 + length)), normalize=False)
        np.testing.assert_allclose(vector, alone, rtol=0, atol=1e-5)
    compiled = gemma.stats().compilations
    again = await gemma.embed(ids, normalize=False)
    assert gemma.stats().compilations == compiled and handles.usage.cached_tokens == 0
    np.testing.assert_allclose(again, vectors, rtol=0, atol=1e-5)
    assert gemma.stats().scheduler.pages_cached == 0
    with pytest.raises(PromptTooLong, match="is longer than max_model_len, which is 96"):
        await gemma.embed([5] * 97)


@pytest.mark.anyio
async def test_it_generates_nothing(gemma: Session) -> None:
    calls: list[Any] = [
        lambda: gemma.generate("w1 w2", max_tokens=3),
        lambda: gemma.generate([5, 6], max_tokens=0, prompt_logprobs=1),
        lambda: gemma.submit("w1"),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match=r"is for embed only.*Use session\.embed"):
            await call()
    wait_until_idle(gemma)


@pytest.mark.thorough
@pytest.mark.anyio
async def test_over_http(gemma: Session, golden: dict[str, NDArray[np.float32]]) -> None:
    from rekindle.serve import app

    made = app(gemma)
    answer = await post(made, "/v1/embeddings", {"input": TEXTS[:3], "prompt_name": "query"})
    assert answer.status == 200
    check(np.array([one["embedding"] for one in answer.json()["data"]], np.float32), golden["gemma3/query"])
    ids = [gemma.tokenizer.encode(text) for text in TEXTS]
    answer = await post(made, "/v1/embeddings", {"input": ids})
    check(np.array([one["embedding"] for one in answer.json()["data"]], np.float32), golden["gemma3/plain"])
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, ids))
    for path, body in (("/v1/completions", {"prompt": "w1"}), ("/v1/embeddings", {"input": "w1", "prompt_name": "x"})):
        answer = await post(made, path, body)
        assert answer.status == 400, answer.body
        assert answer.error["param"] in ("model", "prompt_name")
        assert "embed only" in answer.error["message"] or "is not a prompt" in answer.error["message"]


@pytest.mark.thorough
def test_a_causal_one_generates_too_unless_it_has_no_head(cache_dir: str, tmp_path: Path) -> None:
    with rekindle.open_sync(embedders.write(tmp_path / "one", "qwen3"), cache_dir=cache_dir, **OPTIONS) as session:
        assert len(session.generate_sync("w1 w2", max_tokens=3, ignore_eos=True).token_ids) == 3
    folder = embedders.write(tmp_path / "other", "qwen3-without-head")
    with (
        rekindle.open_sync(folder, cache_dir=cache_dir, **OPTIONS) as session,
        pytest.raises(InvalidRequest, match="is for embed only"),
    ):
        session.generate_sync("w1 w2", max_tokens=3)


@pytest.mark.skipif(unavailable_reason() is not None, reason="no native kernels")
def test_the_last_bits_of_attention_in_both_directions_are_not_promised(cache_dir: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deterministic.*tokens after a query"):
        rekindle.open_sync(embedders.write(tmp_path, "gemma3"), cache_dir=cache_dir, deterministic=True, **OPTIONS)


@pytest.mark.thorough
def test_without_files_of_sentence_transformers_it_is_the_mean(
    golden: dict[str, NDArray[np.float32]], cache_dir: str, tmp_path: Path
) -> None:
    folder = embedders.write(tmp_path, "modernbert-mean")
    (folder / "modules.json").unlink()
    expected = golden["modernbert-mean/plain"]
    with rekindle.open_sync(folder, cache_dir=cache_dir, **OPTIONS) as session:
        check(session.embed_sync(TEXTS), expected / np.linalg.norm(expected, axis=1, keepdims=True))
        with pytest.raises(InvalidRequest, match="Leave it out, or use a prompt of the checkpoint: none"):
            session.embed_sync("w1", prompt_name="query")


@pytest.mark.thorough
def test_saved_by_transformers_of_today(golden: dict[str, NDArray[np.float32]], cache_dir: str, tmp_path: Path) -> None:
    """With the keys of its own: layer types, a rope for each, the window of both directions."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for name in ("gemma3", "modernbert"):
        folder = embedders.write(tmp_path / name, name)
        made = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        made.save_pretrained(folder)
        assert "layer_types" in json.loads((folder / "config.json").read_text())
        with rekindle.open_sync(folder, cache_dir=cache_dir, **OPTIONS) as session:
            check(session.embed_sync(TEXTS), golden[f"{name}/own"])
