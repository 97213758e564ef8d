"""Masks that the host writes while a program waits for them."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.python import run_python
from rekindle_kernels import MaskGate, gated_masks, unavailable_reason
from rekindle_kernels.native import mask_gate

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
VOCAB = 100  # four words, of which the last is not full


@jax.jit
def program(address: jax.Array, logits: jax.Array) -> jax.Array:
    return gated_masks(address, logits)


def in_thread(gate: MaskGate, rows: int) -> tuple[threading.Thread, list[np.ndarray]]:
    """A thread that runs the program, and what it gives."""
    logits, found = jnp.zeros((rows, VOCAB)), list[np.ndarray]()
    thread = threading.Thread(target=lambda: found.append(np.asarray(program(gate.address, logits))))
    thread.start()
    return thread, found


@pytest.mark.parametrize("rows", [1, 3])
def test_a_program_waits_for_the_masks(rows: int) -> None:
    random = np.random.default_rng(rows)
    gate = MaskGate(rows, 4)
    assert gate.masks.shape == (rows, 4) and (gate.masks == -1).all()
    for _ in range(3):
        gate.close()
        thread, found = in_thread(gate, rows)
        time.sleep(0.3)  # beyond the time for which it spins
        assert thread.is_alive() and not found
        gate.masks[:] = masks = random.integers(-(2**31), 2**31, (rows, 4)).astype(np.int32)
        gate.open()
        thread.join(60)
        assert found[0].tolist() == masks.tolist() and not gate.missed
        gate.release()


def test_it_goes_on_at_once_where_the_gate_is_open() -> None:
    gate = MaskGate(2, 4)
    gate.close()
    gate.masks[1] = 7
    gate.open()
    assert np.asarray(program(gate.address, jnp.zeros((2, VOCAB)))).tolist() == [[-1] * 4, [7] * 4]


def test_the_thread_that_has_to_open_it_never_waits() -> None:
    """XLA runs a program in the thread that dispatches it where that is not asynchronous."""
    program = """
import jax.numpy as jnp
from rekindle_kernels import MaskGate, gated_masks
import jax
gate = MaskGate(2, 4)
gate.close()
print(jax.jit(gated_masks)(gate.address, jnp.zeros((2, 100))).any(), gate.missed)
gate.close()
assert not gate.missed
"""
    printed = run_python("-c", program, JAX_CPU_ENABLE_ASYNC_DISPATCH="0")
    assert printed.split() == ["False", "True"], "no token may come"


def test_a_gate_that_is_forgotten_stays_while_a_program_may_wait_there() -> None:
    gate = MaskGate(1, 4)
    gate.close()
    watched, address = weakref.ref(gate.masks), gate.address
    del gate
    gc.collect()
    assert watched() is not None
    (kept,) = [gate for gate in mask_gate._in_use if gate.address is address]
    kept.release()
    del kept
    gc.collect()
    assert watched() is None
