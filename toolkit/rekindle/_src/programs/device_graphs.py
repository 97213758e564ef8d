"""One graph per step on a GPU: its conditionals and loops run on the device, inside the CUDA graph of its kernels.

By default XLA leaves loops, and conditionals around them, out of its graphs: the host then reads their conditions, and
waits for the device within each step, twice to four times. A step of 32 layers has some 500 kernels; the host is ahead
of the device only while it never waits. Compiling for an H100 shows that the options make one graph
(tests/accelerator/test_steps.py). Where the driver is older than 12.3, XLA leaves conditions to the host.
"""

from __future__ import annotations

from rekindle_kernels import current_platform

# XLA's defaults, and WHILE; the option replaces them all.
CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"


def compiler_options(platform: str | None = None) -> dict[str, str | bool] | None:
    """Return XLA's options for programs on this platform; None for its own defaults."""
    return {"xla_gpu_enable_command_buffer": CAPTURED} if (platform or current_platform()) == "gpu" else None
