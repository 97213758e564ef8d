"""The blueprint of an opening: computing it changes nothing, and a session that opens is as it says."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest

import rekindle
from helpers.driving import tiny_model
from helpers.sessions import engine_of
from helpers.small import MODEL, OPTIONS, opening
from rekindle import EngineConfig, Steer, Tap, tiny
from rekindle._src.cli import usage
from rekindle._src.cli.main import main, parser
from rekindle._src.opening.blueprint import Blueprint, blueprint
from rekindle._src.opening.open_request import OpenRequest
from rekindle._src.opening.source import source_of
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.store import config_fields


def plan(
    model: Any = MODEL,
    *,
    taps: tuple[Tap, ...] = (),
    steering: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Blueprint:
    request = OpenRequest(model, EngineConfig(**OPTIONS | options), additions={"taps": taps, "steering": steering})
    return blueprint(request, source_of(request))


def test_no_file_no_thread_no_array(tmp_path: Path) -> None:
    cache, threads, arrays = tmp_path / "cache", set(threading.enumerate()), len(jax.live_arrays())
    facts = plan("tiny", dtype="bfloat16", cache_dir=str(cache), disk_memory=1 << 20).facts()
    assert not cache.exists() and set(threading.enumerate()) <= threads
    assert len(jax.live_arrays()) <= arrays
    assert json.loads(json.dumps(facts)) == facts, "it is all values"


def test_it_is_computed_from_values_alone(tmp_path: Path) -> None:
    """Once the headers of both models are read, neither checkpoint is needed."""
    both = {name: str(shutil.copytree(tiny.folder(), tmp_path / name)) for name in ("model", "small")}
    options = EngineConfig(**OPTIONS, drafts=both["small"], cache_dir=str(tmp_path / "cache"))
    request = OpenRequest(both["model"], options)
    source = source_of(request)
    for folder in both.values():
        shutil.rmtree(folder)
    plan = blueprint(request, source)
    assert plan.drafts.fingerprint is not None and plan.facts()["drafter"] == plan.drafts.fingerprint


def test_equal_openings_have_equal_blueprints() -> None:
    assert plan() == plan() and hash(plan()) == hash(plan())
    for change in ({"max_requests": 2}, {"device_pages": 41}, {"kv_dtype": "int8"}, {"host_memory": 1 << 20}):
        assert plan(**change) != plan(), change
    assert plan(tiny_model(seed=6)) != plan()
    vectors = (np.full(MODEL.config.hidden_size, size) for size in (1.0, 2.0))
    one, two = (plan(steering={"joy": (Steer(0, vector),)}) for vector in vectors)
    assert one != two, "changes of one name have other vectors"


def test_programs_of_equal_plans_have_one_key() -> None:
    """Options that programs do not depend on, such as host memory, leave the key as it is; all others change it."""
    assert plan(host_memory=1 << 20, seed=3).programs.key == plan().programs.key
    for change in ({"max_requests": 2}, {"max_adapters": 2}, {"kernels": "xla"}):
        assert plan(**change).programs.key != plan().programs.key, change
    assert plan(taps=(Tap(lambda x, context: x, "mine"),)).programs.key != plan().programs.key


def test_as_many_pages_as_all_processes_have_room_for() -> None:
    """The blueprint of fewer pages is that of a session that was opened with as many."""
    fewer, asked = plan(device_pages=40).with_pages(24), plan(device_pages=24)
    assert fewer == asked and fewer.caches[0].slots == 24


@pytest.mark.anyio
async def test_a_session_is_what_its_blueprint_says() -> None:
    expected = plan(precompile="lazy")
    async with opening(precompile="lazy") as session:
        runner: Any = engine_of(session).runner
        assert session.config == expected.config
        assert runner.programs.packing.pages == expected.caches[0].slots
        assert runner.page_bytes >= expected.caches[0].slots * expected.caches[0].slot_bytes
        assert {*Programs.open(expected.programs).ledger.entries} == {*runner.programs.ledger.entries}


def test_every_option_in_a_programs_key_can_be_warmed() -> None:
    """A server with `--kv-dtype` would find nothing that `rekindle warm` has made, if that took no such option."""
    warm = parser()._subparsers._group_actions[0].choices["warm"]  # type: ignore[union-attr]
    offered = {action.dest for action in warm.declared()._actions}
    assert {*config_fields(EngineConfig())} <= offered
    arguments = parser().parse_args(["warm", "tiny", "--kv-dtype", "int8", "--device-pages", "24", "--page-size", "16"])
    options = usage.engine_options(arguments)
    assert {name: options[name] for name in ("kv_dtype", "device_pages", "page_size")} == {
        "kv_dtype": "int8", "device_pages": 24, "page_size": 16,
    }  # fmt: skip


@pytest.mark.thorough
def test_what_was_warmed_for_a_servers_options_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"max_requests": 1, "max_tokens_per_step": 32, "max_model_len": 64, "device_pages": 24, "kv_dtype": "int8"}
    flags = [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["warm", "tiny", *flags, "--cache-dir", str(tmp_path)]) == 0
    capsys.readouterr()
    with rekindle.open_sync("tiny", **sizes, cache_dir=str(tmp_path), precompile="all", quiet=True) as session:
        assert {record.origin for record in session.programs().programs} == {"loaded"}


def test_doctor_tells_what_an_opening_here_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--plan", "tiny", "--device", "here", "--cache-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "weights" in printed and "pages" in printed and "rekindle warm tiny" in printed
    assert not list(tmp_path.iterdir()), "it only looks"


def test_doctor_plans_a_shape_for_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle._src.core.memory.available", lambda: 20 << 30)
    monkeypatch.setattr("rekindle._src.cli.doctor.available", lambda: 20 << 30)
    command = ["doctor", "--device", "here", "--cache-dir", str(tmp_path), "--plan"]
    assert main([*command, "8b"]) == 0
    printed = capsys.readouterr().out
    assert "pass  weights: 16.06 GB of the shape 8b, held as bfloat16" in printed and "pass  pages: " in printed
    assert "pass  programs: " in printed and "rekindle warm" not in printed, "it has no weights to open"
    assert "memory" in printed and "available" not in printed
    assert main([*command, "70b"]) == 0
    assert "warn  memory: the weights need 131.4 GiB, and 20.0 GiB are available" in capsys.readouterr().out
    assert main([*command, "8b", "--quantize", "int4"]) == 0
    assert "held as 4 bits" in capsys.readouterr().out


def test_doctor_names_a_plan_that_cannot_be_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    assert main(["doctor", "--plan", missing, "--device", "here"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"fail  {missing}: ") and "does not exist. Pass a checkpoint's folder" in printed
    assert main(["doctor", "--plan", "8b", "--device", "here", "--mesh", "64"]) == 1
    printed += capsys.readouterr().out
    assert "fail  8b: mesh=" in printed and "asks for 64 devices" in printed
    assert "lambda" not in printed and "Reinstall" not in printed


def test_doctor_says_the_kind_of_a_files_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """For a 4-bit file it names the kinds of its weights, not the dtype of the computation."""
    file = tmp_path / "tiny.gguf"
    assert main(["export", "tiny", str(file), "--type", "q4_0"]) == 0
    command = ["doctor", "--plan", str(file), "--device", "here", "--cache-dir", str(tmp_path / "cache")]
    assert main(command) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("pass  weights: "))
    assert f"{file} (Q4_0), held as " in line and "4 bits " in line
