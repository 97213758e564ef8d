"""`rekindle simulate`: compare routers and sizes of a fleet on a load, in simulated time."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from typing import Any, get_args

from rekindle._src.bench.simulation import HEAD, LOADS, StepCost, read_trace, simulate
from rekindle._src.core.config import EngineConfig
from rekindle._src.replicas.routing import RouterName


def run(arguments: argparse.Namespace) -> int:
    if arguments.trace is not None:
        requests = read_trace(arguments.trace)
    else:
        requests = LOADS[arguments.load](random.Random(arguments.seed), arguments.requests, arguments.rate)
    spread: tuple[float, ...] = ()
    if arguments.measure is not None:
        from rekindle._src.bench.simulation import measure_model

        cost, spread = measure_model(arguments.measure)
    else:
        cost = StepCost(
            arguments.step_ms / 1e3,
            arguments.row_us / 1e6,
            arguments.prefill_us / 1e6,
            arguments.context_us / 1e6,
            request=arguments.request_ms / 1e3,
        )
    config = EngineConfig(
        max_requests=arguments.max_requests,
        max_tokens_per_step=arguments.max_tokens_per_step,
        max_model_len=arguments.max_model_len,
        page_size=16,
        device_pages=arguments.device_tokens // 16,
        policy=arguments.policy,
    )
    outcomes: list[dict[str, Any]] = []
    if not arguments.json:
        seconds = requests[-1].at - requests[0].at
        prompt, output = (
            sum(values) / len(requests) for values in zip(*((a.length, a.output) for a in requests), strict=True)
        )
        print(f"{len(requests)} requests in {seconds:.0f} s, {prompt:.0f} + {output:.0f} tokens on average")
        parts = [f"{1e3 * cost.step:.2f} ms a step", f"{1e6 * cost.row:.0f} µs a row"]
        parts += [f"{1e6 * cost.prefill:.1f} µs a prompt's token", f"{1e6 * cost.context:.3f} µs a position"]
        parts += [f"{1e3 * cost.request:.2f} ms a request beside its steps"] if cost.request else []
        print(f"A device takes {', '.join(parts)}. Times below are in ms.")
        print(f"{'replicas':>8} {'router':12} {HEAD}")
    fleets: list[tuple[str, dict[str, Any]]] = [(str(count), {"replicas": count}) for count in arguments.replicas]
    for text in arguments.roles:
        prefill, decode = text
        fleets.append((f"{prefill}+{decode}", {"roles": {"prefill": prefill, "decode": decode}}))
    for name, size in fleets:
        for router in arguments.router or get_args(RouterName):
            outcome = simulate(
                requests, config, cost, router=router, move=arguments.move_us / 1e6, spread=spread, **size
            )
            outcomes.append({**size, "router": router, **outcome._asdict()})
            if not arguments.json:
                print(f"{name:>8} {router:12} {outcome}", flush=True)
    if arguments.json:
        print(json.dumps({"cost": dataclasses.asdict(cost), "outcomes": outcomes}, indent=1))
    return 0
