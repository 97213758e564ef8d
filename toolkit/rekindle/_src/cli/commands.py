"""The short subcommands: `generate`, `run-batch`, `follow`, `export`, `warm`, `simulate`.

Each imports what it needs when it runs; `main` has imported the largest part of it by then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, get_args

from rekindle._src.cli.controls import for_stream
from rekindle._src.cli.usage import engine_options, paths_by_name, sampling_options
from rekindle._src.core.activity import Progress
from rekindle._src.core.config import EngineConfig
from rekindle._src.replicas.routing import RouterName
from rekindle.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.core.records import Completion
    from rekindle._src.programs.warming import WarmingProgress


def generate(arguments: argparse.Namespace) -> int:
    """Print the continuation of a prompt while it is generated."""
    from rekindle._src.session.opening import open_sync

    prompt = arguments.prompt
    piped = prompt is None or prompt == "-"
    if piped:
        prompt = sys.stdin.read()
    if not prompt:  # said before a model is opened
        raise InvalidRequest("prompt", prompt, "has no text", 'Pass one: rekindle generate "Once upon a time"')
    beginning = "" if piped else prompt  # a pipe has its prompt: it is not repeated
    with open_sync(arguments.model, **engine_options(arguments)) as session:
        handle = session.submit(prompt, **sampling_options(arguments))
        if arguments.json:
            print(for_stream(json.dumps(_as_json(handle.result_sync()), ensure_ascii=False), sys.stdout))
            return 0
        started = False
        try:
            for delta in handle.stream_sync():
                if not started:  # the progress bar uses the line until the first text
                    print(beginning, end="", flush=True)
                    started = True
                print(for_stream(delta.text, sys.stdout), end="", flush=True)
            print("" if started else beginning)
        except KeyboardInterrupt:
            handle.cancel()
            print()
            print("[interrupted]", file=sys.stderr)
            return 130
        done = handle.result_sync()
        compiling = f", {done.timings.compiling:.1f} s of it compiling" if done.timings.compiling >= 0.05 else ""
        print(
            f"[{done.usage.prompt_tokens} prompt + {done.usage.completion_tokens} new tokens, first after "
            f"{done.timings.first_token * 1e3:.0f} ms{compiling}, then "
            f"{done.timings.decode_rate(done.usage.completion_tokens):.0f} tokens/s, ended by {done.finish_reason}]",
            file=sys.stderr,
        )
        if (found := done.repetition) is not None:
            print(f"[the text {found}: --temperature 0.8 or --repetition-penalty 1.1 helps]", file=sys.stderr)
    return 0


_TIMES = ("queued", "first_token", "total", "compiling")


def _as_json(completion: Completion) -> dict[str, object]:
    return {
        "prompt": completion.prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": str(completion.finish_reason),
        "seed": completion.seed,
        "usage": dataclasses.asdict(completion.usage),
        "timings": {name: getattr(completion.timings, name) for name in _TIMES},
    }


def run_batch(arguments: argparse.Namespace) -> int:
    """Answer a file of requests in OpenAI's batch format, without a server."""
    import anyio

    from rekindle._src.serve.batch import BatchRun
    from rekindle._src.session.opening import open

    async def run() -> BatchRun:
        async with open(arguments.model, **engine_options(arguments)) as session:
            batch = BatchRun(
                session, arguments.input, arguments.output, name=arguments.name, strict=arguments.strict
            )  # fmt: skip
            await batch.run()
            return batch

    batch = anyio.run(run)
    print(f"{batch.answered:,} lines answered, {batch.failed:,} with an error; {batch.resumed:,} were answered before")
    if batch.failed:
        print(f"the errors are in {arguments.output}", file=sys.stderr)
    return 0


LAST_SECONDS = 2.0  # for a follower's call in progress, after the leader is gone


def follow(arguments: argparse.Namespace) -> int:
    """Give a leader's session this process's devices, until it ends."""
    from rekindle._src.channels.greeting import ProcessPlace
    from rekindle._src.opening.following import follow

    place, options = ProcessPlace(arguments.process, arguments.processes), {"cache_dir": arguments.cache_dir}
    follow(arguments.coordinator, place, model=arguments.model, wait=arguments.wait, say=_say, lost=_lost, **options)
    _say("the session has ended")
    return 0


def _say(text: str) -> None:
    print(f"rekindle: {text}", file=sys.stderr, flush=True)


def _lost(error: BaseException) -> None:
    """End the process soon, even if a call waits for a collective sum that the leader no longer joins."""

    def end() -> None:
        _say(f"the leader is gone: {error}")
        os.kill(os.getpid(), signal.SIGTERM)  # the main thread may be in a call that never returns

    timer = threading.Timer(LAST_SECONDS, end)
    timer.daemon = True
    timer.start()


def export(arguments: argparse.Namespace) -> int:
    """Write a checkpoint as a GGUF file or as a folder of safetensors."""
    from rekindle._src.opening.exporting import export

    target = export(arguments.model, arguments.out, type=arguments.type, progress=Progress("exporting"))
    size = sum(path.stat().st_size for path in (target.rglob("*") if target.is_dir() else [target]))
    print(f"{target} ({size / 1e6:,.0f} MB)")
    return 0


