"""How numba compiles: `jit` and `inline` for the functions of kernels, HANDLER_JIT for those that XLA calls."""

from __future__ import annotations

from numba import njit

# No error model but numpy's: nothing raises, so that the code needs nothing of Python. Sums may be reordered: that is
# what lets the compiler keep sixteen of them in a register. NaN and infinities mean what they mean.
JIT = {
    "nogil": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",
    "boundscheck": False,
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}
HANDLER_JIT = {key: JIT[key] for key in ("error_model", "boundscheck", "fastmath")}
jit = njit(**JIT)
inline = njit(**JIT, forceinline=True)
