"""Fixtures and settings that every test shares."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import mmap
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis  # it asks the garbage collector about objects that are frozen later, see below
import pytest
from hypothesis.database import DirectoryBasedExampleDatabase

# Notebooks are checked with jsonschema, which takes three seconds to build a grammar of addresses: it does without.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The threads of torch wait for each other by spinning: on two cores, small models took seven times as long with two.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests count what is compiled when; those of the background build turn it on.
os.environ.setdefault("REKINDLE_BACKGROUND_BUILD", "0")
# Tests compile hundreds of small programs and run each a few times. Without LLVM's optimisations, without XLA's newer
# emitters of fusions and in one piece each, they compile in a quarter of the time. Lesson 26 and CI's README commands
# run with all of them. XLA ends a process that gives it a flag it does not know: these were tried with the versions
# that are named.
FLAGS = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith(("0.10.", "0.12.")):
    FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
if os.environ["JAX_PLATFORMS"] == "cpu":  # on a GPU they would turn optimisations off in the kernels under test
    os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
# Where each operation was written is nothing that a test reads, and noting it is a twentieth of compiling.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# What a property test finds must not depend on how fast the machine is, or how busy; nor may it refuse one change and
# let the next one pass. REKINDLE_HYPOTHESIS=random, which sections of .ci/deep set, draws anew each time.
_ANY_MACHINE = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("the same each time", _ANY_MACHINE, derandomize=True)
hypothesis.settings.register_profile(
    "random",
    _ANY_MACHINE,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / "build" / "hypothesis"),
)
# True on a machine that is quiet enough for bounds in seconds, as the section `clocks` needs it. Elsewhere only a hang
# fails, since a busy machine may stop a test for seconds.
CLOCKS = os.environ.get("REKINDLE_CLOCKS") == "1"
HANG = 60.0
RANDOM = os.environ.get("REKINDLE_HYPOTHESIS") == "random"
hypothesis.settings.load_profile("random" if RANDOM else "the same each time")

import jax  # noqa: E402  it reads the environment when it is imported
from jax.experimental import serialize_executable  # noqa: E402

import rekindle_kernels  # noqa: E402
from rekindle_kernels import read_through  # noqa: E402


def take_over(source: Path, target: Path) -> None:
    """Copy the native kernels that `target` lacks; other processes may do the same at once."""
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for file in source.glob("*.o"):
        if not (target / file.name).exists():
            part = target / f".{file.name}-{os.getpid()}"
            shutil.copy(file, part)
            part.replace(target / file.name)


def take_programs(source: Path, target: Path) -> None:
    """Link the compiled programs that `target` lacks: an entry is complete or absent, and its name says its causes."""
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for entry in source.iterdir() if source.is_dir() else ():
        if entry.is_dir() and not entry.name.startswith(".") and not (target / entry.name).exists():
            with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=target, prefix=".copy-") as scratch:
                shutil.copytree(entry, Path(scratch) / "copy", copy_function=os.link)
                (Path(scratch) / "copy").rename(target / entry.name)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of a run: tests neither read nor fill the user's, and what they share is compiled once, also
    where several processes run them.

    Runs that follow each other share native kernels, each of which takes two to four seconds to compile, and programs,
    in the folder which REKINDLE_TEST_KERNELS names."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"
    before = os.environ.get("REKINDLE_CACHE")
    os.environ["REKINDLE_CACHE"] = str(folder)
    rekindle_kernels.configure(cache_folder=folder)  # sessions do so too; many tests compile without one
    kept = os.environ.get("REKINDLE_TEST_KERNELS")
    if kept:
        take_over(Path(kept), folder / "native")
        take_programs(Path(kept) / "programs", folder / "programs")
    yield folder
    if kept:
        take_over(folder / "native", Path(kept))
        take_programs(folder / "programs", Path(kept) / "programs")
    if before is None:
        del os.environ["REKINDLE_CACHE"]
    else:
        os.environ["REKINDLE_CACHE"] = before


@pytest.fixture(scope="module")
def shared_programs(own_cache: Path) -> Iterator[None]:
    """Sessions with folders of their own find programs of the run's cache in them, and keep theirs there.

    Most of a test over a session is tracing and compiling. It is for modules that neither say when that happens nor
    change what is compiled.
    """
    fetch, keep, shared = read_through.fetch, read_through.keep, own_cache / "programs"

    def copied(source: Path, target: Path) -> bool:
        with contextlib.suppress(OSError):  # of two that copy at once, one is faster
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".copy-") as scratch:
                shutil.copytree(source, Path(scratch) / "copy", copy_function=shutil.copyfile)
                (Path(scratch) / "copy").rename(target)
        return target.is_dir()

    def fetch_too(path: Path) -> bool:
        return fetch(path) or (path.parent.name == "programs" and copied(shared / path.name, path))

    def keep_too(path: Path) -> None:
        keep(path)
        if path.parent.name == "programs" and not (shared / path.name).is_dir():
            copied(path, shared / path.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_through, "fetch", fetch_too)
        patch.setattr(read_through, "keep", keep_too)
        yield


@pytest.fixture(scope="module")
def large_steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the default tests, sessions run every step in the program of the most rows, as they do until the one of its
    size is ready. Runs that choose thorough cases, too, have programs of all sizes.

    A model has up to five step programs for each combination of features in use, and these are two of them. It is for
    modules that test neither the sizes of steps nor what is compiled when: `tests/execution/test_runner.py` does.
    """
    if "not thorough" not in request.config.option.markexpr:
        yield
        return
    from rekindle._src.drafts import calls
    from rekindle._src.programs import buckets

    lattice, draft_rows = buckets.lattice, calls.row_sizes

    def largest(*args: Any, single: bool = False) -> tuple[buckets.Bucket, ...]:
        sizes = lattice(*args)
        return tuple(bucket for bucket in sizes if bucket.rows == sizes[-1].rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "lattice", largest)
        patch.setattr(calls, "row_sizes", lambda most: draft_rows(most)[-1:])
        yield


