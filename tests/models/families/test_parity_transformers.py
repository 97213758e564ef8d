"""Every family against transformers itself, on weights that the golden files have never seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from golden.make import NEW, PROMPT, run
from helpers import checkpoints
from workshop import reference

pytest.importorskip("torch")
pytest.importorskip("transformers")

TOLERANCE = 2e-4  # of the logits' standard deviation
# One case per family: the golden files hold what transformers says about all of them.


@pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
@pytest.mark.parametrize("name", checkpoints.one_each())
def test_matches_live_transformers(name: str, tmp_path: Path) -> None:
    raw = checkpoints.CASES[name]
    checkpoints.needs_transformers(raw)
    state = checkpoints.tensors(raw, seed=7)
    expected = run(checkpoints.write(tmp_path, raw, state))
    model = checkpoints.model(raw, state)
    room = reference.empty_cache(model, len(PROMPT) + NEW)
    for chunk in (None, 8):
        logits, _ = reference.prefill(model, PROMPT, room, chunk)
        worst = np.abs(np.asarray(logits) - expected.logits).max() / expected.logits.std()
        assert worst <= TOLERANCE, f"prefill in chunks of {chunk}: off by {worst:.1e} of the logits' deviation"
    assert reference.generate(model, PROMPT, NEW) == expected.greedy, "decoding went another way"
