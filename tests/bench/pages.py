"""What moving pages between sessions costs, and what roles bring, on this machine.

python tests/bench/pages.py wire                 GB/s from one process's host memory to another's, and from its device
python tests/bench/pages.py flood                pauses between tokens under a flood of prompts: two replicas that do
                                                 both against one for prompts and one for tokens, beside the simulator
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("toolkit", "kernels", "tests/bench")]

import rekindle  # noqa: E402
from rekindle._src.bench.shapes import random_shape  # noqa: E402
from rekindle._src.bench.simulation import (  # noqa: E402
    HEAD,
    SimulatedRequest,
    Watch,
    measure,
    replay,
    simulate,
)
from rekindle._src.processes.bulk import BulkChannel  # noqa: E402
from rekindle._src.session.page_sharing import PageAddress, Puller  # noqa: E402

SECRET = "a secret of this benchmark"


def options(tokens: int) -> dict[str, Any]:
    return {
        "max_requests": 4, "max_tokens_per_step": 256, "max_model_len": tokens + 64, "disk_memory": 0,
        "host_memory": 2 << 30, "device_memory": 1 << 30, "quiet": True,
    }  # fmt: skip


def opened(name: str, tokens: int) -> Any:
    model: Any = name if name == "tiny" else random_shape(name)
    return rekindle.open_sync(model, **options(tokens))


def prompt(tokens: int, vocabulary: int = 200) -> list[int]:
    return np.random.default_rng(0).integers(3, vocabulary, tokens).tolist()


def share(arguments: argparse.Namespace) -> None:
    """The other process: has the pages of a prompt, on its device or in host memory, and shares them."""
    with opened(arguments.model, arguments.tokens) as session:
        session.generate_sync(prompt(arguments.tokens), max_tokens=1, ignore_eos=True)
        print(session.cache.share(secret=SECRET).result_sync().address, flush=True)
        for line in sys.stdin:
            if line.strip() == "host":
                offload(session)
                print("done", flush=True)


def forget(session: Any) -> None:
    """Drop the pages in host memory, but not the memory: in a session that has run for a while it was used before."""
    writer = session._cache_writer
    for digest in session._host.ask(lambda: [writer.cache.digest_of(node) for node in writer.cache]):
        writer.tiers.host.discard(digest)


def offload(session: Any) -> None:
    """Copy all pages into host memory."""
    writer = session._cache_writer
    nodes = session._host.ask(lambda: list(writer.cache))
    for page, payload in writer.payloads(session._host.ask(lambda: [writer.page_record(node) for node in nodes]), 64):
        writer.tiers.host.put(page.digest, payload)


def wire(arguments: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "share", "--model", arguments.model, "--tokens", str(arguments.tokens)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None and other.stdout is not None
    with opened(arguments.model, arguments.tokens) as session:
        host, _, port = other.stdout.readline().strip().rpartition(":")
        address = PageAddress(host, int(port), SECRET.encode())
        puller = Puller(session._host, session._cache_writer)
        if arguments.socket:
            setattr(BulkChannel, "take_memory", lambda channel, offer: False)  # noqa: B010
        for source in ("device", "host"):
            if source == "host":
                other.stdin.write("host\n")
                other.stdin.flush()
                other.stdout.readline()
            rates, found = [], None
            for number in range(arguments.rounds + 1):
                found = puller.prefix(address, np.asarray(prompt(arguments.tokens), np.int32))
                found.held.release()
                if number:  # the first one fills fresh memory
                    rates.append(found.bytes / found.seconds / 1e9)
                forget(session)
            assert found is not None
            print(
                f"{arguments.model}: {found.pages} pages, {found.bytes / 1e6:.0f} MB from {source} memory: "
                f"{statistics.median(rates):.2f} GB/s (of {len(rates)}, {min(rates):.2f} to {max(rates):.2f})",
                flush=True,
            )
    other.communicate("")


def load(arguments: argparse.Namespace) -> list[SimulatedRequest]:
    """Streams that go on all the time, and among them prompts that are new to every cache."""
    draw = random.Random(1)
    found = [
        SimulatedRequest(0.0, ((number + 1, 70),), arguments.output, b"s%d" % number, b"s%d" % number)
        for number in range(arguments.streams)
    ]
    at, number = 0.5, 0
    while at < arguments.seconds:
        number += 1
        size = draw.randint(600, 900)
        found.append(SimulatedRequest(at, ((1000 + number, size),), 4, b"f%d" % number, b"f%d" % number))
        at += draw.expovariate(arguments.rate)
    return sorted(found)


class Streams(Watch):
    """Counts the pauses of the streams, but for that before the second token, when they change their replica."""

    def __init__(self, asks: list[SimulatedRequest]) -> None:
        super().__init__()
        self._streams = {str(number) for number, ask in enumerate(asks) if ask.opening.startswith(b"s")}
        self._tokens: dict[str, int] = {}

    def received(self, name: str, tokens: int, at: float, *, ended: bool) -> None:
        before = len(self.between)
        super().received(name, tokens, at, ended=ended)
        seen = self._tokens[name] = self._tokens.get(name, 0) + tokens
        if name not in self._streams or seen - tokens < 2:
            del self.between[before:]


def flood(arguments: argparse.Namespace) -> None:
    anyio.run(_flood, arguments)


async def _flood(arguments: argparse.Namespace) -> None:
    from fleet import eventually, outcome, warm

    asks = load(arguments)
    given: dict[str, Any] = {
        "max_requests": 16, "max_tokens_per_step": 256, "max_model_len": 1024, "disk_memory": 0, "quiet": True,
    }  # fmt: skip
    async with rekindle.open("tiny", **given) as session:
        await warm(session)
        (cost, spread), config = await anyio.to_thread.run_sync(measure, session), session.config
    print(cost)
    print(f"{len(asks)} requests, {arguments.streams} of them streams\n{'':24}{HEAD}")
    sizes: dict[str, dict[str, Any]] = {
        "together": {"replicas": 2}, "apart": {"roles": {"prefill": 1, "decode": 1}},
    }  # fmt: skip
    for _ in range(arguments.rounds):
        for name, size in sizes.items():
            async with rekindle.fleet("tiny", router="shortest", **size, **given) as fleet:
                await anyio.to_thread.run_sync(lambda fleet=fleet: eventually(lambda: fleet.stats().ready == 2, 120.0))
                await warm(fleet)
                await anyio.sleep(2.5)  # figures come with the mail
                before = fleet.stats()
                watch, seconds = await replay(fleet, asks, Streams(asks))
                await anyio.sleep(2.5)
                after = fleet.stats()
                print(f"{name + ', real':24}{outcome(watch, seconds, after, before, len(asks))}")
                print(
                    f"  {after.handed_over} handed over, {after.pulled_pages} pages pulled, {after.failed_pulls} failed"
                )
    for name, size in sizes.items():
        told = simulate(asks, config, cost, router="shortest", move=1e-6, watch=Streams(asks), spread=spread, **size)
        print(f"{name + ', simulated':24}{told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("wire", "flood", "share"))
    parser.add_argument("--model", default="tiny", help="tiny, or a shape such as 135M")
    parser.add_argument("--tokens", type=int, default=960, help="wire: of the prompt whose pages move")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--socket", action="store_true", help="wire: through the socket, as where no memory is shared")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--output", type=int, default=300, help="flood: tokens of each stream")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rate", type=float, default=12.0, help="flood: prompts a second")
    arguments = parser.parse_args()
    {"wire": wire, "flood": flood, "share": share}[arguments.what](arguments)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
