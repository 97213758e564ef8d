"""Chooses how weights are prefetched by a measurement of this processor, when its kernels are compiled ahead.

Into which level of cache lines should come, and how far ahead, is a matter of the processor and not of its
instructions, and of how much is computed between two lines. So the innermost loops of one row times a matrix of 16, 8
and 4 bits, and of two rows times 16 bits, are compiled with each candidate and timed in turn on all processors, and
each gets its own.
Prefetching changes no result. A level keeps its own where the gain is within what other work on the machine makes of a
measurement, and where `object_loader` loads nothing.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numba import cfunc, types

from rekindle_kernels import system
from rekindle_kernels.native import cpu, object_loader
from rekindle_kernels.native.compiling import function_code, machine_of
from rekindle_kernels.native.cpu import Prefetch, Prefetching
from rekindle_kernels.native.kernels import matvec
from rekindle_kernels.native.kernels.int4_tile import NUMBERS, best_instruction, multiply_tile
from rekindle_kernels.native.language.handler import HANDLER_JIT
from rekindle_kernels.native.language.memory import word
from rekindle_kernels.native.language.vector import LANES, STORAGE

CANDIDATES = (
    Prefetch(0, 0),
    *(Prefetch(1, ahead << 10) for ahead in (2, 8)),
    *(Prefetch(2, ahead << 10) for ahead in (4, 8, 16)),
)
KINDS = dict(zip(Prefetching._fields, (16, 8, 4, 16), strict=True))  # each measured with so many bits
GAIN = 1.03  # by which another one has to be faster than the level's own
WIDTH, GROUP = 1024, 32
BYTES = 128 << 20  # of all processors' matrices together: more than most caches hold
TURNS = 15
_OPTIONS: dict[str, Any] = {**HANDLER_JIT}


def chosen(level: cpu.Level) -> tuple[Prefetching, dict[str, list[float]]] | None:
    """Return the fastest candidates on this processor, and GB/s by kind and candidate; None where they can't be
    timed."""
    addresses = _probes(level)
    if addresses is None:
        return None
    rates = {kind: _rates(bits, [addresses[kind, each] for each in CANDIDATES]) for kind, bits in KINDS.items()}
    own = level.prefetch._asdict()
    best = {kind: CANDIDATES[fastest(turns, CANDIDATES.index(own[kind]))] for kind, turns in rates.items()}
    medians = {
        kind: [round(statistics.median(one), 1) for one in zip(*turns, strict=True)] for kind, turns in rates.items()
    }
    return Prefetching(**best), medians


def fastest(turns: Sequence[Sequence[float]], own: int) -> int:
    """Return the number of the best candidate: `own`, unless another one is clearly faster in most turns. `turns`
    has the rates by turn and candidate."""
    gains = {own: GAIN}
    for number in range(len(turns[0])):
        ratios = [turn[number] / turn[own] for turn in turns]
        low, middle = statistics.quantiles(ratios, n=3)[0], statistics.median(ratios)
        if low > 1 and middle > GAIN:
            gains[number] = middle
    return max(gains, key=gains.__getitem__)


def _probes(level: cpu.Level) -> dict[tuple[str, Prefetch], int] | None:
    """Return the addresses of a function for each kind and candidate."""
    found = {}
    machine, before = machine_of(level, linked=False), (cpu.building_for, cpu.prefetching)
    cpu.building_for = level
    try:
        for kind in KINDS:
            for number, prefetch in enumerate(CANDIDATES):
                cpu.prefetching, entry = Prefetching(*[prefetch] * len(KINDS)), f"rekindle_probe_{kind}_{number}"
                code = function_code(partial(_probe, kind), entry, machine)
                address = object_loader.load(code, entry, {})
                if address is None:
                    return None
                found[kind, prefetch] = address
    finally:
        cpu.building_for, cpu.prefetching = before
    return found


def _probe(kind: str) -> Any:
    """Return a row times a matrix: a function of the addresses of weights, scales, the row and results, and their
    number."""
    if kind == "grouped":
        tile = multiply_tile(1, 1, best_instruction(), scale="float16", prefetches=True)

        @cfunc(types.void(types.int64), **_OPTIONS)
        def four_bits(arguments: int) -> None:
            weight, scale, x = word(arguments, 0), word(arguments, 1), word(arguments, 2)
            groups = WIDTH // GROUP
            for block in range(word(arguments, 4) // LANES):
                here, scales = weight + block * WIDTH * LANES // 2, scale + block * groups * LANES * 2
                tile(here, scales, 0, 0, 0, x, WIDTH, groups, 1, word(arguments, 3) + 4 * LANES * block)

        return four_bits
    storage = STORAGE["int8" if kind == "int8" else "bfloat16"]
    one_row, size = matvec.row_functions(storage).one_row, storage.size
    two_by_two = matvec.two_rows(storage, matvec.row_functions(storage, cpu.prefetch().several))

    @cfunc(types.void(types.int64), **_OPTIONS)
    def two_rows(arguments: int) -> None:
        weight, x, out = word(arguments, 0), word(arguments, 2), word(arguments, 3)
        for n in range(0, word(arguments, 4), 2):
            two_by_two(weight + n * WIDTH * size, x, WIDTH, 0, out + 4 * n)

    if kind == "several":
        return two_rows

    @cfunc(types.void(types.int64), **_OPTIONS)
    def plain(arguments: int) -> None:
        weight, x, out = word(arguments, 0), word(arguments, 2), word(arguments, 3)
        for n in range(word(arguments, 4)):
            one_row(weight + n * WIDTH * size, x, WIDTH, out + 4 * n)

    return plain


class _CoreWeights:
    """The weights that one core multiplies in a measurement, and its buffers."""

    def __init__(self, bits: int, nbytes: int) -> None:
        outputs = nbytes * 8 // bits // WIDTH // LANES * LANES
        self._weights = _huge_pages(nbytes)
        self._scales = np.ones(outputs * (WIDTH // GROUP if bits == 4 else 1), np.float16)
        self._row, self._out = (
            np.zeros(2 * 4 * WIDTH + 4 * NUMBERS * WIDTH // GROUP, np.uint8),
            np.zeros(outputs, np.float32),
        )
        arrays = (self._weights, self._scales, self._row, self._out)
        self._arguments = np.array([*(array.ctypes.data for array in arrays), outputs], np.int64)
        self.rate = 0.0
        self.nbytes = outputs * WIDTH * bits // 8 + (self._scales.nbytes if bits == 4 else 0)

    def multiply(self, function: Any) -> None:
        """Multiply, and note the rate by the time that the processor took: what else runs here counts less."""
        started = time.thread_time()
        function(self._arguments.ctypes.data)
        self.rate = self.nbytes / (time.thread_time() - started) / 1e9


def _huge_pages(nbytes: int) -> np.ndarray:
    """Return memory as weights have it, all of it touched."""
    found = np.frombuffer(system.anonymous_memory(nbytes), np.uint8)
    found[:] = 1
    return found


def _rates(bits: int, addresses: list[int]) -> list[list[float]]:
    """GB/s by turn and function: in each turn all of them run once, one after the other."""
    processors = cpu.usable_cores()
    parts = [_CoreWeights(bits, BYTES // processors) for _ in range(processors)]
    functions = [ctypes.CFUNCTYPE(None, ctypes.c_int64)(address) for address in addresses]  # they release the GIL

    def rate(function: Any) -> float:
        threads = [threading.Thread(target=part.multiply, args=(function,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(part.rate for part in parts)

    return [[rate(function) for function in functions] for _ in range(1 + TURNS)][1:]


def main(level: cpu.Level) -> None:
    """Print the chosen prefetching as JSON, for the manifest of a library; null where it can't be measured."""
    found = chosen(level)
    if found is None:
        print("null")
    else:
        best, rates = found
        by_candidate = [
            {"prefetch": candidate, **{kind: rates[kind][number] for kind in KINDS}}
            for number, candidate in enumerate(CANDIDATES)
        ]
        print(json.dumps({"chosen": best._asdict(), "processor": cpu.model_name(), "gb_per_s": by_candidate}))
