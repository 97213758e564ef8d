"""`rekindle warm` fills a store that the next one only reads, and refuses to compile for a device that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from rekindle._src.bench.shapes import write_checkpoint
from rekindle._src.cli.main import main
from rekindle_kernels import has_mask_gates


@pytest.mark.thorough
def test_what_it_has_compiled_is_loaded_the_second_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint("micro", tmp_path / "micro")
    kind = jax.local_devices()[0].device_kind
    command = ["warm", str(folder), "--max-requests", "1", "--cache-dir", str(tmp_path / "cache"), "--json"]
    for origin in ("compiled", "loaded"):
        assert main([*command, "--device-kind", kind.upper()]) == 0
        programs = json.loads(capsys.readouterr().out)
        assert {program["origin"] for program in programs} == {origin}
        assert {"memory", "admit", "gather", "scatter"} < {program["name"] for program in programs}
    assert main(["cache", "ls", "--cache-dir", str(tmp_path / "cache")]) == 0
    _, of_the_model, *_ = capsys.readouterr().out.splitlines()
    assert of_the_model.split()[0] == "micro" and "programs" in of_the_model


@pytest.mark.slow
def test_the_programs_of_structured_output_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint("micro", tmp_path / "micro")
    command = ["warm", str(folder), "--max-requests", "1", "--cache-dir", str(tmp_path / "cache"), "--json"]
    assert main([*command, "--structured"]) == 0
    guided = {"r2t32+gated"} if has_mask_gates() else {"r2t32+forward", "r2t32+choice"}
    assert guided < {program["name"] for program in json.loads(capsys.readouterr().out)}


def test_another_kind_of_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "tiny", "--device-kind", "TPU v5 lite"]) == 1
    said = capsys.readouterr().err
    assert "--device-kind" in said and "'TPU v5 lite'" in said and repr(jax.local_devices()[0].device_kind) in said
