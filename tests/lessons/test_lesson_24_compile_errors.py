"""A program that does not compile is an error of open() that names the program; nothing is left running.

Upstream: https://github.com/triton-inference-server/server/issues/4330
Warm-up failed, and loading was reported as successful.
"""

from __future__ import annotations

from typing import Any

import pytest

import rekindle
from helpers.driving import tiny_model
from helpers.sessions import eventually, threads
from rekindle._src.programs.buckets import Key
from rekindle._src.programs.compiling import ProgramCompiler
from rekindle.errors import CompileError


@pytest.mark.anyio
async def test_lesson_24_compile_errors_surface_at_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def build(self: ProgramCompiler, key: Key) -> Any:
        raise ZeroDivisionError("a defect in the program")

    monkeypatch.setattr(ProgramCompiler, "build", build)
    before = threads()
    with pytest.raises(CompileError, match="a defect in the program"):
        await rekindle.open(
            tiny_model(), precompile="all", max_model_len=64, device_pages=8, page_size=16, cache_dir=str(tmp_path)
        )
    eventually(lambda: threads() <= before)
