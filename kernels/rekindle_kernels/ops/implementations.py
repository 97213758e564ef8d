"""The implementations of each operation, in order of preference: the first that supports a call serves it.

Those without platforms are selected by name alone (`implementation=…`). A module is imported when a call first
considers its line.
"""

from __future__ import annotations

from rekindle_kernels.ops.added_keys import ADD_KEYS
from rekindle_kernels.ops.attention import ATTENTION, ROPE, WRITE_KV
from rekindle_kernels.ops.linear import ADAPTERS, GATED, GROUPED_LINEAR, LINEAR, RMS_NORM
from rekindle_kernels.ops.memory import FILL_PAGES, ZEROS
from rekindle_kernels.ops.page_bounds import BOUND_PAGES
from rekindle_kernels.ops.recurrence import CHANNEL_DELTA, CONVOLUTION, GATED_DELTA, SELECTIVE_SCAN
from rekindle_kernels.ops.sampling import DRAW, GREEDY, TOP_K

CPU, GPU, TPU, ANYWHERE = ("cpu",), ("gpu",), ("tpu",), ("cpu", "gpu", "tpu")

ATTENTION.register("pallas_gpu", ".pallas.gpu.attention", "ATTENTION", platforms=GPU)
ATTENTION.register("pallas_tpu", ".pallas.tpu.attention", "ATTENTION", platforms=TPU)
ATTENTION.register("native", ".native.attention", "ATTENTION", platforms=CPU)
ATTENTION.register("xla_gpu", ".xla.gpu_attention", "ATTENTION", platforms=GPU)
ATTENTION.register("xla", ".xla.attention", "ATTENTION", platforms=ANYWHERE)
ATTENTION.register("reference", ".reference", "ATTENTION", platforms=ANYWHERE)
# Selected by name alone: no GPU has run the first yet, and the others are for tests.
ATTENTION.register("pallas_mosaic_gpu", ".pallas.gpu.mosaic", "ATTENTION")
ATTENTION.register("pallas_mosaic_gpu_interpret", ".pallas.gpu.mosaic", "INTERPRETED")
ATTENTION.register("pallas_gpu_interpret", ".pallas.gpu.attention", "INTERPRETED")
ATTENTION.register("pallas_tpu_interpret", ".pallas.tpu.attention", "INTERPRETED")

ADD_KEYS.register("native", ".native.added_keys", "ADD_KEYS", platforms=CPU)
ADD_KEYS.register("xla", ".xla.added_keys", "ADD_KEYS", platforms=ANYWHERE)

WRITE_KV.register("pallas_gpu", ".pallas.gpu.attention", "WRITE_KV", platforms=GPU)
WRITE_KV.register("rows", ".xla.memory", "WRITE_ROWS", platforms=TPU)
WRITE_KV.register("native", ".native.attention", "WRITE_KV", platforms=CPU)
WRITE_KV.register("xla", ".xla.memory", "WRITE_KV", platforms=ANYWHERE)
WRITE_KV.register("pallas_gpu_interpret", ".pallas.gpu.attention", "WRITE_INTERPRETED")

BOUND_PAGES.register("native", ".native.page_bounds", "BOUND_PAGES_NATIVELY", platforms=CPU)
BOUND_PAGES.register("xla", ".xla.page_bounds", "BOUND_PAGES", platforms=ANYWHERE)

LINEAR.register("pallas_gpu", ".pallas.gpu.int4", "LINEAR", platforms=GPU)
LINEAR.register("native", ".native.products", "LINEAR", platforms=CPU)
LINEAR.register("xla_tiles", ".xla.linear", "TILES", platforms=GPU)
LINEAR.register("xla", ".xla.linear", "LINEAR", platforms=ANYWHERE)
LINEAR.register("pallas_gpu_interpret", ".pallas.gpu.int4", "INTERPRETED")

GROUPED_LINEAR.register("pallas_gpu", ".pallas.gpu.grouped", "GROUPED", platforms=GPU)
GROUPED_LINEAR.register("xla_tiles", ".xla.linear", "GROUPED_TILES", platforms=GPU)
GROUPED_LINEAR.register("xla", ".xla.linear", "GROUPED", platforms=ANYWHERE)
GROUPED_LINEAR.register("pallas_gpu_interpret", ".pallas.gpu.grouped", "INTERPRETED")

RMS_NORM.register("native", ".native.products", "RMS_NORM", platforms=CPU)
RMS_NORM.register("xla", ".xla.linear", "RMS_NORM", platforms=ANYWHERE)

GATED.register("native", ".native.products", "GATED", platforms=CPU)
GATED.register("xla", ".xla.linear", "GATED", platforms=ANYWHERE)

ADAPTERS.register("native", ".native.products", "ADAPTERS", platforms=CPU)
ADAPTERS.register("xla", ".xla.linear", "ADAPTERS", platforms=ANYWHERE)

ROPE.register("native", ".native.attention", "ROPE", platforms=CPU)
ROPE.register("xla", ".xla.attention", "ROPE", platforms=ANYWHERE)

GREEDY.register("native", ".native.sampling", "GREEDY", platforms=CPU)
GREEDY.register("xla", ".xla.sampling", "GREEDY", platforms=ANYWHERE)

DRAW.register("native", ".native.sampling", "DRAW", platforms=CPU)
DRAW.register("xla", ".xla.sampling", "DRAW", platforms=ANYWHERE)

TOP_K.register("blocks", ".xla.sampling", "BLOCKS", platforms=GPU)  # a TPU has an instruction of its own
TOP_K.register("xla", ".xla.sampling", "TOP_K", platforms=ANYWHERE)

ZEROS.register("native", ".native.memory", "ZEROS", platforms=CPU)
ZEROS.register("xla", ".xla.memory", "ZEROS", platforms=ANYWHERE)

FILL_PAGES.register("native", ".native.memory", "FILL_PAGES", platforms=CPU)
FILL_PAGES.register("joined", ".xla.memory", "FILL_JOINED", platforms=GPU)
FILL_PAGES.register("xla", ".xla.memory", "FILL_PAGES", platforms=ANYWHERE)

for recurrent in (CONVOLUTION, GATED_DELTA, CHANNEL_DELTA, SELECTIVE_SCAN):
    recurrent.register("native", ".native.recurrence", recurrent.operation.upper(), platforms=CPU)
    recurrent.register("rows", ".xla.recurrence", f"{recurrent.operation.upper()}_ROWS", platforms=CPU)
    recurrent.register("xla", ".xla.recurrence", recurrent.operation.upper(), platforms=ANYWHERE)

OPERATIONS = (
    *(ATTENTION, ADD_KEYS, WRITE_KV, BOUND_PAGES, LINEAR, GROUPED_LINEAR, RMS_NORM, GATED, ADAPTERS, ROPE),
    *(GREEDY, DRAW, TOP_K, ZEROS, FILL_PAGES, CONVOLUTION, GATED_DELTA, CHANNEL_DELTA),
    SELECTIVE_SCAN,
)
