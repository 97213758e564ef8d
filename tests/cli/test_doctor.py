"""`rekindle doctor` passes on a sound machine and names the fix for a broken cache directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle._src.cli import doctor, report
from rekindle._src.cli.doctor import Check
from rekindle._src.cli.main import main
from rekindle_kernels import unavailable_reason
from rekindle_kernels.native import library
from rekindle_kernels.private_files import distrust_reason


def test_a_broken_cache_directory_fails_with_the_fix(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    checks = {check.title: check for check in doctor.cache_checks(blocked / "cache")}
    assert checks["cache directory"].status == "fail"
    assert "REKINDLE_CACHE" in checks["cache directory"].fix


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no modes")
@pytest.mark.parametrize(("which", "bits"), [(".", 0o777), ("cache", 0o770), ("cache", 0o777)])
def test_a_cache_directory_that_sessions_refuse_fails_with_their_fix(tmp_path: Path, which: str, bits: int) -> None:
    """It passed, and no session used it."""
    assert next(doctor.cache_checks(tmp_path / "cache")).status == "pass"
    (tmp_path / which).chmod(bits)
    reason = distrust_reason(tmp_path / "cache" / "programs")
    check = next(doctor.cache_checks(tmp_path / "cache"))
    assert check.status == "fail" and check.detail.endswith("; no session uses it")
    assert reason is not None and f"{check.detail.removesuffix('; no session uses it')}: {check.fix}" == reason
    assert check.fix == "chmod go-w it"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no modes")
def test_a_part_of_the_cache_that_sessions_refuse_is_named(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir(mode=0o700)
    (tmp_path / "pages").chmod(0o770)
    check = next(doctor.cache_checks(tmp_path))
    assert check.status == "fail" and check.detail.endswith("(mode 0770); sessions don't use its pages")


def test_a_cache_directory_that_is_made_is_one_that_sessions_use(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        assert next(doctor.cache_checks(tmp_path / "cache")).status == "pass"
    finally:
        os.umask(mask)


def test_contents_of_the_cache_directory_are_shown(tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "blob").write_bytes(bytes(3 << 20))
    (check, *_) = doctor.cache_checks(tmp_path)
    assert check.status == "pass"
    assert "programs 3.0 MiB" in check.detail


def test_a_check_that_raises_is_a_failed_check() -> None:
    def look():  # type: ignore[no-untyped-def]
        raise RuntimeError("no device")
        yield

    (check,) = doctor.guarded(look)
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


@pytest.mark.parametrize(
    "raw", [{"model_type": "x\x1b[31m", "architectures": ["\x1b]52;c;cHdu\x07"]}, {"model_type": "\x1b[2J"}]
)
def test_a_checkpoint_can_not_steer_the_terminal(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error may repeat what a config.json says: OSC 52 sets the clipboard."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    header = b"{}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "model_type=" in shown and "\x1b" not in shown and "\x07" not in shown


def test_kernels_that_a_variable_turns_off_have_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_NATIVE", "0")
    (check,) = doctor.native_checks()
    assert (check.status, check.fix) == ("warn", "unset it")


@pytest.mark.thorough
def test_the_whole_report_with_a_broken_cache_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "READ_BYTES", 4 << 20)
    (tmp_path / "file").write_text("in the way")
    assert main(["doctor", "--cache-dir", str(tmp_path / "file")]) == 1
    assert "fix: " in capsys.readouterr().out


def test_the_report_tells_strangers_nothing_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home directory, user name, logins, tokens and secrets of variables are left out; paths stay readable."""
    home, token = tmp_path / "home" / "mallory", "hf_" + "a1B2" * 8
    (home / "cache").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "mallory")
    monkeypatch.setenv("LOGNAME", "mallory")
    monkeypatch.setenv("REKINDLE_API_KEY", "a secret of mine")
    monkeypatch.setenv("REKINDLE_CACHE", str(home / "cache"))
    for function in (report.home_folders, report.user_name):
        function.cache_clear()

    def checks(folder: Path) -> Iterator[Check]:
        yield Check("pass", "jax", "1.0")
        yield Check("fail", "folder", f"{folder} and {home}s are no files", f"rm {home}/x, or look in {home}.")
        yield Check("warn", "hub", f"a secret of mine {token} s3://me:pass@bucket/x /scratch/mallory/y mallory's")

    monkeypatch.setattr(doctor, "examine", checks)
    try:
        assert main(["doctor", "--report"]) == 1
        text = capsys.readouterr().out
        assert main(["doctor"]) == 1
        plain = capsys.readouterr().out
    finally:
        for function in (report.home_folders, report.user_name):
            function.cache_clear()
    lines = text.splitlines()
    assert lines[0].startswith(f"rekindle {rekindle.__version__}")
    assert "REKINDLE_API_KEY is set, " in lines[4] and "REKINDLE_CACHE=~/cache" in lines[4]
    assert f"fail  folder: ~/cache and {home}s are no files" in plain
    assert "fix: rm ~/x, or look in ~.\n" in text and "\npass  jax" not in text and "jax " in text
    assert "<REKINDLE_API_KEY> <token> s3://<login>@bucket/x /scratch/<user>/y" in text
    assert token not in text and "a secret" not in text and "/scratch/mallory" not in text
    assert "~/x" in plain and f"{home}/" not in plain


def test_a_report_is_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--report", "--json"])
    assert "--report" in capsys.readouterr().err


@pytest.mark.parametrize("context", ["0", "-5"])
def test_a_context_has_a_token_at_least(context: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--plan", "1b", "--context", context])
    assert f"--context {context}: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--context", "4096"], ["--quantize", "int4"], ["--kv-dtype", "int8-int4"]])
def test_options_of_a_plan_come_with_one(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", *option])
    assert f"{' '.join(option)}: is of a plan" in capsys.readouterr().err.replace("'", "")


def test_the_commit_is_that_of_a_clone_of_rekindle_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as within a hook of git's
    assert report.commit_of(tmp_path) is None
    monkeypatch.delenv("GIT_DIR")
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    assert report.commit_of(tmp_path) is None, "another repository, with an environment inside"
    (tmp_path / "toolkit" / "rekindle").mkdir(parents=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    short = report.commit_of(tmp_path)
    monkeypatch.delenv("GIT_DIR")
    assert short is not None and git("rev-parse", "HEAD").startswith(short)
    (tmp_path / "file").write_text("two")
    assert report.commit_of(tmp_path) == f"{short} with changes"


def test_products_do_not_read_at_more_than_all_of_the_rate() -> None:
    """A product may read faster than the sum that measures memory, which a share of 136% would not tell anybody."""
    words = doctor.reading_words(25.0, {16: 34.0, 8: 17.0, 4: 8.5})
    assert (
        words == "34 GB/s; products of one row read at 100% of it in 16 bits, 50% of it in 8 bits, 25% of it in 4 bits"
    )
    assert doctor.reading_words(40.0, {16: 20.0}).startswith("40 GB/s; products of one row read at 50%")


def test_a_plan_says_what_training_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory and seconds; a machine without the room is told so, with numbers."""
    from rekindle.tiny import folder

    assert main(["doctor", "--plan", str(folder()), "--tune", "--context", "256"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"pass  training: an adapter of rank 16 needs [\d.]+ MiB: .* of 512 tokens takes about \d", shown)
    monkeypatch.setattr(doctor, "fits", lambda size, beside=0: False)
    assert main(["doctor", "--plan", str(folder()), "--tune", "--context", "256"]) == 1
    assert "fail  training: an adapter of rank 16 needs" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["doctor", "--tune"])
    assert "--tune" in capsys.readouterr().err
