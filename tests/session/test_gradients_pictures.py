"""Gradients of prompts with pictures against PyTorch's on the same weights, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import picture_models as small
from helpers.tapping import relative
from helpers.thorough import by_default
from rekindle.errors import InvalidRequest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL.Image")

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 96, "max_model_len": 512, "page_size": 16,
    "device_pages": 120, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
FIRST, SECOND = 97, 98


def of_torch(name: str, model: Any, ids: list[int], pictures: list[Any]) -> tuple[float, Any]:
    """The difference of two logits, and its gradient at the input of the first layer, which has a picture's rows."""
    out = model(**small.inputs_of(name, ids, pictures), output_hidden_states=True)
    start = out.hidden_states[0]
    start.retain_grad()
    value = out.logits[0, -1, FIRST] - out.logits[0, -1, SECOND]
    value.backward()
    return float(value), start.grad[0].numpy()


@pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
@pytest.mark.parametrize("name", by_default([*small.CASES], lambda name: name in ("qwen3-vl", "gemma3")))
def test_gradients_of_pictures_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """Where ropes have coordinates, where layers add more rows, and where a picture's tokens see each other."""
    theirs = small.made(name, tmp_path / "model")
    pixels = [small.picture(1, 128, 96)]
    of = rekindle.logit_difference(FIRST, SECOND)
    with rekindle.open_sync(tmp_path / "model", **OPTIONS, cache_dir=str(tmp_path / "cache")) as session:
        g = session.gradients("What is <image>?", images=pixels, of=of, at={"residual_before": [0]}).result_sync()
        text = session.gradients(list(g.token_ids[:4]), of=of, at={"residual_before": [0]}).result_sync()
        with pytest.raises(InvalidRequest, match="are for one prompt"):
            session.gradients(["<image>"], images=[pixels], of=of, at={"norm": True}).result_sync()
        with pytest.raises(InvalidRequest, match="are not read by attribute"):
            session.attribute("<image>", images=pixels, of=of).result_sync()  # type: ignore[call-arg]
    value, expected = of_torch(name, theirs, list(g.token_ids), pixels)
    assert abs(g.value - value) < 1e-3 * max(1.0, abs(value)) and abs(text.value - g.value) > 1e-3
    assert relative(g["residual_before", 0], expected) < 1e-3
    assert np.abs(expected).max() > 0
