"""A page has the same name in every process, whatever Python's hash seed, and another name under other weights.

Upstream: https://github.com/LMCache/LMCache/issues/1139
The root of vLLM's block hashes was random, so no process hit what another had stored.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rekindle._src.kvcache import root_digest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import numpy as np
from rekindle._src.kvcache import PagePool, PrefixCache
from rekindle._src.kvcache.persist.identity import Identity
for weights in ("mine", "others"):
    cache = PrefixCache(PagePool(8), 4, Identity(weights, "float32", 4).root)
    node = cache.graft(np.arange(12, dtype=np.int32))[-1]
    print(cache.digest_of(node).hex(), node.key)
"""


def names(seed: str) -> list[str]:
    paths = os.pathsep.join(str(ROOT / part) for part in ("toolkit", "kernels"))
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout.split()


def test_lesson_08_names_of_pages_are_the_same_in_every_process() -> None:
    first, second = names("1"), names("2")
    mine, key, others, other_key = first
    assert [mine, others] == second[::2]
    assert mine != others
    assert key == other_key, "a lookup key is about tokens alone"


def test_lesson_08_parts_of_a_root_do_not_run_together() -> None:
    assert root_digest("ab", "c") != root_digest("a", "bc")
