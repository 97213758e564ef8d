"""Sessions with a working set larger than their device pages, and the plain loop's answers to their prompts.

As a script: serves in a folder until the pages are on disk, says so, and waits to be killed.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "toolkit"), str(ROOT / "kernels"), str(ROOT / "tests")]
    os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402

import rekindle  # noqa: E402
from helpers import checkpoints  # noqa: E402
from helpers.plain_loop import plain_loop  # noqa: E402
from helpers.sessions import writer_of  # noqa: E402
from rekindle._src.session.session import Session  # noqa: E402

MODEL = checkpoints.case("llama")
LENGTH, NEW = 70, 6
SHARED = 32  # leading tokens that all prompts have in common


@functools.cache
def prompt(index: int) -> tuple[int, ...]:
    """Eight pages of 8 tokens, the first four the same in all of them."""
    shared = np.random.default_rng(0).integers(3, 160, SHARED)
    own = np.random.default_rng(100 + index).integers(3, 160, LENGTH - SHARED)
    return tuple(int(token) for token in (*shared, *own))


@functools.cache
def plain(index: int) -> tuple[int, ...]:
    return tuple(plain_loop(MODEL, prompt(index), NEW, context=128))


def opened(folder: Path, *, model: Any = MODEL, **options: Any) -> Session:
    """16 usable pages; copying is always preferred, so that a test knows what happens."""
    settings: dict[str, Any] = {
        "dtype": "float32", "page_size": 8, "device_pages": 17, "max_requests": 2, "max_tokens_per_step": 32,
        "max_model_len": 128, "cache_dir": str(folder), "precompile": "lazy",
    }  # fmt: skip
    session = rekindle.open_sync(model, **settings | options)
    tiers = writer_of(session).tiers
    assert tiers is not None
    tiers.costs.mode = "always"
    return session


def ask(session: Session, index: int) -> int:
    """Generate and compare; how many prompt tokens came from the cache."""
    done = session.generate_sync(list(prompt(index)), max_tokens=NEW, ignore_eos=True)
    assert done.token_ids == plain(index), f"prompt {index}"
    return int(done.usage.cached_tokens)


if __name__ == "__main__":
    with opened(Path(sys.argv[1])) as served:
        ask(served, 0)
        while served.cache.stats().disk.pages < 9:  # type: ignore[union-attr]
            time.sleep(0.1)
        print("saved", flush=True)
        time.sleep(600)
