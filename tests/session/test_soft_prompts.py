"""Rows of numbers in the place of embeddings: computed as transformers does, cached by content, wherever they stand."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers import adapters, checkpoints
from helpers.counting import counts
from helpers.small import TINY
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from rekindle import Session, SoftPrompt, tiny
from rekindle.errors import InvalidRequest, PromptTooLong
from rekindle.models import load

pytestmark = pytest.mark.usefixtures("large_steps")
anyio_test = pytest.mark.anyio
GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0.0, "ignore_eos": True}
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 128, "page_size": 16,
    "device_pages": 40, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
TEXT = "Once upon a time there was a little dog who lived in a big house with"


def rows(seed: int, count: int, width: int, scale: float = 1.0) -> Any:
    return (scale * np.random.default_rng(seed).standard_normal((count, width))).astype(np.float32)


@pytest.mark.parametrize("name", by_default(["llama", "gemma3", "qwen3", "gemma2", "gpt2", "lfm2"], 2))
def test_it_computes_as_transformers(name: str, tmp_path: Path) -> None:
    """Greedy tokens, and their log-probabilities to 1e-4. Rows are on transformers' side of the embedding's scale."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    raw = checkpoints.CASES[name]
    folder = checkpoints.write(tmp_path / name, raw)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width, ids = model.config.hidden_size, np.random.default_rng(2).integers(3, 160, 30).tolist()
    table = model.get_input_embeddings()
    with torch.no_grad():
        scale = float(table(torch.tensor(ids)).std())
        first, second = rows(3, 21, width, scale), rows(4, 5, width, scale)
        parts = [torch.tensor(first), table(torch.tensor(ids)), torch.tensor(second), table(torch.tensor(ids[:4]))]
        inputs = torch.cat(parts)[None]
        greedy: Any = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        expected = model.generate(inputs_embeds=inputs, **greedy)[0].tolist()
        whole = torch.cat([inputs, table(torch.tensor([expected[:-1]]))], dim=1)
        logits = model(inputs_embeds=whole).logits[0, inputs.shape[1] - 1 :].log_softmax(-1)
    prompt = SoftPrompt([first, ids, second, np.array(ids[:4])])
    with rekindle.open_sync(folder, **OPTIONS, cache_dir=None) as session:
        done = session.generate(prompt, **GREEDY, logprobs=0).result_sync()
        assert list(done.token_ids) == expected and len(done.prompt_token_ids) == 60
        assert done.logprobs is not None
        found = [entry.logprob for entry in done.logprobs]
        np.testing.assert_allclose(found, [logits[at, token] for at, token in enumerate(expected)], atol=1e-4)
        plain = session.generate([0] * 60, **GREEDY).result_sync()
        assert plain.usage.cached_tokens == 0, "the pages of rows are not those of their placeholders"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync("tiny", **TINY) as opened:
        yield opened


@pytest.fixture(scope="module")
def own(session: Session) -> Any:
    """The embeddings of TEXT's tokens, as the first layer reads them."""
    done = session.generate(TEXT, max_tokens=1, capture={"residual_before": [0]}).result_sync()
    assert done.captured is not None
    return np.asarray(done.captured["residual_before", 0])[: len(done.prompt_token_ids)]


@anyio_test
async def test_embeddings_of_a_text_are_the_text(session: Session, own: Any) -> None:
    plain = await session.generate(TEXT, **GREEDY)
    ids = plain.prompt_token_ids
    for parts in ([own], [own[:5], list(ids[5:])], [list(ids[:7]), own[7:9], list(ids[9:])], [TEXT[:4], own[1:]]):
        if isinstance(parts[0], str) and session.tokenizer.encode(parts[0]) != list(ids[:1]):
            continue
        done = await session.generate(SoftPrompt(parts), **GREEDY)
        assert done.token_ids == plain.token_ids and len(done.prompt_token_ids) == len(ids)
    streamed = [delta async for delta in session.stream(SoftPrompt([own]), **GREEDY)]
    assert tuple(token for delta in streamed for token in delta.token_ids) == plain.token_ids


@anyio_test
async def test_a_last_row_that_is_computed_alone_is_a_row(session: Session, own: Any) -> None:
    """After a hit of all other tokens, and after a step that was full one token before the end."""
    ids = list((await session.generate(TEXT, max_tokens=1)).prompt_token_ids)
    for parts, text in (([own, own], ids + ids), ([own, own, own[:1]], [*ids, *ids, ids[0]])):  # a step has 32 tokens
        plain = await session.generate(text, **GREEDY)
        first, again = [await session.generate(SoftPrompt(parts), **GREEDY) for _ in range(2)]
        assert first.token_ids == again.token_ids == plain.token_ids
        assert again.usage.cached_tokens >= 31, "one row is left, and a token at the most"
    pieces = [await session.generate(SoftPrompt([own[:16]]), **GREEDY) for _ in range(2)]
    assert pieces[0].token_ids == pieces[1].token_ids


