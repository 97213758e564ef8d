"""A session of a few seconds: the next one finds its pages, and neither of them compiles a program to move them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from helpers.sessions import writer_of
from helpers.thorough import by_default
from rekindle._src.kvcache import writer

PROMPT = np.random.default_rng(7).integers(3, 160, 71).tolist()  # its last seven tokens are computed again
KINDS = {"llama": "pages", "lfm2": "states", "gemma3": "windows"}  # models by what their layers keep
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 2, "max_tokens_per_step": 128, "max_model_len": 256, "page_size": 8,
    "precompile": "lazy", "quiet": True,
}  # fmt: skip


def model(name: str) -> Any:
    raw = {**checkpoints.CASES[name], "max_position_embeddings": 256}
    raw |= {"sliding_window": 24} if KINDS[name] == "windows" else {}
    return checkpoints.model(raw, checkpoints.tensors(raw))


@pytest.mark.parametrize("name", by_default([*KINDS], 1))
@pytest.mark.parametrize("in_notebook", [False, True])
def test_the_second_of_two_short_sessions_finds_the_pages_of_the_first(
    name: str, in_notebook: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle._src.opening.cache.in_notebook", lambda: in_notebook)
    monkeypatch.setattr("rekindle._src.opening.cache.LOOK_SECONDS", 600.0)
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 600.0)
    monkeypatch.setattr(writer.CacheWriter, "tick", lambda self: None)  # nothing is saved before the session closes
    loaded = model(name)
    texts = []
    for cached, restore in (0, None), (64, None if in_notebook else "auto"):
        with rekindle.open_sync(loaded, cache_dir=tmp_path, restore=restore, **OPTIONS) as session:
            tiers: Any = writer_of(session).tiers
            tiers.costs.mode = "always"
            done = session.generate_sync(PROMPT, max_tokens=6, ignore_eos=True)
            assert done.usage.cached_tokens == cached
            made = {program.name: program.origin for program in session.programs()}
            texts.append(done.token_ids)
            session.check_integrity()
    assert texts == [tuple(plain_loop(loaded, PROMPT, 6, context=256))] * 2
    assert {*made.values()} == {"loaded"}, "a larger program that is stored takes the rest of the prompt"
    assert not [program for program in made if program.startswith(("scatter", "gather", "states_", "windows_"))]
