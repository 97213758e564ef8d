"""`rekindle simulate`: compare routers and numbers of replicas in simulated time."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from pathlib import Path
from typing import Any, get_args

from rekindle._src.cli import usage
from rekindle._src.cli.usage import Parser
from rekindle._src.core.config import POLICIES, EngineConfig, ResolvedConfig
from rekindle._src.replicas.routing import RouterName

NEEDS = ("rekindle._src.bench.simulation",)


def options(command: Parser) -> None:
    command.add("--replicas", "such as 1,2,4 (the default)", type=_counts, default=[1, 2, 4])
    roles = "also P replicas that compute prompts for D that decode, such as 1+3; several times for several"
    command.add("--roles", roles, action="append", type=_pair, default=[], metavar="P+D")
    command.add("--move-us", "of a prompt's token from one replica to another (default 5)", type=float, default=5.0)
    routers = get_args(RouterName)
    command.add("--router", "several times for several; by default all", action="append", choices=routers)
    loads = ("chats", "questions", "floods")
    command.add("--load", "made up (default chats)", choices=loads, default="chats")
    trace = "a recorded load: on each line {timestamp (ms), input_length, output_length, hash_ids}, as Mooncake's"
    command.add("--trace", trace, type=Path)
    command.add("--requests", "of a made-up load (default 1000)", type=int, default=1000)
    command.add("--rate", "requests a second (default 8)", type=float, default=8.0)
    command.add("--seed", None, type=int, default=0)
    command.add("--measure", "take the cost of steps from this model on this machine", metavar="MODEL")
    command.add("--step-ms", "of a step (default 8, about 8B on an H100)", type=float, default=8.0)
    command.add("--row-us", "of a row that decodes (default 30)", type=float, default=30.0)
    command.add("--prefill-us", "of a prompt's token (default 40)", type=float, default=40.0)
    command.add("--context-us", "of a position looked back at (default 0.05)", type=float, default=0.05)
    command.add("--request-ms", "of a request in addition to its steps (default 0)", type=float, default=0.0)
    command.add("--max-requests", "that one replica runs at once (default 64)", type=int, default=64)
    command.add("--max-tokens-per-step", None, type=int, default=1024)
    command.add("--max-model-len", None, type=int, default=32768)
    command.add("--device-tokens", "that the cache holds (default 200000)", type=int, default=200_000)
    command.add("--policy", None, choices=POLICIES, default="fcfs")
    command.flag("--json", "print the figures as JSON")
    command.checks.append(lambda arguments: usage.check_file("--trace", arguments.trace))


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: these are no numbers above 0. Use 1,2,4")
    return counts


def _pair(text: str) -> tuple[int, int]:
    try:
        prefill, decode = (int(part) for part in text.split("+"))
    except ValueError:
        prefill = decode = 0
    if min(prefill, decode) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: this does not say how many prefill and decode. Use 1+3")
    return prefill, decode


def run(arguments: argparse.Namespace) -> int:
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
    config = ResolvedConfig.with_sizes(
        EngineConfig(
            max_requests=arguments.max_requests,
            max_tokens_per_step=arguments.max_tokens_per_step,
            policy=arguments.policy,
        ),
        max_model_len=arguments.max_model_len,
        page_size=16,
        device_pages=arguments.device_tokens // 16,
        device_memory=0,
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
