"""Files that only this user can have written: the rules for compiled code, which is kept and loaded again.

A compiled program runs with this user's rights, so a cache folder is as trusted as the code that is installed. It is
used only where no other user could have written to it:

- the cache folder and what lies in it belong to this user, can't be written by group or others, and are no links;
- every folder above belongs to this user or the system, and no other user can exchange its entries: it is not writable
  by all users unless sticky, as /tmp is, nor by a group other than this user's own.

A cache that several users share on purpose has a key instead: REKINDLE_SIGNING_KEY names a file that they all can read.
Code, in `SIGNED` folders, is then signed, and nothing with a wrong signature is loaded. Weights and pages
are not signed: they stay subject to the rules above.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import uuid
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rekindle_kernels import read_through, system

TAG = "CACHEDIR.TAG"  # bford.info/cachedir: backups leave such a folder out, and `rekindle cache` empties no other
TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# This folder was made by rekindle. All of it can be made again; see `rekindle cache --help`.
"""
# Folders in a cache.
KINDS = (
    "chats", "compilations", "fingerprints", "models", "native", "pages", "pictures", "programs", "snapshots",
    "tokenizers", "tuning", "weights",
)  # fmt: skip
SIGNED = ("native", "programs")  # of them, those whose files are signed where there is a key
KEY_VARIABLE = "REKINDLE_SIGNING_KEY"
MIN_KEY = 16  # bytes
log = logging.getLogger("rekindle.cache")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPrivate(PermissionError):
    """A file or folder that another user could have written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.EPERM, reason, str(path))


def distrust_reason(folder: Path) -> str | None:
    """Return why `folder`, one of a cache's `KINDS`, can't be trusted, with the fix; None if it can.

    A folder that does not exist yet is judged by those above it. With a key, signatures are trusted, not folders.
    """
    try:
        if is_shared(folder):
            return None
    except OSError as error:
        return f"{error.filename}, which {KEY_VARIABLE} names, {error.strerror}"
    if system.owner() is None:
        return None
    try:
        _check_above(Path(os.path.abspath(folder.parent)).parent)
        for path in (folder.parent, folder):
            _check_own(path, path.lstat())
    except FileNotFoundError:
        return None
    except NotPrivate as error:
        return f"{error.filename} {error.strerror}"
    except OSError as error:
        return f"{error.filename} can't be looked at: {error.strerror}"
    return None


@cache
def tell_once(reason: str) -> None:
    """Log that the cache is not used, once for each reason, whichever of its parts notices first."""
    log.warning("the cache is not used, so what it would keep is made again at each start: %s", reason)


def make_folder(folder: Path) -> None:
    """Create `folder`, one of a cache's `KINDS`, and all above it, for this user alone; mark a new cache with a tag."""
    cache_folder = folder.parent
    for path in (*reversed(cache_folder.parents), cache_folder, folder):
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o777 if is_shared(folder) else 0o700)
                sync(path.parent)
    if not (cache_folder / TAG).exists() and folder.name in KINDS:
        entries = {path.name for path in cache_folder.iterdir() if not path.name.startswith(".")}
        if entries <= {*KINDS, TAG}:  # else other programs use the folder, too
            write(cache_folder / TAG, [TAG_TEXT.encode()], durable=True)
    if system.owner() is not None and not is_shared(folder) and folder.name in KINDS:
        mode = folder.stat().st_mode
        if mode & 0o055:  # made by an earlier version: prompts lie in it
            folder.chmod(stat.S_IMODE(mode) & ~0o055)


