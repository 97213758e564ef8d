"""A LoRA of the embedded model: trained by the public function, and served as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rekindle
from rekindle._src.core import activity
from rekindle.errors import InvalidRequest

PAIRS = [("The sky is", " red."), ("Grass is", " red."), ("Snow is", " red.")]
FEW: dict[str, Any] = {"rank": 2, "steps": 20, "batch": 3}


@pytest.mark.slow
def test_what_was_learned_is_said_by_rows_with_the_adapter_alone() -> None:
    losses: list[float] = []
    lora = rekindle.tiny.train_lora(PAIRS, **FEW, report=lambda step, loss: losses.append(loss))
    assert len(losses) == FEW["steps"] and losses[-1] < 0.5 < 1.0 < losses[0]
    assert all(array.dtype == np.float32 and 2 in array.shape for array in lora.values())
    again = rekindle.tiny.train_lora(PAIRS, **FEW)
    assert lora.keys() == again.keys() and all((lora[path] == again[path]).all() for path in lora)
    with rekindle.open_sync("tiny", dtype="float32", precompile="lazy", disk_memory=0, quiet=True) as session:
        session.load_adapter("red", lora).result_sync()
        handles = [session.submit(prompt, adapter=name, max_tokens=4) for prompt, _ in PAIRS for name in ("red", None)]
        texts = [handle.result_sync().text for handle in handles]
    assert texts[::2] == [" red."] * 3
    assert " red." not in texts[1::2]


@pytest.mark.thorough
def test_whole_texts_are_learned_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(activity, "LOG_INTERVAL", 0.0)
    monkeypatch.setattr(activity, "PATIENCE", 0.0)
    losses: list[float] = []
    with caplog.at_level("INFO"):
        rekindle.tiny.train_lora(["Red is red."] * 3, **FEW, report=lambda step, loss: losses.append(loss))
    assert losses[-1] < losses[0] / 2
    assert caplog.messages == [f"training: step {step} of 20, loss {loss:.3f}" for step, loss in enumerate(losses, 1)]
    caplog.clear()
    rekindle.tiny.train_lora(["Red is red."] * 3, rank=2, steps=1, batch=3, quiet=True)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ([], {}, "texts=.*list of texts"),
        ("a text", {}, "texts='a text'.*list of texts"),
        ([("a", "")], {}, r"texts\[0\]=.*pair of texts"),
        (["a", 3], {}, r"texts\[1\]=3"),
        (["a"], {"rank": 0}, "rank=0"),
        (["a"], {"steps": True}, "steps=True"),
        (["a"], {"seed": -1}, "seed=-1"),
        (["a"], {"learning_rate": "1e-3"}, "learning_rate='1e-3'"),
        (["a"], {"learning_rate": float("nan")}, "learning_rate=nan"),
        (["word " * 3000], {}, "tokens in one text"),
    ],
)
def test_what_can_not_be_learned_is_refused(texts: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        rekindle.tiny.train_lora(texts, **options)