@anyio_test
@pytest.mark.thorough
async def test_penalties_do_not_count_rows(session: Session, own: Any) -> None:
    options: Any = {"max_tokens": 1, "temperature": 1.0, "logprob_token_ids": [0], "logprobs_of": "sampled"}
    plain = await session.generate(SoftPrompt([own]), **options)
    penalised = await session.generate(SoftPrompt([own]), **options, repetition_penalty=9.0)
    repeated = await session.generate(SoftPrompt([own]), **options, dry_multiplier=9.0, dry_allowed_length=0)
    assert plain.logprobs and penalised.logprobs and repeated.logprobs
    of_zero = [one.logprobs[0].of_ids for one in (plain, penalised, repeated) if one.logprobs]
    np.testing.assert_allclose(of_zero, [of_zero[0]] * 3, rtol=1e-4)
    assert of_zero[0] and np.isfinite(of_zero[0]).all()


@anyio_test
async def test_rows_are_cached_by_their_content(session: Session) -> None:
    width = session.generate(SoftPrompt([rows(1, 40, 1)]), max_tokens=1)
    with pytest.raises(InvalidRequest, match="the model's hidden size is"):
        await width
    size = int(_hidden(session))
    prompt = SoftPrompt([rows(7, 70, size), "and then"])
    first = await session.generate(prompt, **GREEDY)
    assert first.usage.cached_tokens == 0
    again = await session.generate(SoftPrompt([rows(7, 70, size), "and then"]), **GREEDY)
    assert again.token_ids == first.token_ids and again.usage.cached_tokens >= 64
    changed = rows(7, 70, size)
    changed[69, -1] += 1e-3  # one number of the last row
    other = await session.generate(SoftPrompt([changed, "and then"]), **GREEDY)
    assert other.usage.cached_tokens < 70 and other.usage.cached_tokens == 0, "a run of rows is one source"
    salted = await session.generate(prompt, **GREEDY, salt="another")
    assert salted.usage.cached_tokens == 0 and salted.token_ids == first.token_ids
    assert "soft prompt with 70 tokens" in str(session.explain(again))


async def _result(call: Any) -> Any:
    return await call()


def _hidden(session: Session) -> int:
    done = session.generate("a", max_tokens=1, capture={"residual_before": [0]}).result_sync()
    assert done.captured is not None
    return int(np.asarray(done.captured["residual_before", 0]).shape[-1])


@anyio_test
async def test_batches_forks_and_neighbours_compile_nothing(session: Session, own: Any) -> None:
    size = own.shape[1]
    prompts = [SoftPrompt([rows(seed, 40 + seed, size), f"number {seed}"]) for seed in range(6)]
    alone = [await session.generate(prompt, **GREEDY) for prompt in prompts]
    before = counts(session)
    outcomes: dict[int, Any] = {}

    async def ask(number: int) -> None:
        outcomes[number] = await session.generate(prompts[number], **GREEDY)

    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(ask, number)
        group.start_soon(session.generate, TEXT)
    assert [outcomes[number].token_ids for number in range(6)] == [one.token_ids for one in alone]
    batch = await session.generate([TEXT, prompts[1], prompts[2]], **GREEDY)
    assert [one.token_ids for one in batch[1:]] == [alone[1].token_ids, alone[2].token_ids]
    handle = session.submit(prompts[3], **GREEDY)
    await handle
    for source in (alone[3], handle):
        forked = await session.fork(source, at=4)
        assert (*alone[3].token_ids[:4], *forked.token_ids) == alone[3].token_ids
        assert forked.usage.cached_tokens > 0
    several = await session.generate(prompts[4], **{**GREEDY, "temperature": 0.8}, n=3, seed=1)
    assert len({one.token_ids for one in several}) > 1
    assert counts(session) == before
    kept = pickle.loads(pickle.dumps(alone[3]))
    again = await session.fork(kept, at=4)
    assert (*kept.token_ids[:4], *again.token_ids) == kept.token_ids


@anyio_test
@pytest.mark.thorough
async def test_rows_outlive_a_restart_and_a_preemption(tmp_path: Path) -> None:
    options = {**TINY, "disk_memory": 1 << 26, "cache_dir": str(tmp_path)}
    async with rekindle.open("tiny", **options) as first:
        size = _hidden(first)
        prompts = [SoftPrompt([rows(seed, 60, size), "once more"]) for seed in range(4)]
        alone = [await first.generate(prompt, **{**GREEDY, "max_tokens": 40}) for prompt in prompts]
    async with rekindle.open("tiny", **options, restore="auto") as second:
        done = await second.generate(prompts[0], **{**GREEDY, "max_tokens": 40})
        assert done.token_ids == alone[0].token_ids and done.usage.cached_tokens > 0
    async with rekindle.open("tiny", **{**TINY, "cache_dir": str(tmp_path), "device_pages": 10}) as small:
        found = await small.generate(prompts, **{**GREEDY, "max_tokens": 40})
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]