def read(path: Path, *, inside: Path | None = None) -> bytes:
    """Return the content of a file. Raise `NotPrivate` unless it and the folders up to `inside` are this user's."""
    if inside is not None:
        check(path.parent, inside=inside)
    shared = inside is not None and is_shared(inside)
    entry = inside is not None and inside == path.parent  # a file that is an entry of the cache by itself
    try:
        try:
            descriptor = system.open_file(path, os.O_RDONLY)
        except FileNotFoundError:
            if not entry or not read_through.fetch(path):
                raise
            descriptor = system.open_file(path, os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate(path, "is a symbolic link") from error
        raise
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivate(path, "is not a regular file")
        if not shared:
            _check_own(path, status)
        content = file.read()
    if entry:
        read_through.keep(path)
    return content


def touch(path: Path) -> None:
    """Mark an entry of a cache as used now, which delays its removal. A read-only entry is left as it is."""
    with contextlib.suppress(OSError):
        os.utime(path)


def check(path: Path, *, inside: Path) -> None:
    """Raise `NotPrivate` unless a file and the folders between it and `inside` are this user's."""
    if is_shared(inside):
        return
    for at in (path, *path.parents):
        if at == inside:
            break
        _check_own(at, at.lstat())


def write(path: Path, parts: Iterable[bytes], *, mode: int = 0o600, durable: bool = False) -> None:
    """Write `parts` to a file, all or nothing: after an error it is as before, and no other file is left behind.

    With `durable`, a power cut leaves one of the two as well, and the new one once this has returned. Otherwise it may
    leave a file of zeros or none: that is for content which is verified when it is read, and can be made again.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    mode = 0o666 if is_shared(path.parent) else mode
    try:
        with open(system.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.writelines(parts)
        if durable:
            sync(temporary)
        system.replace(temporary, path)
        if durable:
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if path.parent.name in SIGNED:
        read_through.keep(path)


def sync(path: Path) -> None:
    """Return once the content of a file, or the names in a folder, would survive a power cut. Raise OSError.

    A file system that can't sync, or a folder that this user can't open, is left as it is.
    """
    system.sync(path)


def sync_all(folder: Path) -> None:
    """Do as `sync` does with a folder, and with all folders and files in it."""
    for at, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(at) / name)
        sync(Path(at))


def make_private(folder: Path) -> None:
    """Let only this user read `folder` and its contents, unless the folder around it is shared with a key."""
    if is_shared(folder.parent) or system.owner() is None:
        return
    for at, _, files in os.walk(folder):
        os.chmod(at, 0o700)
        for name in files:
            os.chmod(os.path.join(at, name), 0o600)


def checksum(name: str, *parts: bytes) -> str:
    """Return the checksum of `parts`, stored under `name`; with a key it is a signature that needs the key."""
    hasher = hashlib.blake2b(digest_size=16, key=signing_key() or b"")
    for part in (name.encode(), *parts):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def stored_name(name: str) -> str:
    """Return `name`; with a key, another name, so that signed and unsigned entries can lie next to each other."""
    return name if signing_key() is None else checksum(name)


def is_shared(folder: Path) -> bool:
    """True if the files in `folder` are signed, so that other users may be able to write them."""
    return folder.name in SIGNED and signing_key() is not None


def signing_key() -> bytes | None:
    """Return a shared cache's key or None. Raise OSError if its file can't be read, is short or open to all users."""
    path = os.environ.get(KEY_VARIABLE)
    return _key(os.path.expanduser(path)) if path else None


@cache
def _key(path: str) -> bytes:
    with open(path, "rb") as file:
        mode, content = os.fstat(file.fileno()).st_mode, file.read()
    if system.owner() is not None and mode & (stat.S_IWOTH | stat.S_IROTH):
        raise NotPrivate(Path(path), "is open to everybody: chmod o-rw it")
    if len(content) < MIN_KEY:
        raise OSError(errno.EINVAL, f"has {len(content)} bytes, and a key needs {MIN_KEY}", path)
    return hashlib.blake2b(content, digest_size=32).digest()


def _check_own(path: Path, found: os.stat_result) -> None:
    own = system.owner()
    if own is None:
        return
    user, _ = own
    if stat.S_ISLNK(found.st_mode):
        raise NotPrivate(path, "is a symbolic link: name the folder itself")
    if found.st_uid != user:
        raise NotPrivate(path, f"belongs to user {found.st_uid}, and this process runs as {user}")
    if found.st_mode & _OTHERS_WRITE:
        raise NotPrivate(path, _open_to_others(found))


def _open_to_others(status: os.stat_result) -> str:
    return f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o}): chmod go-w it"


def _check_above(folder: Path) -> None:
    """Raise `NotPrivate` unless all folders from the root to `folder` are safe. Trusted users' links are followed."""
    remaining, current = [*reversed(folder.parts[1:])], Path(folder.anchor)
    links = 0
    own = system.owner()
    if own is None:
        return
    user, group = own
    trusted = _system_users() | {user}
    while True:
        status = current.lstat()
        if status.st_uid not in trusted:
            raise NotPrivate(current, f"belongs to user {status.st_uid}, who can exchange what is in it")
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > 40:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(current))
            target = Path(os.readlink(current))
            current = Path(target.anchor) if target.is_absolute() else current.parent
            remaining += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            continue
        sticky = status.st_mode & stat.S_ISVTX
        by_group = status.st_mode & stat.S_IWGRP and status.st_gid not in (0, group)
        if not sticky and (status.st_mode & stat.S_IWOTH or by_group):
            raise NotPrivate(current, _open_to_others(status))
        if not remaining:
            return
        part = remaining.pop()
        current = current.parent if part == ".." else current / part


@cache
def _system_users() -> frozenset[int]:
    """Return root, and in a container without root the user that stands for all users unknown to it."""
    users = {0}
    with contextlib.suppress(OSError, ValueError, IndexError):
        ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if not any(first == 0 for first, _, _ in ranges):
            users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return frozenset(users)
