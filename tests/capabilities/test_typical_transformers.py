"""Typical sampling keeps the tokens that transformers' warper keeps."""

from __future__ import annotations

import numpy as np
import pytest

from capabilities.test_sampler_chain import VOCAB, made, on_device


@pytest.mark.parametrize("mass", [0.2, 0.6, 0.9])
def test_typical_keeps_the_tokens_of_transformers(mass: float) -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = (np.random.default_rng(3).standard_normal((8, VOCAB)) * 2).astype(np.float32)
    theirs = processors.TypicalLogitsWarper(mass=mass)(None, torch.from_numpy(logits)).numpy()
    ours = on_device(logits, [made({"typical_p": mass})] * 8)
    assert ((ours > -np.inf) == (theirs > -np.inf)).all()
