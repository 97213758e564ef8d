"""A folder is trusted only if nobody else can have put anything into it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle_kernels import private_files
from rekindle_kernels.private_files import KEY_VARIABLE, TAG, NotPrivate, distrust_reason, make_folder, read, write

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes are POSIX")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cache" / "programs"
    make_folder(made)
    return made


@pytest.fixture
def _umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("_umask")
def test_what_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache" / "programs"
    assert distrust_reason(folder) is None, "it is not there yet"
    make_folder(folder)
    write(folder / "file", [b"a", b"b"])
    assert [mode(path) for path in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3
    assert (mode(folder / "file"), read(folder / "file")) == (0o600, b"ab")
    assert (folder.parent / TAG).read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert distrust_reason(folder) is None


def test_a_folder_that_is_used_for_other_things_gets_no_tag(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    make_folder(tmp_path / "pages")
    assert not (tmp_path / TAG).exists()


def test_a_folder_of_an_earlier_version_is_closed_and_gets_its_tag(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "pages"
    folder.mkdir(parents=True, mode=0o755)
    make_folder(folder)
    assert mode(folder) == 0o700 and (tmp_path / "cache" / TAG).exists()


@pytest.mark.parametrize("which", ["programs", ""])
@pytest.mark.parametrize("bits", [0o770, 0o777, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_refused(folder: Path, which: str, bits: int) -> None:
    changed = folder.parent / which
    changed.chmod(bits)
    reason = distrust_reason(folder)
    assert reason is not None and str(changed) in reason and "chmod go-w" in reason


@pytest.mark.parametrize(("bits", "fine"), [(0o1777, True), (0o755, True), (0o777, False)])
def test_a_folder_above_in_which_everybody_can_exchange_things_is_refused(
    folder: Path, tmp_path: Path, bits: int, fine: bool
) -> None:
    tmp_path.chmod(bits)
    reason = distrust_reason(folder)
    assert (reason is None) == fine
    assert fine or reason == f"{tmp_path} can be written by others (mode 0777): chmod go-w it"


def test_a_group_may_write_above_if_it_is_our_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images for Jupyter make home folders so."""
    tmp_path.chmod(0o2775)
    assert distrust_reason(folder) is None
    if tmp_path.stat().st_gid:
        monkeypatch.setattr(os, "getgid", lambda: tmp_path.stat().st_gid + 1)
        assert distrust_reason(folder) is not None


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poisoned cache that belonged to another user ran a command as root."""
    write(folder / "file", [b"code"])
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert "belongs to user" in (distrust_reason(folder) or "")
    with pytest.raises(NotPrivate, match="belongs to user"):
        read(folder / "file", inside=folder)


def test_links_within_a_cache_are_refused_and_own_ones_above_are_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(tmp_path)
    assert distrust_reason(tmp_path / "home" / "cache" / "programs") is None
    (tmp_path / "link").symlink_to(folder.parent)
    assert "symbolic link" in (distrust_reason(tmp_path / "link" / "programs") or "")
    (folder.parent / "native").symlink_to(folder)
    assert "symbolic link" in (distrust_reason(folder.parent / "native") or "")


def test_a_link_above_that_leads_to_where_everybody_writes_is_refused(folder: Path, tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    (public / "cache").mkdir(mode=0o700)
    (tmp_path / "relative").symlink_to("cache/../public")
    assert "can be written by others" in (distrust_reason(tmp_path / "relative" / "cache" / "programs") or "")


def test_a_file_is_judged_by_what_was_opened(folder: Path) -> None:
    write(folder / "file", [b"code"])
    (folder / "link").symlink_to(folder / "file")
    (folder / "deep").mkdir(mode=0o700)
    write(folder / "deep" / "file", [b"code"])
    assert read(folder / "deep" / "file", inside=folder) == b"code"
    (folder / "file").chmod(0o620)
    (folder / "deep").chmod(0o770)
    os.mkfifo(folder / "fifo")
    writer = os.open(folder / "fifo", os.O_RDWR)  # else opening it would wait
    for path in (folder / "link", folder / "file", folder / "deep" / "file", folder / "fifo"):
        with pytest.raises(NotPrivate):
            read(path, inside=folder)
    os.close(writer)


def test_a_key_signs_what_is_shared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = private_files.checksum("name", b"code")
    assert private_files.stored_name("name") == "name"
    folder.chmod(0o775)
    sums, names = {plain}, {"name"}
    for number in range(2):
        file = tmp_path / f"key{number}"
        file.write_bytes(os.urandom(32))
        file.chmod(0o640)
        monkeypatch.setenv(KEY_VARIABLE, str(file))
        assert distrust_reason(folder) is None
        sums.add(private_files.checksum("name", b"code"))
        names.add(private_files.stored_name("name"))
    assert len(sums) == len(names) == 3


@pytest.mark.parametrize(("content", "bits"), [(b"short", 0o600), (b"x" * 32, 0o644), (b"x" * 32, 0o602), (None, 0)])
def test_a_key_that_is_no_secret_means_no_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, bits: int
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(bits)
    monkeypatch.setenv(KEY_VARIABLE, str(file))
    assert str(file) in (distrust_reason(folder) or "")