def warm(arguments: argparse.Namespace) -> int:
    """Compile a model's programs into the store, so that the first session only loads them.

    No weights are read, neither of the model nor of adapters, since programs depend only on their shapes.
    """
    from rekindle._src.opening.blueprint import blueprint
    from rekindle._src.opening.open_request import OpenRequest, named_changes
    from rekindle._src.opening.source import source_of
    from rekindle._src.programs.programs import Programs
    from rekindle._src.programs.warming import warm
    from rekindle_kernels import build_kernels

    options = EngineConfig.of(engine_options(arguments))
    if options.processes > 1:
        fix = "Open the session once with precompile='all'; each process then stores its own"
        raise ConfigError("--processes", options.processes, "can't be warmed by one of them", fix)
    if arguments.device_kind is not None:
        _check_kind(arguments.device_kind)
    adapters = paths_by_name("--adapter", arguments.adapter, "folder")
    steering = named_changes(paths_by_name("--steering", arguments.steering, "file"))
    request = OpenRequest(arguments.model, options, steering=steering, adapters=adapters)
    plan = blueprint(request, source_of(request))
    programs = Programs.open(plan.programs)
    start = time.perf_counter()
    kernels = build_kernels(programs.kernels())
    if kernels is not None:
        kernels.wait()
    warm(programs, progress=None if arguments.json or options.quiet else _show)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(record) for record in programs.manifest()], indent=1))
    else:
        print(f"{len(programs.manifest())} programs are ready after {time.perf_counter() - start:.2f} s")
    return 0


def _check_kind(kind: str) -> None:
    """Raise ConfigError unless this machine's device is of this kind: programs can't be cross-compiled."""
    import jax

    device_kind = jax.local_devices()[0].device_kind
    if kind.casefold() != device_kind.casefold():
        problem = f"needs a device of that kind, and this machine has {device_kind!r}"
        fix = "Run this on such a machine and copy its cache directory's `programs` folder"
        raise ConfigError("--device-kind", kind, problem, fix)


def _show(warmed: WarmingProgress) -> None:
    program = warmed.program
    line = f"[{warmed.done:2}/{warmed.total}] {program.name:8} {program.origin} in {program.seconds:.2f} s"
    print(line, file=sys.stderr, flush=True)


def simulate(arguments: argparse.Namespace) -> int:
    """Compare routers and sizes of a fleet on a load, in simulated time."""
    from rekindle._src.bench.simulation import HEAD, LOADS, StepCost, measure_model, read_trace, simulate

    if arguments.trace is not None:
        requests = read_trace(arguments.trace)
    else:
        requests = LOADS[arguments.load](random.Random(arguments.seed), arguments.requests, arguments.rate)
    spread: tuple[float, ...] = ()
    if arguments.measure is not None:
        cost, spread = measure_model(arguments.measure)
    else:
        units = (arguments.row_us / 1e6, arguments.prefill_us / 1e6, arguments.context_us / 1e6)
        cost = StepCost(arguments.step_ms / 1e3, *units, request=arguments.request_ms / 1e3)
    config = EngineConfig(
        max_requests=arguments.max_requests,
        max_tokens_per_step=arguments.max_tokens_per_step,
        max_model_len=arguments.max_model_len,
        page_size=16,
        device_pages=arguments.device_tokens // 16,
        policy=arguments.policy,
    )
    if not arguments.json:
        seconds = requests[-1].at - requests[0].at
        prompt, output = (statistics.fmean(getattr(one, name) for one in requests) for name in ("length", "output"))
        print(f"{len(requests)} requests in {seconds:.0f} s, {prompt:.0f} + {output:.0f} tokens on average")
        parts = [f"{1e3 * cost.step:.2f} ms a step", f"{1e6 * cost.row:.0f} µs a row"]
        parts += [f"{1e6 * cost.prefill:.1f} µs a prompt's token", f"{1e6 * cost.context:.3f} µs a position"]
        parts += [f"{1e3 * cost.request:.2f} ms a request in addition to its steps"] if cost.request else []
        print(f"A device takes {', '.join(parts)}. Times below are in ms.")
        print(f"{'replicas':>8} {'router':12} {HEAD}")
    fleets: list[tuple[str, dict[str, Any]]] = [(str(count), {"replicas": count}) for count in arguments.replicas]
    fleets += [(f"{p}+{d}", {"roles": {"prefill": p, "decode": d}}) for p, d in arguments.roles]
    outcomes = []
    for name, size in fleets:
        for router in arguments.router or get_args(RouterName):
            move = arguments.move_us / 1e6
            outcome = simulate(requests, config, cost, router=router, move=move, spread=spread, **size)
            outcomes.append({**size, "router": router, **outcome._asdict()})
            if not arguments.json:
                print(f"{name:>8} {router:12} {outcome}", flush=True)
    if arguments.json:
        print(json.dumps({"cost": dataclasses.asdict(cost), "outcomes": outcomes}, indent=1))
    return 0
