"""Kernels are tested as they are, also where XLA multiplies faster than they do."""

from __future__ import annotations

import pytest

from rekindle_kernels.native import products


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product is left to XLA because this processor has tiles (AMX)."""
    monkeypatch.setattr(products, "_TILES", {})