@anyio_test
@pytest.mark.parametrize("drafts", ["suffix", "lookup"])
@pytest.mark.thorough
async def test_drafts_change_no_token(session: Session, own: Any, drafts: str) -> None:
    """Texts that repeat themselves are drafted; the places of rows are no tokens to draft from."""
    size = own.shape[1]
    prompts = [SoftPrompt([rows(seed, 30, size), "a b a b a b a b a"]) for seed in range(3)]
    prompts += [SoftPrompt(["Who are you? Who are you?", own, "Who are you? Who"]), SoftPrompt([own, own])]
    options: Any = {**GREEDY, "max_tokens": 40}
    expected = [(await session.generate(prompt, **options)).token_ids for prompt in prompts]
    drawn: Any = {**options, "temperature": 0.9, "seed": 3, "dry_multiplier": 0.5}
    sampled = [(await session.generate(prompt, **drawn)).token_ids for prompt in prompts]
    async with rekindle.open("tiny", **{**TINY, "drafts": drafts}) as drafting:
        for _ in range(2):
            done = await drafting.generate(prompts, **options)
            assert [one.token_ids for one in done] == expected
            done = await drafting.generate(prompts, **drawn)
            assert [one.token_ids for one in done] == sampled
        assert drafting.stats().accepted_tokens > 0


@anyio_test
@pytest.mark.thorough
async def test_adapters_have_rows_and_pages_of_their_own(own: Any, tmp_path: Path) -> None:
    config = load(tiny.folder()).config
    folders = {str(seed): adapters.write(tmp_path / str(seed), config, seed=seed) for seed in (1, 2)}
    async with rekindle.open("tiny", **TINY, adapters=folders, max_adapters=2) as session:
        texts = [(await session.generate(TEXT, **GREEDY, adapter=name)).token_ids for name in ("1", "2", None)]
        assert len({*texts}) == 3, "the adapters change the text"
        prompts = [SoftPrompt([rows(4, 40, own.shape[1]), TEXT]), SoftPrompt([own])]
        alone: dict[Any, Any] = {}
        for at, prompt in enumerate(prompts):
            for name in ("1", "2", None):
                first = await session.generate(prompt, **GREEDY, adapter=name)
                assert first.usage.cached_tokens == 0, "pages of one adapter are not those of another"
                again = await session.generate(prompt, **GREEDY, adapter=name)
                assert again.token_ids == first.token_ids
                assert again.usage.cached_tokens > 0 or len(first.prompt_token_ids) < 32
                alone[at, name] = first.token_ids
        assert [alone[1, name] for name in ("1", "2", None)] == texts
        handles = [session.submit(prompts[at], **GREEDY, adapter=name) for at, name in alone]
        assert [(await handle).token_ids for handle in handles] == [*alone.values()]


@anyio_test
async def test_what_is_wrong_is_refused_by_name(session: Session, own: Any) -> None:
    size = own.shape[1]
    for parts, words in (
        ([], "are no list of 1 to"), ("text", "are no list"), (["text"], "hold no rows"), ([own, 7], r"parts\[1\]"),
        ([own[0]], "no array of floats"), ([own.astype(int)], "no array of floats"), ([own[:0]], "no array of floats"),
        ([own, own[:, :3]], "different hidden sizes"), ([own, [-1]], "not token ids"), ([own, {"a": 1}], r"parts\[1\]"),
        ([own, "x" * 20_001], "are more than 20,000"), ([own + 0j], "no array of floats"),
        ([own, "\ud800"], r"parts\[1\].*surrogate"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=words):
            SoftPrompt(parts)  # type: ignore[arg-type]
    for number in (np.nan, np.inf, 1e300):
        broken = own.astype(np.float64)
        broken[3, 1] = number
        with pytest.raises(InvalidRequest, match="row 3"):
            SoftPrompt([own, broken])
    prompt = SoftPrompt([own])
    mutable = own.copy()
    held = SoftPrompt([mutable])
    mutable[:] = 0
    assert held.digests == prompt.digests, "rows are copied"
    with pytest.raises(PromptTooLong):
        await session.generate(SoftPrompt([rows(1, 300, size)]), max_tokens=1)
    for call in (
        lambda: session.embed(prompt), lambda: session.score(prompt, ["a", "b"]), lambda: session.map([prompt]),
        lambda: session.cache.explain(prompt), lambda: session.rollout([prompt]),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            await _result(call)
    results = await session.generate([TEXT, SoftPrompt([rows(1, 3, size + 1)])], max_tokens=2, errors="return")
    assert isinstance(results[1], InvalidRequest) and results[1].index == 1 and results[0].text is not None
    assert "rows of" in repr(prompt) or "row" in repr(prompt)
    assert (await session.generate(prompt, max_tokens=2)).token_ids, "the session goes on"
