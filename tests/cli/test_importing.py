"""The import of JAX, the first wait of a command, is shown while it lasts."""

from __future__ import annotations

import importlib
import io
import sys
import time
from types import SimpleNamespace

import pytest

from rekindle._src.cli import main
from rekindle._src.core import activity


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_says_what_a_command_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()

    def slow_import(name: str) -> SimpleNamespace:
        until = time.monotonic() + 60.0
        while "importing JAX" not in screen.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        assert name in ("rekindle._src.session.opening", "rekindle._src.cli.commands")
        return SimpleNamespace(generate=lambda arguments: 0)

    monkeypatch.setattr(importlib, "import_module", slow_import)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(activity, "PATIENCE", 0.0)
    assert main.main(["generate", "Once "]) == 0
    shown = screen.getvalue()
    assert "importing JAX" in shown
    assert shown.endswith("\r\x1b[K"), "the line is left on the screen"
