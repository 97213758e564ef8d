"""Opens what the process before left, serves and saves until it is killed. Run by test_killed.py.

    python killed_while_serving.py FOLDER EXPECTED SEED

Says line by line how far it got: what it restored, that its answers were right, what it has saved.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("toolkit", "kernels", "tests")]
    os.environ["JAX_PLATFORMS"] = "cpu"

from helpers.tiered import NEW, opened, prompt  # noqa: E402
from rekindle._src.session.session import Session  # noqa: E402
from rekindle.errors import StoreError  # noqa: E402

KNOWN = 6  # prompts whose continuation the parent computed in the plain loop


def reopened(folder: Path) -> Session:
    """With the snapshot if there is one; before the first save there is none."""
    try:
        return opened(folder, restore="mine")
    except StoreError as error:
        if "damaged" in str(error) or "There are none" not in str(error):
            raise
        return opened(folder, restore="auto")


def look(session: Session, expected: list[list[int]]) -> tuple[int, int]:
    """Every answer is right, with whatever the store brought back; pages that are known, and tokens that they saved."""
    pages, hits = session.stats().cache.nodes, 0
    for index, tokens in enumerate(expected):
        done = session.generate_sync(list(prompt(index)), max_tokens=NEW, ignore_eos=True)
        assert list(done.token_ids) == tokens, f"prompt {index}: {done.token_ids} instead of {tokens}"
        hits += done.usage.cached_tokens
    stats = session.cache.stats()
    assert stats.disk is not None and stats.disk.damaged == 0, "a broken segment"
    session.check_integrity()
    return pages, hits


def main(folder: Path, expected: list[list[int]], seed: int) -> None:
    draw = random.Random(seed)

    def say(*words: Any) -> None:
        print(*words, flush=True)

    with reopened(folder) as session:
        say("right", *look(session, expected))
        while True:
            handles = [
                session.submit([draw.randrange(3, 160) for _ in range(40)], max_tokens=8, ignore_eos=True)
                for _ in range(3)
            ]
            report = session.save("mine").result_sync()  # while they run
            say("saved", report.pages)
            for handle in handles:
                handle.result_sync()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3]))
