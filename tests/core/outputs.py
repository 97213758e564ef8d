"""Outputs of a notebook's cell, without a notebook."""

from __future__ import annotations

from typing import Any

import pytest


def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which IPython's display, and each update of an output, append."""
    pytest.importorskip("IPython")
    shown: list[Any] = []

    class Output:
        def update(self, data: Any, *, raw: bool) -> None:
            shown.append(data)

    def display(data: Any, *, raw: bool, display_id: bool) -> Output:
        shown.append(data)
        return Output()

    monkeypatch.setattr("IPython.display.display", display)
    return shown
