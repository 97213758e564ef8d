"""`rekindle doctor` passes on a sound machine and names the fix for a broken cache directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rekindle._src.cli import doctor
from rekindle._src.cli.main import main
from rekindle_kernels import unavailable_reason
from rekindle_kernels.native import library


def test_a_broken_cache_directory_fails_with_the_fix(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    checks = {check.title: check for check in doctor._cache(blocked / "cache")}
    assert checks["cache directory"].status == "fail"
    assert "REKINDLE_CACHE" in checks["cache directory"].fix


def test_contents_of_the_cache_directory_are_shown(tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "blob").write_bytes(bytes(3 << 20))
    (check, *_) = doctor._cache(tmp_path)
    assert check.status == "pass"
    assert "programs 3.0 MiB" in check.detail


def test_a_check_that_raises_is_a_failed_check() -> None:
    def look():  # type: ignore[no-untyped-def]
        raise RuntimeError("no device")
        yield

    (check,) = doctor._guarded(look)
    assert check.status == "fail"
    assert "no device" in check.detail


def test_the_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "READ_BYTES", 4 << 20)
    status = main(["doctor", "--json", "--cache-dir", str(tmp_path)])
    checks = json.loads(capsys.readouterr().out)
    failed = [check for check in checks if check["status"] == "fail"]
    assert not failed, failed
    assert status == 0
    details = {check["title"]: check["detail"] for check in checks}
    assert {"jax", "devices", "compile", "generate", "cache directory", "shared by sessions"} <= {*details}
    assert re.fullmatch(r"\d+ GB/s; .* \d+% of it in 16 bits, \d+% .* in 8 bits, \d+% .* in 4 bits", details["reading"])
    if unavailable_reason("cpu") is None and library.find() is not None:
        assert re.search(
            r"prefetching .*\(16 bits.*: (none|\d+ KiB ahead into cache level [12])[;)]", details["native kernels"]
        )


def test_kernels_that_a_variable_turns_off_have_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_NATIVE", "0")
    (check,) = doctor._native()
    assert (check.status, check.fix) == ("warn", "unset it")


@pytest.mark.thorough
def test_the_whole_report_with_a_broken_cache_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "READ_BYTES", 4 << 20)
    (tmp_path / "file").write_text("in the way")
    assert main(["doctor", "--cache-dir", str(tmp_path / "file")]) == 1
    assert "fix: " in capsys.readouterr().out
