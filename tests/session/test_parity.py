"""`rekindle.models.parity`: how far a session is from a trainer's module, and in which part that begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rekindle
from helpers import checkpoints
from helpers.driving import plain_logits
from helpers.small import CONTEXT, MODEL, OPTIONS, prompt
from rekindle import Session
from rekindle.errors import InvalidRequest
from rekindle.models import merge, parity
from workshop import reference

pytestmark = pytest.mark.usefixtures("large_steps")
TEXTS = [prompt(1, 40), prompt(2, 7), prompt(3, 40)]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync(MODEL, **OPTIONS | {"precompile": "lazy"}) as made:
        yield made


def test_the_same_weights_agree_in_every_part(session: Session) -> None:
    report = parity(session, merge(MODEL.graph, MODEL.leaves), TEXTS)
    assert report.tokens == sum(len(ids) - 1 for ids in TEXTS)
    assert report.largest < 1e-5 and report.first == "" and "all parts of the model agree" in str(report)
    assert [name for name, _ in report.stages] == ["embed", "layers.0", "layers.1", "norm", "head"]
    logits, _ = plain_logits(MODEL, TEXTS[1], reference.empty_cache(MODEL, CONTEXT))
    expected = np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))
    for one in report.worst:
        if one.text == 1:
            assert one.trainer == pytest.approx(expected[one.position - 1, one.token_id], abs=1e-4)
    assert "differ by" in report._repr_html_() and "\n" not in repr(report)


def test_other_weights_are_named_by_their_layer(session: Session) -> None:
    module = merge(MODEL.graph, MODEL.leaves)
    state = nnx.state(module)
    flat = dict(zip(MODEL.graph.paths, MODEL.leaves, strict=True))
    path = next(path for path in flat if path.startswith("layers.1."))
    changed = tuple(jnp.asarray(leaf) * (1.1 if name == path else 1.0) for name, leaf in flat.items())
    nnx.update(module, nnx.state(merge(MODEL.graph, changed)))
    report = parity(session, module, TEXTS)
    nnx.update(module, state)
    assert report.first == "layers.1" and report.largest > 1e-3
    assert abs(report.worst[0].difference) == pytest.approx(report.largest)
    assert np.abs(np.concatenate(report.differences)).mean() == pytest.approx(report.mean)
    with pytest.raises(InvalidRequest, match="two tokens"):
        parity(session, MODEL, [[1]])
    with pytest.raises(InvalidRequest, match="empty"):
        parity(session, MODEL, [])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "mistral-window", "qwen3-moe"])
def test_families_agree(family: str, tmp_path: Path) -> None:
    model = checkpoints.case(family)
    options = OPTIONS | {"precompile": "lazy", "cache_dir": str(tmp_path)}
    with rekindle.open_sync(model, **options) as session:
        texts = [[token % model.config.vocab_size for token in ids] for ids in TEXTS]
        report = parity(session, model, texts)
        assert report.first == "" and report.largest < 1e-4, str(report)
