"""The programs of guided steps: made ahead on demand, loaded by the next session, nothing compiled while serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle_kernels import has_mask_gates

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
OPTIONS: dict[str, Any] = {
    "max_requests": 2, "max_tokens_per_step": 32, "max_model_len": 128, "disk_memory": 0, "host_memory": 0,
    "precompile": "all", "quiet": True, "seed": 0,
}  # fmt: skip


def load(session: rekindle.Session) -> list[str]:
    many = session.generate_sync(
        ["One day", "Tom and Anna"] * 3, temperature=1.0, seed=4, max_tokens=20, regex="[a-z ]{5,30}\\."
    )
    session.generate_sync("One day", max_tokens=10)
    return [done.text for done in many]


@pytest.mark.thorough
def test_a_second_session_loads_them_and_compiles_nothing(tmp_path: Path) -> None:
    cache = str(tmp_path)
    guided = (
        {"r2t0+gated", "r2t32+gated"}
        if has_mask_gates()
        else {"r2t0+forward", "r2t0+choice", "r2t32+forward", "r2t32+choice"}
    )
    with rekindle.open_sync("tiny", structured=True, cache_dir=cache, **OPTIONS) as session:
        assert {record.name for record in session.programs()} >= guided
        before = session.stats().compilations
        texts = load(session)
        assert session.stats().compilations == before
    # Without the option, what is there is loaded all the same.
    with rekindle.open_sync("tiny", cache_dir=cache, **OPTIONS) as session:
        before = session.stats()
        assert before.compilations == 0 and before.traces == 0
        assert load(session) == texts
        after = session.stats()
        assert after.compilations == 0 and after.traces == 0
        assert guided <= {record.name for record in session.programs() if record.origin == "loaded"}
