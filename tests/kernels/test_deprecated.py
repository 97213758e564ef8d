"""What JAX deprecates neither stops an import nor a lowering, and nothing else is kept quiet."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest

from helpers.python import run_python
from rekindle_kernels import deprecated

ROOT = Path(__file__).parent.parent.parent
TRITON = "The Pallas Triton backend is deprecated and will be removed in a future JAX version."


def filters() -> list[object]:
    return [each for each in warnings.filters if getattr(each[1], "pattern", None) == deprecated.KNOWN]


def test_only_what_is_known_is_quiet_and_only_inside() -> None:
    with deprecated.known():
        warnings.warn(TRITON, DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning, match="another"):
            warnings.warn("another", DeprecationWarning, stacklevel=1)
        with pytest.raises(UserWarning):
            warnings.warn(TRITON, UserWarning, stacklevel=1)
    assert not filters()
    with pytest.raises(DeprecationWarning, match="Triton"):
        warnings.warn(TRITON, DeprecationWarning, stacklevel=1)


def test_the_last_thread_takes_the_filter_away() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with deprecated.known():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with deprecated.known():
        thread.start()
        assert entered.wait(60)
    warnings.warn(TRITON, DeprecationWarning, stacklevel=1)  # the other thread is still inside
    assert len(filters()) == 1
    leave.set()
    thread.join()
    assert not filters()


@pytest.mark.slow
def test_no_module_imports_a_deprecated_one() -> None:
    """What Python or another package says of itself is not meant, only what JAX says."""
    code = """
import importlib, pkgutil, warnings
import rekindle, rekindle_kernels
for package in (rekindle, rekindle_kernels):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            with warnings.catch_warnings():
                warnings.filterwarnings("error", r".*\\bjax\\b", DeprecationWarning)
                try:
                    importlib.import_module(found.name)
                except rekindle.MissingExtra:
                    continue
"""
    run_python("-c", code)


def test_jax_own_kernel_is_found_where_it_is_measured() -> None:
    assert callable(deprecated.jax_paged_attention())


def test_a_thread_that_looks_for_its_filter_finds_it() -> None:
    """IPython ignores a warning while Tab completes a name, and raises it at other times."""
    silence = deprecated.known()

    class Ending:
        """A pattern during whose search another thread has lowered its program."""

        def match(self, text: str) -> None:
            silence.__exit__(None, None, None)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", UserWarning)
        warnings.filters.insert(0, ("default", Ending(), UserWarning, None, 0))  # type: ignore
        silence.__enter__()
        warnings.warn("provisional", UserWarning, stacklevel=1)
