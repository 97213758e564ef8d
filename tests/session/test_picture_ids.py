"""Pictures with prompts of token ids: one placeholder of the model's own for each, or all of its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import picture_models as small
from helpers.seeing import ZeroEncoder
from helpers.sessions import front_of
from helpers.thorough import by_default, one_event_loop  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.capabilities.pictures.owner import KeptRows, SessionPictures
from rekindle._src.capabilities.pictures.request import PICTURES
from rekindle._src.images import processor_of_files
from rekindle._src.images.processor import PictureProcessor, text_of
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("large_steps")
anyio_test = pytest.mark.anyio
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 512, "max_model_len": 768, "page_size": 16,
    "device_pages": 200, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
ONE, TWO = small.picture(1, 96, 64), small.picture(2, 64, 64)


@pytest.fixture(scope="module", params=by_default(["gemma3", "qwen3-vl", "qwen3.5"]))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.written(family, tmp_path_factory.mktemp(family))


@pytest.fixture
async def session(folder: Path, tmp_path: Path) -> AsyncIterator[Session]:
    async with rekindle.open(folder, **OPTIONS, cache_dir=str(tmp_path)) as opened:
        yield opened


@anyio_test
async def test_ids_give_the_tokens_of_a_text(session: Session, family: str) -> None:
    """As a tokenizer makes them of the chat template, with one placeholder, and as a processor of transformers does."""
    encode, place = session.tokenizer.encode, small.CASES[family].place
    text = await session.generate("of <image>? and <image>", images=[ONE, TWO], **GREEDY)
    short = [*encode("of "), *encode(place), *encode("? and "), *encode(place)]
    whole = list(text.prompt_token_ids)
    assert len(short) < len(whole)
    for ids in (short, whole, np.array(short), np.array(whole, np.int64)):
        done = await session.generate(ids, images=[ONE, TWO], **GREEDY)
        assert (done.prompt_token_ids, done.token_ids) == (text.prompt_token_ids, text.token_ids)
        assert len(done.images) == 2 and (done.usage.cached_tokens > 0 or family == "qwen3.5")
        assert session.cache.explain(ids, images=[ONE, TWO]).prompt_tokens == len(whole)
    shapes = [(one.shape[1], one.shape[0]) for one in (ONE, TWO)]
    costs = [session.picture_cost(*shape) for shape in shapes]
    figures = session.stats().pictures
    assert figures is not None and figures.picture_row_bytes == sum(cost.bytes for cost in costs)
    assert len(whole) - len(short) + 2 >= sum(cost.tokens for cost in costs) > 2
    one = [*encode(place), *encode("what?")]
    many = await session.generate([one, encode("of nothing")], images=[ONE, None], **GREEDY)
    assert many[0].token_ids == (await session.generate("what?", images=ONE, **GREEDY)).token_ids
    (streamed,) = [one async for one in session.stream(one, images=ONE, **GREEDY) if one.finish_reason]
    assert streamed.finish_reason is not None
    more = await session.generate([*many[0].prompt_token_ids, *many[0].token_ids], images=many[0].images, **GREEDY)
    forked = await session.fork(many[0], at=len(many[0].token_ids), **GREEDY)
    assert more.token_ids == forked.token_ids, "a completion's ids have them all"


@pytest.mark.parametrize("name", small.CASES)
def test_every_family_has_the_ids_of_its_text(name: str, tmp_path: Path) -> None:
    """Rows, tiles and the tokens around them, in the place of a placeholder."""
    case = small.CASES[name]
    small.write_texts(tmp_path, case)
    tokenizer = Tokenizer.load(tmp_path)
    processor = processor_of_files(case.preprocessor, case.processor, case.config)
    pictures = SessionPictures(
        processor,
        ZeroEncoder(),
        KeptRows(1 << 20, None),
        identity=b"",
        token=case.id_of(case.token),
        tokenizer=tokenizer,
    )  # type: ignore[arg-type]
    read = pictures.read([ONE, TWO])
    texts = ["of ", "? and ", "."]
    short = [id for text in texts for id in (*tokenizer.encode(text), *tokenizer.encode(case.place))]
    short = short[: -len(tokenizer.encode(case.place))]
    filled = pictures.filled(np.array(short, np.int32), read)
    text = text_of((texts[0], *_shown(processor, case, read[0]), texts[1], *_shown(processor, case, read[1]), texts[2]))
    assert filled.tolist() == tokenizer.encode(text)
    assert pictures.filled(filled, read) is filled
    assert (filled == case.id_of(case.token)).sum() == sum(map(sum, map(pictures.counts, read)))
    pictures.close()


def _shown(processor: PictureProcessor, case: small.PictureModel, picture: Any) -> tuple[Any, ...]:
    before, after = case.place.split(processor.marker)
    return before, *processor.expansion(picture.plan), after


@anyio_test
@pytest.mark.thorough
async def test_scores_and_embeddings_take_ids_too(session: Session, family: str) -> None:
    encode, place = session.tokenizer.encode, small.CASES[family].place
    ids = [*encode(place), *encode("is ")]
    choices = [encode("a"), encode("bc")]
    text, own = [await session.score(prompt, choices, images=ONE) for prompt in ("<image>is ", ids)]
    assert [one.logprob for one in own] == pytest.approx([one.logprob for one in text], abs=1e-5)
    vectors = [await session.embed(prompt, images=ONE) for prompt in ("<image>is ", ids)]
    np.testing.assert_allclose(*vectors, atol=1e-5)


@anyio_test
async def test_another_number_of_places_names_the_placeholder(session: Session, family: str) -> None:
    case, encode = small.CASES[family], session.tokenizer.encode
    rows = small.CASES[family].token
    whole = (await session.generate("<image>a", images=ONE, **GREEDY)).prompt_token_ids
    marker = PICTURES.of(front_of(session))._processor.marker
    count = whole.count(case.id_of(rows))
    fix = rf"Write {marker} once for each picture, or {rows} {count} times in all".replace("|", r"\|")
    without_one = list(whole)
    without_one.remove(case.id_of(rows))
    for ids in (encode("a"), [*encode(case.place) * 2, 5], without_one):
        with pytest.raises(InvalidRequest, match=rf"images='1 picture': do not fit the token ids.*{fix}"):
            await session.generate(ids, images=ONE, **GREEDY)
    with pytest.raises(InvalidRequest, match=r"images\[1\]='1 picture': do not fit"):
        await session.generate([encode("a"), encode("b")], images=[None, ONE], **GREEDY)
    with pytest.raises(InvalidRequest, match=r"images=None: has no pictures, and the prompt has"):
        await session.generate(list(whole), **GREEDY)
    assert (await session.generate(encode("a"), images=[], **GREEDY)).token_ids
    session.check_integrity()
