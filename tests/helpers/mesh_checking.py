"""What checks of sessions on a mesh have in common: a session with and without one, and how far they differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rekindle
from helpers.mesh_models import OPTIONS, case, difference, generated
from rekindle._src.session.session import Session

CLOSE = 1e-5
EXPERTS = {"expert": 2, "model": 1}
DATA, BOTH = {"data": 2}, {"data": 2, "model": 2}
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 10, "logprobs": 3},
    {"max_tokens": 10, "logprobs": 3, "temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9},
]
CHECKS: dict[str, Callable[[Path], None]] = {}  # by name


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


def compare(name: str, *meshes: Any, kv_heads: int = 4, close: float = CLOSE, **options: Any) -> None:
    model = case(name, kv_heads)
    expected = generated(model, None, **options)
    for mesh in meshes:
        found = difference(expected, generated(model, mesh, **options))
        print(f"{name} with {kv_heads} kv heads on {mesh} {options or ''}: {found:.1e}", flush=True)
        assert found < close, (name, mesh, found)


def opened(model: Any, mesh: Any, **options: Any) -> Session:
    return rekindle.open_sync(model, mesh=mesh, **OPTIONS | options)


def several(count: int) -> list[list[int]]:
    """Prompts of different lengths."""
    rng = np.random.default_rng(1)
    return [rng.integers(3, 150, int(rng.integers(2, 20))).tolist() for _ in range(count)]
