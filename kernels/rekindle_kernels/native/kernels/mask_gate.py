"""Masks that the host writes while a program runs (`native.mask_gate`): wait for them, and hand them on."""

from __future__ import annotations

from typing import Any

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import acquire, give_way, i32, publish, set_i32, sleep, this_thread
from rekindle_kernels.native.language.records import dim, record_at
from rekindle_kernels.native.mask_gate import GATE

SPINS, YIELDS = 200, 2000  # before another program may have the core, and before it is given up for a while
PAUSE = 50  # microseconds, of which the system makes about 100
MOST = 600_000  # pauses until it gives up: a minute
HALF = 0xFFFFFFFF
OPEN, MISSED, GATE_BYTES = GATE.offset("open"), GATE.offset("missed"), GATE.size

JOB = job_layout("gate", {"masks": "int32 [numbers], the host's; 0 if they did not come", "out": "", "numbers": ""})
_gate = record_at(GATE)


@inline
def opens(gate: int) -> bool:
    """Wait until the gate is open; False if it is not opened."""
    tries = 0
    while acquire(gate + OPEN) == 0:
        if this_thread(0) == _gate(gate).opener or tries > YIELDS + MOST:
            return False
        tries += 1
        if tries > YIELDS:
            sleep(PAUSE)
        elif tries > SPINS:
            give_way(0)
    return True


def kernel() -> Kernel:
    """Return the masks behind the gate; no token may come if it stays closed."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        at = frame.gate.data
        gate = (i32(at, 0) & HALF) | (i32(at, 1) << 32)
        job.out = frame.masks.data
        job.numbers = dim(frame.masks, 0) * dim(frame.masks, 1)
        job.masks = gate + GATE_BYTES
        if not opens(gate):
            publish(gate + MISSED, 1)
            job.masks = 0
        return 1

    @jit
    def block(job: Any, index: int) -> None:
        for number in range(job.numbers):
            set_i32(job.out, number, 0 if job.masks == 0 else i32(job.masks, number))

    return Kernel(kernel_table.GATE, JOB, prepare, block, nothing)
