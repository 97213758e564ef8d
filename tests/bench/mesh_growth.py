"""What the host does in a step as a mesh grows: messages to other processes, data shards, simulated devices.

    python tests/bench/mesh_growth.py [--devices 8 64 256] [--rows 256] [--context 8192] [--simulated 1 2 4 8]

Nothing here needs so many devices: the scheduler, the buffers and the messages are the session's own, and what devices
would compute is left out. `--simulated` opens a small model on so many simulated devices of this CPU, which shows what
a step costs the host there, and what the sums alone take. Prints, asserts nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "toolkit", "kernels")]

import numpy as np  # noqa: E402

from rekindle._src.core.records import Request, RowResult, StepPlan, StepResult  # noqa: E402
from rekindle._src.core.sampling import Sampling  # noqa: E402
from rekindle._src.kvcache import PagePool  # noqa: E402
from rekindle._src.processes.channel import Channel, Keys, Kind  # noqa: E402
from rekindle._src.processes.codec import StepCodec  # noqa: E402
from rekindle._src.programs.buckets import Bucket  # noqa: E402
from rekindle._src.programs.packing import (  # noqa: E402
    Constants,
    DataShards,
    DataUpload,
    Layout,
    Upload,
)
from rekindle._src.scheduling.data_scheduler import DataScheduler, ShardScheduler  # noqa: E402
from rekindle._src.scheduling.scheduler import Scheduler  # noqa: E402
from rekindle._src.scheduling.sequence import Limits  # noqa: E402

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--simulated", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
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
    if arguments.simulated:
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


def committed(scheduler: Any, plan: StepPlan) -> float:
    """Give every row a token; returns the milliseconds that the scheduler takes for that."""
    told = tuple(RowResult(row.request.id, row.epoch, 5 if row.samples else None) for row in plan.rows)
    start = time.perf_counter()
    scheduler.commit(StepResult(plan, told))
    return 1e3 * (time.perf_counter() - start)


def told_to(followers: int, rows: int, context: int) -> list[Step]:
    """Steps of a leader that tells so many followers of them, over connections of this machine."""
    limits = Limits(rows, 1 << 17, context, PAGE, 64)
    scheduler = Scheduler(limits, PagePool(rows * context // PAGE + 1), cache=None)
    for request in requests(rows, context):
        scheduler.submit(request)
    codec, constants, uploads = StepCodec(rows, context // PAGE, PAGE), Constants(rows), dict[Bucket, Upload]()
    found = list[Step]()
    with Connected(followers) as channels:
        while len(found) < STEPS:
            start = time.perf_counter()
            plan = scheduler.plan()
            planned = time.perf_counter()
            assert plan is not None
            bucket = Bucket(rows, limits.max_tokens_per_step if plan.prefill else 0)
            layout = Layout.of(bucket, max_requests=rows, width=context // PAGE)
            upload = uploads.setdefault(bucket, Upload(layout))
            for row in plan.rows:
                if row.fresh:
                    constants.put(row)
            packing = time.perf_counter()
            upload.pack(plan, constants)
            packed = time.perf_counter()
            message = codec.encode(layout, upload.ints, upload.floats)
            encoded = time.perf_counter()
            before = channels.sent
            if len(plan.decode) == rows:
                channels.send(message)
            sent = time.perf_counter()
            each = (channels.sent - before) // max(1, followers)
            commit = committed(scheduler, plan)
            if len(plan.decode) == rows:
                times = planned - start, packed - packing, encoded - packed, sent - encoded
                found.append(Step(*(1e3 * one for one in times), commit=commit, bytes=each))
    return found


class Connected:
    """Channels to so many ends, all in one other process that throws away what comes."""

    def __init__(self, count: int) -> None:
        self._count, self._channels = count, list[Channel]()

    def __enter__(self) -> Connected:
        if self._count:
            with socket.create_server(("127.0.0.1", 0), backlog=self._count) as server:
                command = [sys.executable, "-c", DRAIN, str(server.getsockname()[1]), str(self._count)]
                self._other = subprocess.Popen(command)
                keys = Keys(b"a" * 32, b"b" * 32)
                self._channels = [Channel(server.accept()[0], keys, silence=30) for _ in range(self._count)]
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()
        if self._count:
            self._other.wait(10)

    @property
    def sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._channels)

    def send(self, message: bytes) -> None:
        for channel in self._channels:
            channel.send(Kind.STEP, message)


def sharded(count: int, rows: int, context: int) -> list[Step]:
    """Steps of so many data shards, each with as many rows."""
    pages = rows * context // PAGE + 1
    limits, shards = Limits(rows, 1 << 15, context, PAGE, 64), DataShards(count, rows, pages)
    arrivals = itertools.count()
    scheduler: Scheduler | DataScheduler
    if count == 1:
        scheduler = Scheduler(limits, PagePool(pages), cache=None)
    else:
        limits = Limits(rows, 1 << 15, context, PAGE, 64, max_queue=count * rows)
        scheduler = DataScheduler(
            [
                ShardScheduler(limits, PagePool(pages, first=at * pages), arrivals=arrivals, first_slot=at * rows)
                for at in range(count)
            ]
        )
    for request in requests(count * rows, context):
        scheduler.submit(request)
    constants, uploads, found = Constants(count * rows), dict[Bucket, Any](), list[Step]()
    while len(found) < STEPS // 2:
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        bucket = Bucket(rows, limits.max_tokens_per_step if plan.prefill else 0)
        layout = Layout.of(bucket, max_requests=rows, width=context // PAGE)
        if bucket not in uploads:
            uploads[bucket] = Upload(layout) if count == 1 else DataUpload(layout, shards)
        for row in plan.rows:
            if row.fresh:
                constants.put(row)
        packing = time.perf_counter()
        uploads[bucket].pack(plan, constants)
        packed = time.perf_counter()
        commit = committed(scheduler, plan)
        if len(plan.decode) == count * rows:
            found.append(Step(1e3 * (planned - start), 1e3 * (packed - packing), commit=commit))
    return found


def simulated(devices: Sequence[int]) -> None:
    """A small model on simulated devices: each in a process of its own, since their number is fixed when JAX starts."""
    print("\nA Llama of 8 layers, 512 wide, on simulated devices of this CPU; 8 rows decode, ms a step:")
    print(
        f"{'devices':>8}{'host':>8}{'its threads':>13}{'device':>9}{'sums alone':>12}{'share':>8}{'sums':>6}"
        f"{'bytes a token':>15}"
    )
    for count in devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        code = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import mesh_growth as m; m.one({count})"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        told = json.loads(done.stdout.splitlines()[-1])
        share = told["alone"] / told["device"] if told["device"] else 0.0
        print(
            f"{count:8}{told['host']:8.2f}{told['threads']:13.2f}{told['device']:9.2f}{told['alone']:12.2f}{share:8.0%}{told['sums']:6}"
            f"{told['bytes']:15,}",
            flush=True,
        )


def one(devices: int) -> None:
    """In a process of its own: prints one line of JSON."""
    import tempfile

    import rekindle
    from rekindle._src.models.placement import random_model
    from rekindle._src.models.registry import config_from_hf

    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16384, "hidden_size": 512,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1536,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = random_model(config_from_hf(fields), seed=0, dtype="bfloat16")
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
    print(
        json.dumps(
            {
                "threads": 1e3 * used / steps,
                "host": 1e3 * (after.host_seconds - before.host_seconds) / steps,
                "device": 1e3 * (after.device_seconds - before.device_seconds) / steps,
                "alone": 1e3 * ((after.collective_seconds or 0.0) - (before.collective_seconds or 0.0)) / steps,
                "sums": 0 if mesh is None else mesh.sums,
                "bytes": 0 if mesh is None else mesh.bytes_per_token,
            }
        )
    )


def processor_seconds() -> float:
    """Processor time of the session's own threads so far, without what they wait for a core that devices have."""
    own = [thread for thread in threading.enumerate() if thread.name in ("rekindle session", "rekindle device")]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in own if thread.ident is not None]
    return sum(map(time.clock_gettime, clocks))


if __name__ == "__main__":
    main()
