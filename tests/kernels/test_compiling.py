"""Numba's part of building a kernel, and that a process can still use numba itself."""

from __future__ import annotations

import gc
import threading

import jax.numpy as jnp
import pytest
from jax.extend.random import threefry_2x32

from helpers.kernel_state import stored
from rekindle_kernels.native import build

if build.unavailable_reason() is not None:
    pytest.skip("numba is not installed", allow_module_level=True)

import llvmlite.binding as llvm
import numba
from numba.core.registry import cpu_target

from rekindle_kernels.native import compiling, cpu, library
from rekindle_kernels.native.kernels import sample


@pytest.fixture(scope="module")
def code() -> bytes:
    return compiling.object_code("sample", build.entry("another"), build._machine(llvm))


def test_names_tell_which_kernel_they_are_of(code: bytes) -> None:
    """LLVM's engine has the code of all kernels, and numba counts its functions anew in every process."""
    assert build._load_by_llvm("another", code)
    entry = build.entry("another").encode()
    assert sum(name.startswith(entry + b".") for name in code.split(b"\0")) > 1
    assert b"sample" not in code and b"task" not in code  # the names of its functions in Python


KINDS = (
    "addkeys_float32", "addkeys_bfloat16", "chain", "rope", "norm", "argmax", "sample", "write_bfloat16",
    "matvec_float32", "matvec_int8", "gemm_bfloat16", "gemm_float32", "gemm_int8", "prefill_float32_64",
    "prefill_bfloat16_64", "decode_float32_64",
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_no_kernel_can_fail_or_needs_python(name: str) -> None:
    if name.startswith("gemm") and not cpu.multiplies_many(name.removeprefix("gemm_")):
        pytest.skip("this processor has no instruction for it")
    build.ensure(name)
    code = stored(name)
    if code is None:  # it came with the installation
        found = library.find()
        assert found is not None
        level = next(level for level, names in found.levels.items() if name in names)
        code = library.object_file(found, library.symbol(name, cpu.level_called(level)))
    assert not [word for word in (b"numba_", b"NRT_", b"PyErr", b"NumbaEnv") if word in code]


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
        return sample.threefry(x, y, 0, 7)

    assert list(words(1, 2)) == threefry_2x32(jnp.uint32([1, 2]), jnp.uint32([0, 7])).tolist()


def test_a_kernel_that_does_not_compile_leaves_numba_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        numba.njit(lambda x: x.nothing_of_that_name)(1)

    monkeypatch.setattr(compiling, "make", broken)
    plain = cpu_target.target_context.codegen()
    with pytest.raises(numba.TypingError):
        compiling.object_code("norm", build.entry("norm"), build._machine(llvm))
    assert cpu_target.target_context.codegen() is plain
    assert gc.isenabled()


def test_another_thread_compiles_before_or_after_but_not_meanwhile() -> None:
    results: list[int] = []

    def work() -> None:
        results.extend(numba.njit(lambda x, number=number: x + number)(10) for number in range(3))

    thread = threading.Thread(target=work)
    thread.start()
    compiling.object_code("norm", build.entry("norm"), build._machine(llvm))
    thread.join()
    assert results == [10, 11, 12]
