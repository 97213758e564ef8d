"""Text on an installation that may be shown to others: version, commit and machine, without home and secrets."""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from rekindle._src.core.version import VERSION

PACKAGES = (
    "jax", "jaxlib", "flax", "numpy", "orbax-checkpoint", "tokenizers", "safetensors", "jinja2", "anyio", "numba",
    "jupyterlab", "ipykernel", "ipywidgets", "anywidget", "transformers", "torch", "ray",
)  # fmt: skip
IN_HEADER = frozenset({"rekindle", "Python", *PACKAGES})  # titles of checks that a header has said when they pass
# Variables shown with their values. Others that concern rekindle are only named: they may hold a secret.
SHOWN = frozenset(
    {
        "JAX_ENABLE_X64", "JAX_PLATFORMS", "REKINDLE_BUILD_KERNELS", "REKINDLE_CACHE", "REKINDLE_NATIVE",
        "REKINDLE_NATIVE_LEVEL", "XLA_FLAGS",
    }
)  # fmt: skip
_NAMED = ("REKINDLE_", "JAX_", "XLA_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_LEAST = 8  # characters of a secret: shorter ones are words that a report may need
_TOKEN = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_)[A-Za-z0-9_-]{16,512}")
_LOGIN = re.compile(r"://[^/\s@]{1,256}@")  # user and password of a URL
_GIT_SECONDS = 5.0
_COMMIT = "commit.txt"  # written into a wheel by the build


def version() -> str:
    """Return the version, with the commit where it is known: "0.3.0, commit 686e7d27 with changes"."""
    found = commit()
    return VERSION if found is None else f"{VERSION}, commit {found}"


def commit() -> str | None:
    """Return the commit that a wheel was built from, or the commit of the imported clone."""
    package = Path(__file__).parents[2]
    with contextlib.suppress(OSError):
        return (package / _COMMIT).read_text().strip() or None
    return commit_of(package.parents[1])


def commit_of(root: Path) -> str | None:
    """Return a clone's commit in short; None for a folder that is no clone of rekindle, or where git can't say it."""
    if not (root / ".git").exists() or not (root / "toolkit" / "rekindle").is_dir():
        return None  # another repository, such as one with a virtual environment inside
    git = ["git", "-c", "core.fsmonitor=false", "-C", str(root)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        words = [
            subprocess.run(
                [*git, *arguments], env=plain, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
            ).stdout.strip()
            for arguments in (("rev-parse", "--short=8", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{words[0]} with changes" if words[1] else words[0]


def header() -> list[str]:
    """Return the lines that begin a report: version, machine, packages and variables."""
    lines = [f"rekindle {version()}", f"{platform.python_implementation()} {platform.python_version()} on {system()}"]
    lines.append(f"{processor()}, {os.cpu_count()} CPU cores")
    lines.append("packages: " + ", ".join(f"{name} {found}" for name in PACKAGES if (found := installed(name))))
    lines.append("variables: " + (", ".join(variables(os.environ)) or "none"))
    return lines


def system() -> str:
    """Return the operating system, its C library and the processor's architecture."""
    library = " ".join(platform.libc_ver())
    return " ".join(part for part in (platform.system(), platform.release(), platform.machine(), library) if part)


def processor() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or "unknown processor"


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that concern rekindle; values are included unless they may be secret."""
    names = sorted(name for name in environment if name.startswith(_NAMED))
    return [f"{name}={environment[name]}" if name in SHOWN else f"{name} is set" for name in names]


def with_tilde(text: str) -> str:
    """Return text with `~` for the home directory."""
    for home in home_folders():
        text = _replaced(text, home, "~", lambda before, after: not (_in_name(before) or _in_name(after)))
    return text


def _replaced(text: str, part: str, shown: str, where: Callable[[str, str], bool]) -> str:
    """Return text with `shown` for each `part` for which `where` is true of the characters before and after it."""
    first, *rest = text.split(part)
    for piece in rest:
        first += (shown if where(first[-1:], piece[:1]) else part) + piece
    return first


def _in_name(letter: str) -> bool:
    """True for characters that go on with a folder's name. A full stop may end a sentence."""
    return letter.isalnum() or letter in ("_", "-")


@functools.cache
def home_folders() -> tuple[str, ...]:
    """Return the home directory as it is named and as it lies on the disk, the longer one first."""
    with contextlib.suppress(RuntimeError):  # there is none
        home = Path.home()
        return tuple(sorted({str(home), os.path.realpath(home)} - {home.anchor}, key=len, reverse=True))
    return ()


def for_others(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Remove private details from a text: the home directory, the user's name in paths, and secrets."""
    for name, value in environment.items():
        if len(value) >= _LEAST and any(word in name.upper() for word in _SECRET):
            text = text.replace(value, f"<{name}>")
    text = _LOGIN.sub("://<login>@", _TOKEN.sub("<token>", with_tilde(text)))
    user = user_name()
    if not user:
        return text
    return _replaced(text, user, "<user>", lambda before, after: before in ("/", "\\") and not _in_name(after))


@functools.cache
def user_name() -> str:
    """Return the user's name, or an empty text."""
    with contextlib.suppress(Exception):  # a process without an entry among the users, and without variables
        return getpass.getuser()
    return ""
