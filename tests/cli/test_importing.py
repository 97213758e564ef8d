"""The import of JAX, the first wait of a command, is shown while it lasts."""

from __future__ import annotations

import importlib
import io
import sys
import time
from types import ModuleType

import pytest

from rekindle._src.cli import main
from rekindle._src.cli.commands import generate
from rekindle._src.core import activity


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_says_what_a_command_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()

    def slow_import(name: str) -> ModuleType:
        if name == generate.__name__:
            return generate
        until = time.monotonic() + 60.0
        while "importing JAX" not in screen.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        assert name in generate.NEEDS
        return ModuleType(name)

    monkeypatch.setattr(generate, "run", lambda arguments: 0)
    monkeypatch.setattr(
        importlib, "import_module", lambda name: generate if name == generate.__name__ else slow_import(name)
    )
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(activity, "PATIENCE", 0.0)
    assert main.main(["generate", "Once "]) == 0
    shown = screen.getvalue()
    assert "importing JAX" in shown
    assert shown.endswith("\r\x1b[K"), "the line is left on the screen"
