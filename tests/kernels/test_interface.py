"""XLA's interface for foreign functions: kernels answer what they are asked, and do without where they are refused."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle_kernels
from helpers.kernel_state import begin_with
from helpers.python import run_python
from rekindle_kernels.native import build, layout, python_handlers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no native kernels")
Handler = Callable[[int], int]
ZEROS = python_handlers.HANDLERS[python_handlers.ZEROS]
METADATA, UNKNOWN = 1, 7


class Frame:
    """XLA's call frame with extensions, for one operand (bytes per element) and one result of three float32."""

    def __init__(self, *kinds: int) -> None:
        self.metadata = (ctypes.c_int32 * 16)(*[-1] * 16)
        self.values = np.ones(3, np.float32)
        self._size = np.array([4], np.int32)
        self._dims = (ctypes.c_int64 * 1)(3)
        self._records = [
            (ctypes.c_int64 * 6)(48, 0, 0, self._size.ctypes.data, 1, ctypes.addressof(self._dims)),
            (ctypes.c_int64 * 6)(48, 0, 0, self.values.ctypes.data, 1, ctypes.addressof(self._dims)),
        ]
        self._arrays = [(ctypes.c_int64 * 1)(ctypes.addressof(record)) for record in self._records]
        self._extensions = []
        following = 0
        for kind in reversed(kinds):  # the upper half of the word that holds the kind is not XLA's to clear
            word = (0x7FFF << 32) | kind
            extension = (ctypes.c_int64 * 4)(32, word, following, ctypes.addressof(self.metadata))
            self._extensions.append(extension)
            following = ctypes.addressof(extension)
        self._frame = (ctypes.c_int64 * 20)()
        self._frame[1], self._frame[9], self._frame[12], self._frame[14] = (
            following, ctypes.addressof(self._arrays[0]), 1, ctypes.addressof(self._arrays[1]),
        )  # fmt: skip

    @property
    def address(self) -> int:
        return ctypes.addressof(self._frame)

    @property
    def version(self) -> list[int]:
        return self.metadata[6:9]


def compiled() -> Handler:
    """Whether a kernel that numba compiles takes the frame for a question."""
    numba = pytest.importorskip("numba")
    from rekindle_kernels.native.language import handler

    @numba.cfunc(numba.types.int64(numba.types.int64), error_model="numpy", boundscheck=False)
    def asked(frame: int) -> int:
        return 1 if handler.asks_version(frame) else 0

    found: Handler = asked.ctypes
    return found


@pytest.mark.parametrize("kinds", [(METADATA,), (UNKNOWN, METADATA), (METADATA, UNKNOWN)])
def test_a_question_is_answered_wherever_it_stands(kinds: tuple[int, ...]) -> None:
    frame = Frame(*kinds)
    assert ZEROS(frame.address) == 0
    assert frame.version == [0, 1, 0]
    assert frame.values.tolist() == [1, 1, 1], "a question is no call"
    frame = Frame(*kinds)
    assert compiled()(frame.address) == 1
    assert frame.version == [0, 1, 0]


@pytest.mark.parametrize("kinds", [(), (UNKNOWN,), (UNKNOWN, UNKNOWN)])
def test_another_extension_is_no_question(kinds: tuple[int, ...]) -> None:
    frame = Frame(*kinds)
    assert ZEROS(frame.address) == 0
    assert frame.values.tolist() == [0, 0, 0], "the call was for zeros"
    assert compiled()(frame.address) == 0
    assert frame.metadata[:] == [-1] * 16, "memory that is somebody else's"


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
def _too_new(frame: int) -> int:
    """Says that it was written for a version that XLA does not take."""
    extension = python_handlers.read(layout.CALL_FRAME, frame, "extension")
    if extension:
        answer = python_handlers.read(layout.EXTENSION, extension, "metadata") + layout.METADATA.offset("major")
        (ctypes.c_int32 * 3).from_address(answer)[:] = [0, 1000, 0]
    return 0


@pytest.mark.skipif(not python_handlers.has_zeros() or jax.default_backend() != "cpu", reason="has no kernel of zeros")
def test_zeros_need_no_kernel_where_xla_refuses_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "PREFIX", "rekindle_refused_")
    begin_with(monkeypatch, ready=set())
    monkeypatch.setitem(python_handlers.HANDLERS, python_handlers.ZEROS, _too_new)
    shapes = [jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), jax.ShapeDtypeStruct((7,), jnp.int32)]
    with caplog.at_level(logging.WARNING, logger="rekindle_kernels.native.build"):
        lowered = jax.jit(lambda: rekindle_kernels.zeros(shapes)).lower()
    assert "custom_call" not in lowered.as_text()
    assert "zeros can't be used" in caplog.text and "API version (0.1000)" in caplog.text
    for made, shape in zip(lowered.compile()(), shapes, strict=True):
        assert (made.shape, made.dtype) == (shape.shape, shape.dtype)
        assert not np.asarray(made.astype(jnp.float32)).any()


def test_a_refusal_leaves_the_backend_usable() -> None:
    """Registered before the backend starts, a kernel that is refused would keep it from starting."""
    code = """
import ctypes, jax, rekindle_kernels
from rekindle_kernels.native import python_handlers
from rekindle_kernels.native.layout import CALL_FRAME, EXTENSION, METADATA
@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
def too_new(frame):
    extension = python_handlers.read(CALL_FRAME, frame, "extension")
    if extension:
        answer = python_handlers.read(EXTENSION, extension, "metadata") + METADATA.offset("major")
        (ctypes.c_int32 * 3).from_address(answer)[:] = [0, 1000, 0]
    return 0
python_handlers.HANDLERS[python_handlers.ZEROS] = too_new
print(jax.jit(lambda: rekindle_kernels.zeros(jax.ShapeDtypeStruct((2,), "float32"), platform="cpu"))())
"""
    assert run_python("-c", code).split() == ["[0.", "0.]"]
