"""The implementations of each operation, in order of preference: the first that supports a call serves it.

Those without platforms are selected by name alone (`implementation=…`). A module is imported when a call first
considers its line.
"""

from __future__ import annotations

from rekindle_kernels.ops.adapters import ADAPTERS
from rekindle_kernels.ops.attention import ATTENTION
from rekindle_kernels.ops.linear import GATED, GROUPED_LINEAR, LINEAR, RMS_NORM
from rekindle_kernels.ops.memory import FILL_PAGES, ZEROS
from rekindle_kernels.ops.recurrence import CONVOLUTION, GATED_DELTA, SELECTIVE_SCAN
from rekindle_kernels.ops.rope import ROPE
from rekindle_kernels.ops.sampling import DRAW, GREEDY, TOP_K
from rekindle_kernels.ops.write_kv import WRITE_KV

NATIVE = "rekindle_kernels.native.implementations"
XLA_ATTENTION, XLA_MEMORY = "rekindle_kernels.xla.attention", "rekindle_kernels.xla.memory"
XLA_ADAPTERS = "rekindle_kernels.xla.adapters"
XLA_LINEAR, XLA_ROPE = "rekindle_kernels.xla.linear", "rekindle_kernels.xla.rope"
XLA_SAMPLING = "rekindle_kernels.xla.sampling"
GPU_ATTENTION, GPU_WRITE = "rekindle_kernels.pallas.gpu.attention", "rekindle_kernels.pallas.gpu.write_kv"
GPU_MOSAIC = "rekindle_kernels.pallas.gpu.mosaic"
GPU_GROUPED, GPU_INT4 = "rekindle_kernels.pallas.gpu.grouped", "rekindle_kernels.pallas.gpu.int4"
TPU_ATTENTION = "rekindle_kernels.pallas.tpu.attention"
XLA_RECURRENCE = "rekindle_kernels.xla.recurrence"
REFERENCE = "rekindle_kernels.reference"
CPU, GPU, TPU, ANYWHERE = ("cpu",), ("gpu",), ("tpu",), ("cpu", "gpu", "tpu")

ATTENTION.register("pallas_gpu", GPU_ATTENTION, "ATTENTION", platforms=GPU)
ATTENTION.register("pallas_tpu", TPU_ATTENTION, "ATTENTION", platforms=TPU)
ATTENTION.register("native", NATIVE, "ATTENTION", platforms=CPU)
ATTENTION.register("xla", XLA_ATTENTION, "ATTENTION", platforms=ANYWHERE)
ATTENTION.register("reference", REFERENCE, "ATTENTION", platforms=ANYWHERE)
# Selected by name alone: no GPU has run the first yet, and the others are for tests.
ATTENTION.register("pallas_mosaic_gpu", GPU_MOSAIC, "ATTENTION")
ATTENTION.register("pallas_mosaic_gpu_interpret", GPU_MOSAIC, "INTERPRETED")
ATTENTION.register("pallas_gpu_interpret", GPU_ATTENTION, "INTERPRETED")
ATTENTION.register("pallas_tpu_interpret", TPU_ATTENTION, "INTERPRETED")

WRITE_KV.register("pallas_gpu", GPU_WRITE, "WRITE_KV", platforms=GPU)
WRITE_KV.register("rows", XLA_MEMORY, "WRITE_ROWS", platforms=TPU)
WRITE_KV.register("native", NATIVE, "WRITE_KV", platforms=CPU)
WRITE_KV.register("xla", XLA_MEMORY, "WRITE_KV", platforms=ANYWHERE)
WRITE_KV.register("pallas_gpu_interpret", GPU_WRITE, "INTERPRETED")

LINEAR.register("pallas_gpu", GPU_INT4, "LINEAR", platforms=GPU)
LINEAR.register("native", NATIVE, "LINEAR", platforms=CPU)
LINEAR.register("xla", XLA_LINEAR, "LINEAR", platforms=ANYWHERE)
LINEAR.register("pallas_gpu_interpret", GPU_INT4, "INTERPRETED")

GROUPED_LINEAR.register("pallas_gpu", GPU_GROUPED, "GROUPED", platforms=GPU)
GROUPED_LINEAR.register("xla", XLA_LINEAR, "GROUPED", platforms=ANYWHERE)
GROUPED_LINEAR.register("pallas_gpu_interpret", GPU_GROUPED, "INTERPRETED")

RMS_NORM.register("native", NATIVE, "RMS_NORM", platforms=CPU)
RMS_NORM.register("xla", XLA_LINEAR, "RMS_NORM", platforms=ANYWHERE)

GATED.register("native", NATIVE, "GATED", platforms=CPU)
GATED.register("xla", XLA_LINEAR, "GATED", platforms=ANYWHERE)

ADAPTERS.register("native", NATIVE, "ADAPTERS", platforms=CPU)
ADAPTERS.register("xla", XLA_ADAPTERS, "ADAPTERS", platforms=ANYWHERE)

ROPE.register("native", NATIVE, "ROPE", platforms=CPU)
ROPE.register("xla", XLA_ROPE, "ROPE", platforms=ANYWHERE)

GREEDY.register("native", NATIVE, "GREEDY", platforms=CPU)
GREEDY.register("xla", XLA_SAMPLING, "GREEDY", platforms=ANYWHERE)

DRAW.register("native", NATIVE, "DRAW", platforms=CPU)
DRAW.register("xla", XLA_SAMPLING, "DRAW", platforms=ANYWHERE)

TOP_K.register("blocks", XLA_SAMPLING, "BLOCKS", platforms=GPU)  # a TPU has an instruction of its own
TOP_K.register("xla", XLA_SAMPLING, "TOP_K", platforms=ANYWHERE)

ZEROS.register("native", NATIVE, "ZEROS", platforms=CPU)
ZEROS.register("xla", XLA_MEMORY, "ZEROS", platforms=ANYWHERE)

FILL_PAGES.register("native", NATIVE, "FILL_PAGES", platforms=CPU)
FILL_PAGES.register("joined", XLA_MEMORY, "FILL_JOINED", platforms=GPU)
FILL_PAGES.register("xla", XLA_MEMORY, "FILL_PAGES", platforms=ANYWHERE)

for recurrent in (CONVOLUTION, GATED_DELTA, SELECTIVE_SCAN):
    recurrent.register("native", NATIVE, recurrent.operation.upper(), platforms=CPU)
    recurrent.register("rows", XLA_RECURRENCE, f"{recurrent.operation.upper()}_ROWS", platforms=CPU)
    recurrent.register("xla", XLA_RECURRENCE, recurrent.operation.upper(), platforms=ANYWHERE)

OPERATIONS = (
    ATTENTION,
    WRITE_KV,
    LINEAR,
    GROUPED_LINEAR,
    RMS_NORM,
    GATED,
    ADAPTERS,
    ROPE,
    GREEDY,
    DRAW,
    TOP_K,
    ZEROS,
    FILL_PAGES,
    CONVOLUTION,
    GATED_DELTA,
    SELECTIVE_SCAN,
)
