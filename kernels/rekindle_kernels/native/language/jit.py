"""How numba compiles: `jit` and `inline` for the functions of kernels, `emits` for their instructions, and HANDLER_JIT
for XLA's entry points.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from numba import njit
from numba.extending import intrinsic

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


def emits(result: Any, *arguments: Any) -> Callable[[Any], Any]:
    """Turn `code(builder, *values)`, which emits LLVM's instructions, into a function for kernels. Its arguments and
    result have these numba types; a list of values becomes a tuple.
    """

    def decorate(code: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = code(builder, *values)
            if isinstance(value, list):
                return context.make_tuple(builder, signature.return_type, value)
            return context.get_dummy_value() if value is None else value

        def typed(*context_and_types: Any) -> Any:
            return result(*arguments), codegen

        named = [Parameter(f"_{index}", Parameter.POSITIONAL_OR_KEYWORD) for index in range(1 + len(arguments))]
        typed.__name__, typed.__doc__ = code.__name__, code.__doc__  # in numba's errors
        typed.__signature__ = Signature(named)  # numba looks at it
        return intrinsic(typed)

    return decorate
