"""A release's wheels, made by one command: unpacked, read as each system's loader would, opened and installed here.

They carry two kernels, or all of them where `REKINDLE_WHEELS` names the folder in which `.ci/wheels.py` put them.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers import aarch64, mach_o, portable_executable, wheels, windows
from project import elf
from rekindle_kernels.native import build_library, cpu, library
from rekindle_kernels.native.chain_plan import ENTRIES

ROOT = Path(__file__).parents[2]
MADE = os.environ.get("REKINDLE_WHEELS")
NEEDED = ["hatchling"] if MADE else ["hatchling", "numba", "ziglang"]
ABSENT = [name for name in NEEDED if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(ABSENT), reason=f'{", ".join(ABSENT)} is missing: pip install -e ".[wheels]"'),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
# All that libraries take from elsewhere is on every system of the kind.
OUTSIDE = {
    "linux": {"libc.so.6", "libm.so.6"},
    "darwin": {"/usr/lib/libSystem.B.dylib"},
    "win32": {"kernel32.dll", "msvcrt.dll"},
}
PLATFORMS = wheels.COMMAND.PLATFORMS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MADE:
        return Path(MADE)
    folder = tmp_path_factory.mktemp("wheels")
    environment = {**os.environ, "REKINDLE_KERNEL_NAMES": "norm argmax"}
    done = subprocess.run(
        [sys.executable, ".ci/wheels.py", "--out", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest) -> Any:
    return PLATFORMS[request.param]


@pytest.fixture
def wheel(made: Path, platform: Any) -> Path:
    (path,) = made.glob(f"*-py3-none-{platform.tag}.whl")
    return path


@pytest.fixture
def kernels(wheel: Path, tmp_path: Path) -> Path:
    """The folder with the wheel's library, unpacked, and its manifest."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "unpacked")
    folder = tmp_path / "unpacked/rekindle_kernels/native/prebuilt"
    wheels.unpack(folder)
    return folder


def symbols(manifest: dict[str, Any]) -> set[str]:
    levels = manifest["levels"].items()
    return {library.symbol(name, cpu.level_called(level)) for level, names in levels for name in names}


def test_there_is_one_for_each_platform_and_none_else(made: Path) -> None:
    tags = sorted(path.stem.rpartition("-")[2] for path in made.glob("*.whl"))
    assert tags == sorted(platform.tag for platform in PLATFORMS.values())


def test_it_is_small_and_its_record_has_every_file(wheel: Path, platform: Any) -> None:
    assert wheel.stat().st_size <= wheels.COMMAND.LARGEST
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.endswith("/")]
        (place,) = [name for name in names if name.endswith(".dist-info/RECORD")]
        record = {row[0]: row[1:] for row in csv.reader(io.StringIO(packed.read(place).decode()))}
        assert sorted(record) == sorted(names)
        for name in set(names) - {place}:
            content = packed.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert record[name] == [f"sha256={digest}", str(len(content))], name
        facts = packed.read(place.replace("RECORD", "WHEEL")).decode().splitlines()
    assert f"Tag: py3-none-{platform.tag}" in facts and "Root-Is-Purelib: false" in facts


def test_its_manifest_describes_the_library(kernels: Path, platform: Any) -> None:
    manifest = json.loads((kernels / library.MANIFEST).read_text())
    content = (kernels / manifest["library"]).read_bytes()
    assert sorted(path.name for path in kernels.iterdir()) == sorted([library.MANIFEST, manifest["library"]])
    assert manifest["digest"] == hashlib.blake2b(content, digest_size=16).hexdigest()
    assert manifest["sources"] == library.source_digest()
    levels = [cpu.level_called(name) for name in manifest["levels"]]
    assert [level.name for level in levels] == list(platform.levels)
    assert {library.platform_tag(level.machine, platform.system) for level in levels} == {manifest["platform"]}
    assert manifest["levels"][levels[-1].name], "of better levels it has the kernels that differ"
    wanted = build_library.all_kernels() if MADE else ["norm", "argmax"]
    for level in levels:  # a processor takes a kernel from the best of its levels that has it
        own = [other.name for other in levels if other.features <= level.features]
        there = {name for other in own for name in manifest["levels"][other]}
        assert {name for name in wanted if build_library.fits(name, level)} <= there, level.name


