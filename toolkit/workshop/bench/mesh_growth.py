"""What the host does in a step as a mesh grows: messages to other processes, data shards, simulated devices.

    python mesh_growth.py [--devices 8 64 256] [--rows 256] [--context 8192] [--simulated 1 2 4 8]

Nothing here needs so many devices: the scheduler, the buffers and the messages are the session's own, and what devices
would compute is left out. `--simulated` opens a small model on so many simulated devices of this CPU, which shows what
a step costs the host there, and what the sums alone take. Prints, asserts nothing.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import harness
import numpy as np

from rekindle._src.channels.channel import Channel, ChannelKeys, MessageKind
from rekindle._src.core.records import Request, RowResult, StepPlan, StepResult
from rekindle._src.core.sampling import Sampling
from rekindle._src.data_shards.packing import DataShards, DataUpload
from rekindle._src.data_shards.scheduler import DataScheduler, ShardScheduler
from rekindle._src.kvcache import PagePool
from rekindle._src.processes.codec import StepCodec
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.packing import (
    Constants,
    Layout,
    Upload,
)
from rekindle._src.scheduling.scheduler import Scheduler
from rekindle._src.scheduling.sequence import Limits

HOST = 8  # devices of one machine
PAGE = 64
STEPS = 64
DRAIN = """
import selectors, socket, sys
chosen = selectors.DefaultSelector()
for _ in range(int(sys.argv[2])):
    chosen.register(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), selectors.EVENT_READ)
while chosen.get_map():
    for key, _ in chosen.select():
        if not key.fileobj.recv(1 << 16):
            chosen.unregister(key.fileobj)
