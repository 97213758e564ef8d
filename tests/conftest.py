"""Fixtures and settings that every test shares."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version

import hypothesis  # noqa: F401  it asks the garbage collector about objects that are frozen later, see below
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests count what is compiled when; those of the background build turn it on.
os.environ.setdefault("REKINDLE_BACKGROUND_BUILD", "0")
# Tests compile hundreds of small programs and run each a few times. Without LLVM's optimisations, without XLA's newer
# emitters of fusions and in one piece each, they compile in a quarter of the time. Lesson 26 and CI's README commands
# run with all of them. XLA ends a process that gives it a flag it does not know: these two were tried with 0.10.
FLAGS = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
if os.environ["JAX_PLATFORMS"] == "cpu":  # on a GPU they would turn optimisations off in the kernels under test
    os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))

import rekindle_kernels  # noqa: E402  jax reads the environment when it is imported


@pytest.fixture(autouse=True, scope="session")
def own_cache() -> Iterator[None]:
    """Tests neither read nor fill the user's cache folder; the programs that they share compile once."""
    folder = tempfile.mkdtemp(prefix="rekindle-tests-")
    before = os.environ.get("REKINDLE_CACHE")
    os.environ["REKINDLE_CACHE"] = folder
    rekindle_kernels.configure(cache_folder=folder)  # sessions do so too; many tests compile without one
    yield
    if before is None:
        del os.environ["REKINDLE_CACHE"]
    else:
        os.environ["REKINDLE_CACHE"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def left_alone_by_the_collector() -> Iterator[None]:
    """What a module leaves behind, mostly programs, is not looked through at each collection in later ones.

    Looking took an eighth of the time or more. Objects that nothing refers to any longer are freed as before.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every async test runs on both of anyio's backends."""
    return str(request.param)
