"""What moving pages between sessions costs, and what roles bring, on this machine.

python pages.py wire                 GB/s from one process's host memory to another's, and from its device
python pages.py flood                pauses between tokens under a flood of prompts: two replicas that do
                                                 both against one for prompts and one for tokens,
                                                 compared with the simulator
"""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import anyio
import harness
import numpy as np
from fleet import measured, pace

import rekindle
from rekindle._src.bench.simulation import HEAD, SimulatedRequest, Watch, simulate
from rekindle._src.channels.bulk import BulkChannel
from rekindle._src.core.prefix import Prefix
from rekindle._src.kvcache.sharing import PageAddress, Puller

SECRET = "a secret of this benchmark"


def opened(name: str, tokens: int) -> Any:
    return rekindle.open_sync(
        harness.model(name), max_requests=4, max_tokens_per_step=256, max_model_len=tokens + 64, disk_memory=0,
        host_memory=2 << 30, device_memory=1 << 30, quiet=True,
    )  # fmt: skip


def prompt(tokens: int, vocabulary: int = 200) -> list[int]:
    return np.random.default_rng(0).integers(3, vocabulary, tokens).tolist()


def share(arguments: Any) -> None:
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


def wire(arguments: Any) -> None:
    command = [sys.executable, __file__, "share", "--model", arguments.model, "--tokens", str(arguments.tokens)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None
    assert other.stdout is not None
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
                found = puller.prefix(address, Prefix(np.asarray(prompt(arguments.tokens), np.int32)))
                found.held.release()
                if number:  # the first one fills fresh memory
                    rates.append(found.bytes / found.seconds / 1e9)
                forget(session)
            assert found is not None
            print(
                f"{arguments.model}: {found.pages} pages, {found.bytes / 1e6:.0f} MB from {source} memory: "
                f"{harness.spread(rates, '.2f')} GB/s",
                flush=True,
            )
    other.communicate("")


def load(arguments: Any) -> list[SimulatedRequest]:
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


def flood(arguments: Any) -> None:
    anyio.run(_flood, arguments)


async def _flood(arguments: Any) -> None:
    asks = load(arguments)
    options: dict[str, Any] = {
        "max_requests": 16, "max_tokens_per_step": 256, "max_model_len": 1024, "disk_memory": 0, "quiet": True,
    }  # fmt: skip
    cost, spread, config = await pace(options)
    print(cost)
    print(f"{len(asks)} requests, {arguments.streams} of them streams\n{'':24}{HEAD}")
    sizes: dict[str, dict[str, Any]] = {
        "together": {"replicas": 2}, "apart": {"roles": {"prefill": 1, "decode": 1}},
    }  # fmt: skip
    for _, name in harness.turns(sizes, arguments.rounds, 0):
        async with rekindle.fleet("tiny", router="shortest", **sizes[name], **options) as fleet:
            real, after = await measured(fleet, asks, Streams(asks))
            print(f"{name + ', real':24}{real}")
            print(f"  {after.handed_over} handed over, {after.pulled_pages} pages pulled, {after.failed_pulls} failed")
    for name, size in sizes.items():
        told = simulate(asks, config, cost, router="shortest", move=1e-6, watch=Streams(asks), spread=spread, **size)
        print(f"{name + ', simulated':24}{told}", flush=True)


def main() -> None:
    arguments = harness.options(
        __doc__, "what", what=(str, ("wire", "flood", "share")), model=("tiny", "tiny, or a shape such as 135M"),
        tokens=(960, "wire: of the prompt whose pages move"), rounds=5,
        socket=(False, "wire: through the socket, as where no memory is shared"), streams=6,
        output=(300, "flood: tokens of each stream"), seconds=6.0, rate=(12.0, "flood: prompts a second"),
    )  # fmt: skip
    {"wire": wire, "flood": flood, "share": share}[arguments.what](arguments)


if __name__ == "__main__":
    main()