def resident() -> int:
    """Return the megabytes of this process in memory; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE >> 20
    return 0


class CompiledPrograms:
    """The programs that this process has compiled or loaded, 1.4 MB each, which are dropped once they made it large.

    JAX keeps those that it compiled. Stored ones are kept here by their content, since most sessions of a module load
    the same, which was a quarter of its time. Few are called again by other modules' tests: kept for long, they made
    each of two workers larger than 4 GB.
    """

    ALLOWED = 600  # megabytes by which a process may grow before they are dropped

    def __init__(self) -> None:
        self._before = resident()
        self._loaded: dict[Hashable, Any] = {}
        self._load = serialize_executable.deserialize_and_load

    def load(self, content: bytes, arguments: Any, results: Any, backend: Any, execution_devices: Sequence[Any]) -> Any:
        """Load a serialised program for some devices, as `serialize_executable.deserialize_and_load` does."""
        digest = hashlib.blake2b(content, digest_size=16).digest()
        key = digest, arguments, results, backend, tuple(execution_devices)
        if key not in self._loaded:
            self._loaded[key] = self._load(
                content, arguments, results, backend=backend, execution_devices=execution_devices
            )
        return self._loaded[key]

    def drop_if_large(self) -> None:
        if resident() > self._before + self.ALLOWED:
            self._loaded.clear()
            jax.clear_caches()
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):  # other C libraries keep what is freed, or give it back
                ctypes.CDLL(None).malloc_trim(0)
            self._before = resident()


@pytest.fixture
def short_turns(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """A thread that takes turns during the test never waits for long: nothing holds the interpreter meanwhile."""
    from helpers import turns

    with turns.neighbour() as neighbour:
        yield
    record_property("longest_turn", neighbour.longest)  # for toolkit/workshop/bench/neighbour.py, as the next one
    record_property("grown", neighbour.grown)
    most = turns.MOST if CLOCKS else HANG
    assert neighbour.longest <= most, f"a neighbour waited for {neighbour.longest:.3f} s of processors"


@pytest.fixture
def at_most() -> Callable[[float], float]:
    """Bound measured seconds, `assert waited < at_most(0.3)`: only the section of clocks holds a test to so few."""
    return lambda seconds: seconds if CLOCKS else HANG


@pytest.fixture
def within() -> Callable[[float], contextlib.AbstractContextManager[None]]:
    """Bound the time of a block: `with within(2.0):`. Only the section of clocks holds it to so many seconds."""

    @contextlib.contextmanager
    def bound(seconds: float) -> Iterator[None]:
        began = time.monotonic()
        yield
        assert time.monotonic() - began < (seconds if CLOCKS else HANG)

    return bound


@pytest.fixture(scope="session")
def compiled_programs() -> Iterator[CompiledPrograms]:
    programs = CompiledPrograms()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialize_executable, "deserialize_and_load", programs.load)
        yield programs


@pytest.fixture(autouse=True, scope="module")
def left_alone_by_the_collector(compiled_programs: CompiledPrograms) -> Iterator[None]:
    """Freeze the objects that a module leaves, mostly programs, so that later collections do not look through them.

    Looking took an eighth of the time or more. Objects that nothing refers to any longer are freed as before.
    """
    yield
    compiled_programs.drop_if_large()
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "run files, and the tests of each file, in an order that this seed draws"
    parser.addoption("--shuffle", metavar="SEED", default="", help=help_)


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("--shuffle")
    return [f"order: --shuffle {seed}"] if seed else []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect with the collector of garbage off, which took a third of the time, and let it leave the tests alone."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if {"at_most", "short_turns", "within"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.bounded)
    seed = config.getoption("--shuffle")
    if seed:
        place = {file: random.Random(f"{seed} {file.name}").random() for file in {item.path for item in items}}
        # The tests of a file have the same order when it runs alone.
        own = {item: random.Random(f"{seed} {item.nodeid}").random() for item in items}
        items.sort(key=lambda item: (place[item.path], str(item.path), own[item]))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every async test runs on both of anyio's backends."""
    return str(request.param)
