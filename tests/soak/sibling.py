"""Another process on the same cache folder: serves, saves and prunes until it is killed. Run by test_soak.py.

python sibling.py serve|prune FOLDER SEED
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("toolkit", "kernels", "tests")]
    os.environ["JAX_PLATFORMS"] = "cpu"

from helpers.tiered import NEW, opened, prompt  # noqa: E402


def serve(folder: Path, seed: int) -> None:
    """Ask and save for ever, under a name of its own."""
    draw = random.Random(seed)
    with opened(folder, restore="auto") as session:
        print("open", flush=True)
        while True:
            index = draw.randrange(4)
            session.generate_sync(list(prompt(index)), max_tokens=NEW, ignore_eos=True)
            session.generate_sync([draw.randrange(3, 160) for _ in range(40)], max_tokens=4, ignore_eos=True)
            session.save(f"sibling-{seed % 3}").result_sync()
            print("saved", flush=True)


def prune(folder: Path, seed: int) -> None:
    """Prune the folder every second or two, to a random size."""
    draw = random.Random(seed)
    while True:
        size = draw.choice(("0", "64KiB", "1MiB", "1GiB"))
        command = [sys.executable, "-m", "rekindle", "cache", "prune", "--to", size, "--yes"]
        command += ["--cache-dir", str(folder)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels"))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        print("pruned" if done.returncode == 0 else f"refused {done.stderr[-300:]!r}", flush=True)
        time.sleep(draw.uniform(0.5, 2.0))


if __name__ == "__main__":
    {"serve": serve, "prune": prune}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
