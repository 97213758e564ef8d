"""A processor that was changed is not served by the program of what it was."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rekindle._src.programs.user_functions import LogitsProcessor, function_hash

CELL = """
banned = np.array([True, False])
strength = 2.0

def inner(x):
    return x * strength

def process(logits, context):
    return jnp.where(banned, -jnp.inf, inner(logits) + 1.5)
"""


def made(source: str) -> Any:
    namespace: dict[str, Any] = {"jnp": jnp, "np": np}
    exec(compile(source, "<cell>", "exec"), namespace)
    return namespace["process"]


def test_the_same_cell_run_again_is_the_same() -> None:
    assert function_hash(made(CELL)) == function_hash(made(CELL)) == function_hash(made("\n\n" + CELL))


@pytest.mark.parametrize(
    ("before", "after"),
    [("+ 1.5", "+ 1.6"), ("2.0", "3.0"), ("[True, False]", "[False, True]"), ("x * ", "x - "), ("-jnp.inf", "jnp.inf")],
)
def test_a_change_anywhere_in_it_is_seen(before: str, after: str) -> None:
    assert function_hash(made(CELL)) != function_hash(made(CELL.replace(before, after)))


def test_captured_values_defaults_and_partials_count() -> None:
    def maker(factor: Any) -> Any:
        return lambda logits, context: logits * factor

    def scaled(logits: Any, context: Any, by: float = 1.0) -> Any:
        return logits * by

    assert function_hash(maker(1.0)) == function_hash(maker(1.0)) != function_hash(maker(2.0))
    assert function_hash(maker(jnp.ones(2))) == function_hash(maker(jnp.ones(2))) != function_hash(maker(jnp.zeros(2)))
    partials = [function_hash(functools.partial(scaled, by=by)) for by in (1.0, 2.0)]
    assert len({*partials, function_hash(scaled)}) == 3
    assert function_hash(jax.jit(maker(1.0))) != function_hash(jax.jit(maker(2.0)))


def test_objects_count_by_their_call_and_their_values() -> None:
    class Ban:
        def __init__(self, token: int) -> None:
            self.token = token

        def __call__(self, logits: Any, context: Any) -> Any:
            return logits.at[:, self.token].set(-jnp.inf)

    assert function_hash(Ban(1)) == function_hash(Ban(1)) != function_hash(Ban(2))


def test_a_function_that_uses_itself_or_the_world_ends() -> None:
    def loop(logits: Any, context: Any) -> Any:
        return loop(logits, context) if np is None else sys

    assert function_hash(loop) == function_hash(loop)


@pytest.mark.thorough
def test_other_processes_agree() -> None:
    source = f"import numpy as np, jax.numpy as jnp\n{CELL}\n"
    source += "from rekindle._src.programs.user_functions import function_hash\nprint(function_hash(process))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", source],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_it_is_part_of_a_processors_key() -> None:
    one, other = (LogitsProcessor(made(CELL.replace("1.5", text)), name="p") for text in ("1.5", "1.6"))
    assert one.key != other.key
    assert one.key[:2] == other.key[:2] == ("p", "1")
