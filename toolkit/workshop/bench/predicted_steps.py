"""What a decode step should take on an H100: its bytes, its kernels and the times that the host waits, counted.

python predicted_steps.py                     kernels as they were counted last
REKINDLE_COMPILERS=FOLDER python predicted_steps.py --compile     counted now, in compiled steps

Nothing here is measured. Bytes are those of the weights that a step reads, of keys and values of `--context` tokens in
each row, and of three passes over the logits; all are read at 85 % of the memory's peak. Kernels take an assumed time
each. A step lasts at least as long as the larger of the two times, and at most as long as their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import harness
import jax

from helpers.compilers import Thunk
from rekindle._src.bench.plan import DEVICES
from rekindle._src.bench.shapes import hf_config
from rekindle._src.models.base import abstract_model
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs.kv_layout import page_bytes

SHAPES, ROWS = ("135m", "0.6b", "8b"), (1, 64, 256)
REACHED = 0.85  # of the memory's peak, by a good kernel
KERNEL_SECONDS = 1.5e-6  # of a short kernel within a CUDA graph; assumed
DISPATCH_SECONDS = 1.9e-4  # of the host for a step, as measured on a CPU
SYNC_SECONDS = 2e-5  # that the device stands still when the host reads a value and starts what follows; assumed
LOGITS_PASSES, LOGIT = 3, 4  # bytes of a logit


@dataclass(frozen=True)
class Counted:
    """What a compiled step consists of."""

    layer: int  # kernels of a layer
    others: int  # kernels of a step besides those of its layers
    syncs: int  # that the host waits for the device within a step


# Two-layer steps of 64 rows, jax 0.10.2, sm_90a; `--compile` counts again.
COUNTED = {"135m": Counted(15, 22, 0), "0.6b": Counted(15, 24, 0), "8b": Counted(15, 25, 0)}


@dataclass(frozen=True)
class Predicted:
    """A decode step on paper."""

    nbytes: float
    kernels: int
    syncs: int
    byte_seconds: float
    kernel_seconds: float

    @property
    def least(self) -> float:
        return max(self.byte_seconds, self.kernel_seconds) + self.syncs * SYNC_SECONDS

    @property
    def most(self) -> float:
        return self.byte_seconds + self.kernel_seconds + self.syncs * SYNC_SECONDS


def predicted(
    shape: str, rows: int, counted: Counted, *, context: int = 1024, quantize: str | None = None
) -> Predicted:
    """A decode step of `rows` rows with `context` tokens each."""
    config = config_from_hf(hf_config(shape))
    graph, leaves = abstract_model(config, "bfloat16", quantize)
    named = zip(graph.paths, leaves, strict=True)
    tied = not any(path.startswith("head") for path in graph.paths)
    read = sum(leaf.size * leaf.dtype.itemsize for path, leaf in named if tied or not path.startswith("embed"))
    nbytes = read + rows * (context * page_bytes(config, 1, "bfloat16") + LOGITS_PASSES * LOGIT * config.vocab_size)
    kernels = counted.layer * config.num_layers + counted.others
    seconds = nbytes / (DEVICES["H100"].read * 1e9 * REACHED)
    return Predicted(nbytes, kernels, counted.syncs, seconds, kernels * KERNEL_SECONDS)


def outside_branches(thunks: Sequence[Thunk]) -> int:
    """Kernels and copies that run in every step: those outside of conditionals and loops, which are for few rows."""
    count, branch = 0, None
    for thunk in thunks:
        if branch is not None and thunk.depth > branch:
            continue
        branch = thunk.depth if thunk.kind in ("kConditional", "kWhile") else None
        count += thunk.kind not in ("kCommandBuffer", "kConditional", "kWhile")
    return count


def counted_now(shape: str) -> Counted:
    """Count in steps of one and of two layers, compiled for an H100."""
    from helpers import compilers
    from rekindle._src.core.config import EngineConfig
    from rekindle._src.programs.buckets import Bucket
    from rekindle._src.programs.programs import Programs
    from rekindle._src.programs.recipes import compiler_options
    from rekindle_kernels import deprecated

    totals, syncs = [], 0
    for layers in (1, 2):
        with compilers.target("gpu"), deprecated.known():
            config = config_from_hf({**hf_config(shape), "num_hidden_layers": layers})
            engine = EngineConfig(
                max_requests=64, max_model_len=8192, page_size=16, device_pages=4096, kv_dtype="bfloat16",
                max_tokens_per_step=512, host_memory=0, disk_memory=0,
            )  # fmt: skip
            programs = Programs(config, *abstract_model(config, "bfloat16", None), engine)
            made = compilers.compiled(programs.compiler.build(Bucket(64, 0)), "gpu", compiler_options())
        totals.append(outside_branches(made.thunks))
        syncs = len(made.host_steps) - 1
    return Counted(totals[1] - totals[0], 2 * totals[0] - totals[1], syncs)


def main() -> int:
    options = harness.options(__doc__, compile=False, context=1024, quantize=(str, "as in open()"))
    harness.table(
        "shape", "rows", "GB", "kernels", "host waits", "ms of bytes", "ms of kernels", "step, ms", "a dispatch"
    )  # fmt: skip
    for shape in SHAPES:
        counted = counted_now(shape) if options.compile else COUNTED[shape]
        for rows in ROWS:
            one = predicted(shape, rows, counted, context=options.context, quantize=options.quantize)
            cells = (
                shape, rows, f"{one.nbytes / 1e9:.2f}", one.kernels, one.syncs, f"{1e3 * one.byte_seconds:.2f}",
                f"{1e3 * one.kernel_seconds:.2f}", f"{1e3 * one.least:.2f}–{1e3 * one.most:.2f}",
                f"{DISPATCH_SECONDS / one.least:.0%}",
            )  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |")
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    raise SystemExit(main())
