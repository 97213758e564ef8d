"""Forks a writer again and again, kills it at a random moment, and looks at what it left. Run by test_snapshot.py."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "toolkit"), str(ROOT / "kernels"), str(ROOT / "tests")]
os.environ["JAX_PLATFORMS"] = "cpu"

from helpers.stored_pages import IDENTITY, chain, same  # noqa: E402
from rekindle._src.core.atomic_checkpoint import orbax  # noqa: E402
from rekindle._src.kvcache.persist import snapshot  # noqa: E402
from rekindle._src.kvcache.tiers.disk import DiskTier  # noqa: E402

PAGES = 3  # more in each save


def write(folder: Path, progress: int) -> None:
    """Serve and save until killed; says how far it got."""
    disk = DiskTier(folder, 1 << 20, IDENTITY)
    disk.scan()
    length = 0
    while True:
        length += PAGES
        pairs = chain(0, length)
        disk.write(pairs)
        snapshot.save(folder, "mine", IDENTITY, [page for page, _ in pairs])
        disk.collect()
        os.write(progress, length.to_bytes(4, "little"))


def look(folder: Path, saved: int) -> None:
    """What the writer said that it had saved is there, or newer, and every byte is right."""
    disk = DiskTier(folder, 1 << 20, IDENTITY)
    disk.scan()
    assert disk.damaged == 0, "a broken segment"
    try:
        pages = snapshot.pages_of_snapshot(folder, IDENTITY, "mine")
    except Exception:
        assert not saved, "the snapshot is gone"
        return
    assert len(pages) >= saved, f"{len(pages)} pages are listed, {saved} had been saved"
    assert len(pages) % PAGES == 0, "half a snapshot"
    payloads = {page.digest: payload for page, payload in chain(0, len(pages))}
    for page in pages:
        assert same(disk.load(page.digest), payloads[page.digest])


def main(folder: Path, times: int) -> None:
    orbax()  # imported once, before forking
    draw = random.Random(times)
    for turn in range(times):
        place = folder / str(turn)
        place.mkdir()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            write(place, writing)
        os.close(writing)
        time.sleep(draw.uniform(0.0, 0.8))  # up to thirty saves
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reading, "rb") as file:
            said = file.read()
        saved = int.from_bytes(said[-4:], "little")
        look(place, saved)
        print(f"killed after {saved} pages")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
