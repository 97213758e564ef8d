"""Numba's part of building a kernel: what it leaves behind in a process that uses numba itself."""

from __future__ import annotations

import gc
import threading

import jax.numpy as jnp
import pytest
from jax.extend.random import threefry_2x32

from rekindle_kernels import native
from rekindle_kernels.native import build

if native.reason_against() is not None:
    pytest.skip("numba is not installed", allow_module_level=True)

import llvmlite.binding as llvm
import numba
from numba.core.registry import cpu_target

from rekindle_kernels.native import compiling, drawing


@pytest.fixture(scope="module")
def code() -> bytes:
    return compiling.object_code("draw", build.ENTRY, build._machine(llvm))


def test_only_what_is_called_from_outside_is_named_by_us(code: bytes) -> None:
    assert {b"rekindle_entry", b"rekindle_draw_task"} <= set(code.split(b"\0"))
    engine, address = build._load(code)
    assert address
    assert engine.get_function_address("rekindle_draw_task")


def test_others_compile_as_ever_afterwards(code: bytes) -> None:
    @numba.njit
    def total(count: int) -> int:
        return sum([index * 2 for index in range(count)])

    assert total(5) == 20
    assert gc.isenabled()
    assert "resolve_function_type" not in vars(cpu_target.typing_context)


def test_functions_that_were_gathered_can_be_called_by_others(code: bytes) -> None:
    @numba.njit
    def words(x: int, y: int) -> tuple[int, int]:
        return drawing.threefry(x, y, 0, 7)

    assert list(words(1, 2)) == threefry_2x32(jnp.uint32([1, 2]), jnp.uint32([0, 7])).tolist()


def test_a_kernel_that_does_not_compile_leaves_numba_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        numba.njit(lambda x: x.nothing_of_that_name)(1)

    monkeypatch.setattr(compiling, "make", broken)
    plain = cpu_target.target_context.codegen()
    with pytest.raises(numba.TypingError):
        compiling.object_code("norm", build.ENTRY, build._machine(llvm))
    assert cpu_target.target_context.codegen() is plain
    assert gc.isenabled()


def test_another_thread_compiles_before_or_after_but_not_meanwhile() -> None:
    results: list[int] = []

    def work() -> None:
        results.extend(numba.njit(lambda x, number=number: x + number)(10) for number in range(3))

    thread = threading.Thread(target=work)
    thread.start()
    compiling.object_code("norm", build.ENTRY, build._machine(llvm))
    thread.join()
    assert results == [10, 11, 12]