"""


class Step(NamedTuple):
    """Milliseconds of the parts of a step on the host."""

    plan: float
    pack: float
    encode: float = 0.0
    send: float = 0.0
    commit: float = 0.0
    bytes: int = 0  # to one process

    @property
    def all(self) -> float:
        return self.plan + self.pack + self.encode + self.send + self.commit


def main() -> None:
    arguments = harness.options(__doc__, devices=[8, 64, 256], rows=256, context=8192, simulated=[0])
    rows, context = arguments.rows, arguments.context
    print(f"One model over all devices, {HOST} of each process; {rows} rows of {context} tokens decode:")
    columns = _names("plan pack encode send commit")
    print(f"{'devices':>8}{'processes':>10}{'bytes each':>11}{'bytes all':>10}{columns}")
    for devices in arguments.devices:
        processes = max(1, devices // HOST)
        steps = told_to(processes - 1, rows, context)
        each = max(step.bytes for step in steps)
        print(_line(devices, f"{processes:10}{each:11,}{each * (processes - 1):10,}", steps), flush=True)
    print(f"\nData shards of {HOST} devices in one process, {rows // 8} rows each:")
    print(f"{'devices':>8}{'shards':>10}{'rows':>11}{'':10}{columns}")
    for devices in arguments.devices:
        shards = max(1, devices // HOST)
        print(_line(devices, f"{shards:10}{shards * (rows // 8):11,}{'':10}", sharded(shards, rows // 8, context)))
    if any(arguments.simulated):
        simulated(arguments.simulated)


def _names(text: str) -> str:
    return "".join(f"{name:>8}" for name in text.split()) + f"{'all, ms':>9}"


def _line(devices: int, cells: str, steps: Sequence[Step]) -> str:
    parts = [statistics.median(getattr(step, name) for step in steps) for name in Step._fields[:5]]
    return f"{devices:8}{cells}" + "".join(f"{part:8.2f}" for part in parts) + f"{sum(parts):9.2f}"


def requests(rows: int, context: int) -> Iterator[Request]:
    rng = np.random.default_rng(0)
    for index in range(rows):
        prompt = rng.integers(0, 50_000, context - 2 * STEPS - index % PAGE, dtype=np.int32)
        yield Request(f"r{index}", prompt, Sampling(max_tokens=2 * STEPS, temperature=0.7, seed=index))


def timed(times: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    """Call, and note the milliseconds."""
    start = time.perf_counter()
    result = call(*arguments)
    times.append(1e3 * (time.perf_counter() - start))
    return result


def told_to(followers: int, rows: int, context: int) -> list[Step]:
    """Steps of a leader that tells so many followers of them, over connections of this machine."""
    limits = Limits(rows, 1 << 17, context, PAGE, 64)
    scheduler = Scheduler(limits, PagePool(rows * context // PAGE + 1), cache=None)
    codec = StepCodec(rows, context // PAGE, PAGE)
    with Connected(followers) as channels:
        return steps_of(scheduler, limits, rows, Upload, STEPS, (codec, channels))


def steps_of(scheduler: Any, limits: Limits, rows: int, make: Any, count: int, others: Any = None) -> list[Step]:
    """So many steps in which all rows decode, packed by what `make` gives for a layout."""
    for request in requests(rows, limits.max_model_len):
        scheduler.submit(request)
    constants, uploads, steps = Constants(rows), dict[Bucket, Any](), list[Step]()
    while len(steps) < count:
        times: list[float] = []
        plan: StepPlan = timed(times, scheduler.plan)
        bucket = Bucket(limits.max_requests, limits.max_tokens_per_step if plan.prefill else 0)
        layout = Layout.of(bucket, max_requests=limits.max_requests, width=limits.max_model_len // PAGE)
        upload = uploads[bucket] if bucket in uploads else uploads.setdefault(bucket, make(layout))
        for row in plan.rows:
            if row.fresh:
                constants.put(row)
        timed(times, upload.pack, plan, constants)
        whole, each = len(plan.decode) == rows, 0
        if others is not None:
            codec, channels = others
            message, before = timed(times, codec.encode, layout, upload.ints, upload.floats), channels.sent
            if whole:
                timed(times, channels.send, message)
            each = (channels.sent - before) // max(1, channels.count)
        tokens = tuple(RowResult(row.request.id, row.epoch, 5 if row.samples else None) for row in plan.rows)
        timed(commit := [], scheduler.commit, StepResult(plan, tokens))
        if whole:
            steps.append(Step(*times, commit=commit[0], bytes=each))
    return steps


class Connected:
    """Channels to so many ends, all in one other process that throws away what comes."""

    def __init__(self, count: int) -> None:
        self.count, self._channels = count, list[Channel]()

    def __enter__(self) -> Connected:
        if self.count:
            with socket.create_server(("127.0.0.1", 0), backlog=self.count) as server:
                command = [sys.executable, "-c", DRAIN, str(server.getsockname()[1]), str(self.count)]
                self._other = subprocess.Popen(command)
                keys = ChannelKeys(b"a" * 32, b"b" * 32)
                self._channels = [Channel(server.accept()[0], keys, silence=30) for _ in range(self.count)]
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()
        if self.count:
            self._other.wait(10)

    @property
    def sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._channels)

    def send(self, message: bytes) -> None:
        for channel in self._channels:
            channel.send(MessageKind.STEP, message)


def sharded(count: int, rows: int, context: int) -> list[Step]:
    """Steps of so many data shards, each with as many rows."""
    pages = rows * context // PAGE + 1
    limits, shards = Limits(rows, 1 << 15, context, PAGE, 64), DataShards(rows, pages, count)
    if count == 1:
        return steps_of(Scheduler(limits, PagePool(pages), cache=None), limits, rows, Upload, STEPS // 2)
    limits, arrivals = Limits(rows, 1 << 15, context, PAGE, 64, max_queue=count * rows), itertools.count()
    scheduler = DataScheduler(
        [
            ShardScheduler(limits, PagePool(pages, first=at * pages), arrivals=arrivals, first_slot=at * rows)
            for at in range(count)
        ]
    )
    return steps_of(scheduler, limits, count * rows, lambda layout: DataUpload(layout, shards), STEPS // 2)


def simulated(devices: Sequence[int]) -> None:
    """A small model on simulated devices: each in a process of its own, since their number is fixed when JAX starts."""
    print("\nA Llama of 8 layers, 512 wide, on simulated devices of this CPU; 8 rows decode, ms a step:")
    print(
        f"{'devices':>8}{'host':>8}{'its threads':>13}{'device':>9}{'sums alone':>12}{'share':>8}{'sums':>6}"
        f"{'bytes a token':>15}"
    )
    for count in devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        told = harness.child(one, count, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
        share = told["alone"] / told["device"] if told["device"] else 0.0
        print(
            f"{count:8}{told['host']:8.2f}{told['threads']:13.2f}{told['device']:9.2f}{told['alone']:12.2f}{share:8.0%}{told['sums']:6}"
            f"{told['bytes']:15,}",
            flush=True,
        )


def one(devices: int) -> dict[str, float]:
    """In a process of its own."""
    import rekindle

    model = harness.llama(8, 512, num_key_value_heads=8)
    options: dict[str, Any] = {"max_requests": 8, "max_model_len": 512, "disk_memory": 0, "quiet": True}
    prompts = [list(range(5 + row, 25 + row)) for row in range(8)]
    with (
        tempfile.TemporaryDirectory() as folder,
        rekindle.open_sync(model, mesh=None if devices == 1 else devices, cache_dir=folder, **options) as session,
    ):
        session.generate_sync(prompts, max_tokens=16, ignore_eos=True)  # compiles
        session.cache.clear(tier="memory").result_sync()
        before, used = session.stats(), processor_seconds()
        session.generate_sync(prompts, max_tokens=200, ignore_eos=True)
        after, used = session.stats(), processor_seconds() - used
    steps = after.steps - before.steps
    mesh = after.mesh

    def milliseconds(name: str) -> float:
        return 1e3 * ((getattr(after, name) or 0.0) - (getattr(before, name) or 0.0)) / steps

    return {
        "threads": 1e3 * used / steps, "host": milliseconds("host_seconds"), "device": milliseconds("device_seconds"),
        "alone": milliseconds("collective_seconds"), "sums": 0 if mesh is None else mesh.sums,
        "bytes": 0 if mesh is None else mesh.bytes_per_token,
    }  # fmt: skip


def processor_seconds() -> float:
    """Processor time of the session's own threads so far, without what they wait for a core that devices have."""
    own = [thread for thread in threading.enumerate() if thread.name in ("rekindle session", "rekindle device")]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in own if thread.ident is not None]
    return sum(map(time.clock_gettime, clocks))


if __name__ == "__main__":
    main()
