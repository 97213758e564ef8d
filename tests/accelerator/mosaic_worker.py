"""`python mosaic_worker.py LIBCUDA PLUGIN MODULE ARGUMENTS`: Mosaic GPU's compiler on a machine without a GPU.

LIBCUDA is made of no_cuda.c, and prints what the kernel in the file MODULE asks of the driver. This runs in a process
of its own, because XLA would take that library for a driver too.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def main(libcuda: str, plugin: str, module: str, arguments: str) -> int:
    ctypes.CDLL(libcuda, mode=ctypes.RTLD_GLOBAL)  # found by its name from now on
    library = ctypes.CDLL(plugin)
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
    text = Path(module).read_bytes()
    compiled = library.MosaicGpuCompile(text, len(text))
    if not compiled:
        return 1
    # The launch describes the kernel's copies to the driver; their addresses are never read.
    context, launch, kernel = compiled[0], compiled[1], compiled[2]
    pointers = (ctypes.c_void_p * int(arguments))(*(1024 * (n + 1) for n in range(int(arguments))))
    kinds = [ctypes.c_void_p] * 3 + [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
    ctypes.CFUNCTYPE(None, *kinds)(launch)(kernel, context, None, pointers, 0)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
