"""The page of examples runs from its first line to its last, and has an example of each public method."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import fleets
from rekindle import tiny
from rekindle._src import replicas
from rekindle._src.replicas.fleet_backend import FleetParts
from rekindle._src.replicas.routing import Role
from rekindle._src.session.views import Views

PAGE = Path(__file__).parents[2] / "tutorials" / "guide" / "api.md"
SERVER = PAGE.parent / "server.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
OF_EXTRAS = {"from mcp.server": "mcp"}  # what a block begins with, and the package that it needs

KINDS = (
    rekindle.Session,
    rekindle.CacheView,
    rekindle.Conversation,
    rekindle.Handle,
    rekindle.Captured,
    rekindle.Completion,
    rekindle.Scores,
    rekindle.ScoreTable,
    rekindle.RowAnswers,
    rekindle.Server,
    rekindle.Fleet,
    rekindle.Shelf,
    rekindle.ShelfModel,
    rekindle.SharedPages,
    rekindle.ToolServerTools,
    Views,
)

NO_EXAMPLE = {
    "attached": "for hosts of sessions",
    "send": "for event loops",
    "throw": "for event loops",
    "wait_for_more": "for views",
    "joined": "for the engine",
    "load": "needs capture_to",
    "reply_reading": "for forks",
    "start": "serve has called it",
    "stop_at_exit": "for the interpreter's end",
    "lease_now": "for servers",
    "wait": "for servers",
    "unload_in_turn": "for servers",
    "answer": "the embedded model calls no functions",
}


def public(kind: type) -> list[str]:
    """The methods of a class that are neither private nor those of dicts, lists and tuples."""
    own = {
        name
        for name in dir(kind)
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(kind, name))
    }
    return sorted(own - set(dir(dict)) - set(dir(list)) - set(dir(tuple)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_public_method_has_an_example(kind: type) -> None:
    called = {node.attr for block in BLOCKS for node in ast.walk(_tree(block)) if isinstance(node, ast.Attribute)}
    missing = [name for name in public(kind) if name not in called and name not in NO_EXAMPLE]
    assert public(kind) and not missing


def _tree(code: str) -> Any:
    return compile(code, "api.md", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_each_sampling_option_has_a_line_in_the_table() -> None:
    named = set(re.findall(r"`(\w+)`", (PAGE.parent / "sampling.md").read_text()))
    missing = [field.name for field in dataclasses.fields(rekindle.Sampling) if field.name not in named]
    assert not missing


def test_the_web_application_of_the_server_page_streams() -> None:
    """Its block of code is run as it stands, with a client that reads what it answers."""
    from starlette.testclient import TestClient

    (block,) = [one for one in re.findall(r"^```py\n(.*?)^```", SERVER.read_text(), re.M | re.S) if "Starlette" in one]
    names: dict[str, Any] = {}
    exec(block, names)
    with TestClient(names["app"]) as client:
        assert client.get("/tell", params={"prompt": "Once upon a time"}).text.startswith(", there was")


def lora() -> dict[str, np.ndarray]:
    """A trainer's arrays: an adapter that changes nothing."""
    weights = dict(zip((model := rekindle.models.load(tiny.folder())).graph.paths, model.leaves, strict=True))
    columns, rows = weights["layers.0.mlp.down.weight"].shape
    name = "layers.0.mlp.down"
    return {f"{name}.lora_a": np.zeros((rows, 4), np.float32), f"{name}.lora_b": np.zeros((4, columns), np.float32)}


def replicas_here(
    model: str,
    options: dict[str, Any],
    roles: Sequence[Role],
    resources: object,
    *,
    shared: str | None,
    most: int | None,
) -> FleetParts:
    """Stand in for Ray: replicas in this process, over real sessions."""
    assert resources is shared is most is None
    return fleets.local_parts(lambda: rekindle.open_sync(model, **options), roles, [])


@pytest.mark.thorough
def test_the_examples_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_ray = types.SimpleNamespace(parts=replicas_here)
    monkeypatch.setitem(sys.modules, "rekindle._src.replicas.on_ray", on_ray)
    monkeypatch.setattr(replicas, "on_ray", on_ray, raising=False)
    names: dict[str, Any] = {"lora": lora()}

    async def page() -> None:
        for block in BLOCKS:
            if any(block.startswith(start) and not find_spec(package) for start, package in OF_EXTRAS.items()):
                continue
            code = compile(block, "api.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if "await " in block or "async " in block:
                pending = eval(code, names)
                if inspect.isawaitable(pending):
                    await pending
            else:  # a script, which has no event loop
                await asyncio.to_thread(exec, code, names)

    asyncio.run(page())
    assert names["session"].closed
