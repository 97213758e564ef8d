"""`rekindle warm` fills a store that the next one only reads, and refuses to compile for a device that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from rekindle._src.bench.shapes import write_checkpoint
from rekindle._src.cli.main import main, parser
from rekindle._src.cli.usage import engine_options, sampling_options
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


def test_it_takes_all_that_a_server_takes_of_a_session() -> None:
    """Some options of `rekindle serve MODEL` were unknown to `rekindle warm MODEL`, and the other way round."""
    options = [
        "--restore", "auto", "--host-memory", "2GB", "--device-memory", "1GiB", "--disk-memory", "0", "--page-size",
        "16", "--kernels", "reference", "--no-prefix-cache", "--step-timeout", "5", "--seed", "3", "--quiet",
        "--structured", "--capture-memory", "1MiB", "--adapter", "one=folder", "--steering", "calm=file",
        "--log-every", "9",
    ]  # fmt: skip
    served, warmed = (parser().parse_args([command, "tiny", *options]) for command in ("serve", "warm"))
    assert engine_options(served) == engine_options(warmed)
    wanted = {
        "restore": "auto", "host_memory": 2_000_000_000, "device_memory": 1 << 30, "disk_memory": 0, "page_size": 16,
        "kernels": "reference", "prefix_cache": False, "step_timeout": 5.0, "seed": 3, "quiet": True,
        "structured": True, "capture_memory": 1 << 20, "log_every": 9,
    }  # fmt: skip
    assert wanted.items() <= engine_options(warmed).items()
    assert (warmed.adapter, warmed.steering) == (["one=folder"], ["calm=file"])


@pytest.mark.parametrize("command", ["serve", "warm"])
def test_a_wrong_size_says_how_to_write_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "tiny", "--host-memory", "2 geese"])
    assert "--host-memory: '2 geese' is not a size. Write 512MiB, 2GB or a number" in capsys.readouterr().err


def test_options_of_a_request_are_no_options_of_a_session() -> None:
    """`--seed` of a prompt is not that of the session, which other commands take."""
    arguments = parser().parse_args(["generate", "x", "--seed", "3"])
    assert sampling_options(arguments)["seed"] == 3 and "seed" not in engine_options(arguments)


@pytest.mark.thorough
def test_programs_of_adapters_and_of_a_session_that_restores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint("micro", tmp_path / "micro")
    command = ["warm", str(folder), "--max-requests", "1", "--cache-dir", str(tmp_path / "cache"), "--json"]
    assert main([*command, "--restore", "auto", "--host-memory", "1GB", "--adapter", f"one={tmp_path}"]) == 0
    assert "r2t32+adapters" in {program["name"] for program in json.loads(capsys.readouterr().out)}