def test_its_platforms_loader_would_open_it(kernels: Path, platform: Any) -> None:
    manifest = json.loads((kernels / library.MANIFEST).read_text())
    path, names = kernels / manifest["library"], symbols(manifest)
    if platform.system == "linux":
        found = elf.read(path)
        machine = elf.AARCH64 if platform.tag.endswith("aarch64") else elf.X86_64
        assert (found.machine, found.kind) == (machine, elf.LIBRARY)
        assert not found.text_relocations and not found.stack & elf.EXECUTE
        assert not [rights for rights in found.segments if rights & elf.WRITE and rights & elf.EXECUTE]
        assert {*names, ENTRIES} <= found.defined
        assert {*found.needs} <= OUTSIDE["linux"] and found.glibc <= (2, 28), "as the wheel's name says"
    elif platform.system == "darwin":
        mac = mach_o.read(path)
        assert mac.machine == (mach_o.ARM64 if platform.tag.endswith("arm64") else mach_o.X86_64)
        assert (mac.kind, mac.oldest, mac.text_relocations) == (mach_o.LIBRARY, (11, 0), 0)
        assert not [may for may in mac.protections.values() if may & mach_o.WRITE and may & mach_o.EXECUTE]
        assert {f"_{name}" for name in (*names, ENTRIES)} <= mac.defined
        assert {*mac.needs} <= OUTSIDE["darwin"]
        assert mach_o.is_signed(path) or not platform.tag.endswith("arm64")
    else:
        dll = portable_executable.read(path)
        assert dll.machine == portable_executable.X86_64 and dll.is_library and dll.may_move
        assert dll.exports == {*names, ENTRIES} and dll.imports.keys() <= OUTSIDE["win32"]


def test_it_installs_without_a_compiler(wheel: Path, platform: Any, tmp_path: Path) -> None:
    """pip compares the wheel's name with the platform's own, and puts it where a program would look for it."""
    place = ["--platform", platform.tag, "--python-version", "3.11", "--only-binary", ":all:", "--target"]
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    environment = {**os.environ, "PATH": str(tmp_path), "CC": "false"}
    pip = [sys.executable, "-m", "pip", "install", *options, *place, str(tmp_path / "site"), str(wheel)]
    subprocess.run(pip, env=environment, check=True)
    assert (tmp_path / "site/rekindle_kernels/native/prebuilt" / library.MANIFEST).exists()
    if library.platform_tag() != f"{platform.system}-{cpu.level_called(platform.levels[0]).machine}":
        return
    absent = "import sys; sys.modules.update(numba=None, llvmlite=None)"
    code = f"{absent}; from rekindle_kernels.native import build, library; build.ensure('norm')"
    code += "; found = library.find(); print(found.path, library._loaded(found)._name)"
    code += "; from rekindle._src.cli.main import program; program()"
    folders = {"PYTHONPATH": "site", "REKINDLE_CACHE": "cache", "XDG_CACHE_HOME": "user"}
    environment |= {variable: str(tmp_path / name) for variable, name in folders.items()}
    environment.pop(library.FOLDER, None)
    story = [sys.executable, "-c", code, "generate", "Once upon a time", "--max-tokens", "8"]
    done = subprocess.run(story, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paths, _, text = done.stdout.partition("\n")
    packed, loaded = map(Path, paths.split())
    assert packed.is_relative_to(tmp_path / "site") and len(text.split()) > 3
    assert loaded.parent == tmp_path / "user/rekindle_kernels/native", "unpacked where code is kept"


def test_the_command_opens_a_wheel_and_sees_what_is_missing(made: Path, tmp_path: Path) -> None:
    own = f"*{PLATFORMS['linux-x86_64'].tag}.whl"
    (wheel,) = made.glob(own)
    assert "kernels for linux-x86_64" in wheels.COMMAND.load(wheel)
    damaged = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(damaged, "w") as other:
        for name in packed.namelist():
            content = packed.read(name)
            other.writestr(name, content[:-1] if name.endswith(".so.xz") else content)
    with pytest.raises(SystemExit, match="not the one that its manifest names"):
        wheels.COMMAND.load(damaged)


def opened(folder: Path, guest: list[str], environment: dict[str, str] | None = None) -> None:
    """A process for the library's system opens it, and finds each of its kernels."""
    manifest = json.loads((folder / library.MANIFEST).read_text())
    for level, names in manifest["levels"].items():
        assert wheels.COMMAND._symbol("norm", level) == library.symbol("norm", cpu.level_called(level))
        process = aarch64.Guest(guest, cpu.level_called(level), environment)
        for name in names:
            process.address(name)
        process.close()


@pytest.mark.skipif(aarch64.missing() is not None, reason=str(aarch64.missing()))
@pytest.mark.parametrize("platform", ["linux-aarch64"], indirect=True)
def test_an_emulated_system_opens_the_one_for_arm(kernels: Path) -> None:
    aarch64.build_guest(kernels)
    opened(kernels, aarch64.guest(kernels, cpu.level_called("armv8.6-i8mm-bf16")))


@pytest.mark.skipif(windows.missing() is not None, reason=str(windows.missing()))
@pytest.mark.parametrize("platform", ["windows-x86_64"], indirect=True)
def test_wine_opens_the_one_for_windows(kernels: Path) -> None:
    windows.build_guest(kernels)
    opened(kernels, windows.guest(kernels), windows.environment(kernels))
