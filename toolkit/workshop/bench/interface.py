"""What looking costs: tokens a second with every view open, compared with the same load without views.

    python interface.py --model tiny --waves 8 [--rounds 7] [--everyone] [--plain] [--views dashboard chat]
    python interface.py --model 135m

The load is W3's: 32 requests at once, prompts of 32–256 tokens, 32–96 new ones; `--waves` times as many, one after
another, for a model that is done too soon. With views: a dashboard, the cache's tree, a chat, and a stream view of
every 32nd request (`--everyone`: of each). It runs in a kernel whose messages this process reads, as a notebook's
server would; `--plain` leaves the kernel out. Both arms take turns, in an order that changes from round to round, and
the ratio is the median of the rounds' own. The views' share of a core is what their threads computed, over the time
that the load took; with `--views tree`, which has no thread and draws nothing by itself, the spread is the machine's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import harness

import rekindle
from rekindle._src.bench.shapes import write_checkpoint
from rekindle._src.bench.workloads import RandomPrompts

REQUESTS = 32
VIEWS = ["dashboard", "tree", "chat", "stream"]


def main() -> None:
    given = vars(
        harness.options(
            __doc__, model=("tiny", "tiny, or a shape"), rounds=7, waves=(1, "how many times 32 requests"),
            views=(VIEWS, VIEWS), everyone=(False, "a stream view for every request"),
            plain=(False, "in this process, without a Jupyter kernel"),
        )
    )  # fmt: skip
    plain = given.pop("plain")
    rounds = anyio.run(functools.partial(measure, **given)) if plain else in_a_kernel(given)
    ratios = [there["rate"] / without["rate"] for without, there in rounds]
    for ratio, (without, there) in zip(ratios, rounds, strict=True):
        print(
            f"{without['rate']:7.1f} tokens/s without, {there['rate']:7.1f} with: {ratio:.3f}; views "
            f"{there['views']:.1%} of a core, {there['pictures']:.1f} pictures/s in the busiest; the kernel's output "
            f"thread {there['output']:.1%}"
        )
    share = statistics.median(there["views"] for _, there in rounds)
    print(f"ratio {harness.spread(ratios)}, views {share:.1%} of a core")


def in_a_kernel(given: dict[str, Any]) -> list[Any]:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(env=os.environ | {"PYTHONPATH": os.pathsep.join(harness.PATHS[:2])})
    printed: list[str] = []
    counts: dict[str, int] = {}

    def hook(message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "error":
            raise RuntimeError("\n".join(content["traceback"]))
        if kind == "stream" and content["name"] == "stdout":
            printed.append(content["text"])

    try:
        code = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\nimport interface, json\n"
        code += f"print(json.dumps(await interface.measure(**{given!r})))"
        client.execute_interactive(code, output_hook=hook, timeout=900)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())), file=sys.stderr)
    return json.loads("".join(printed))


async def measure(*, model: str, rounds: int, waves: int, views: Sequence[str], everyone: bool) -> list[Any]:
    source = model if model == "tiny" else str(write_checkpoint(model, Path(tempfile.gettempdir()) / f"shape-{model}"))
    options = {"max_requests": REQUESTS, "max_model_len": 1024, "precompile": "all", "quiet": True}
    async with rekindle.open(source, **options) as session:
        time_views()
        arms: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for number, looked_at in harness.turns(arms, rounds):  # everything is imported and compiled in the first one
            shown = Views(session, views, everyone) if looked_at else None
            arms[looked_at] += [await arm(session, waves, shown, number % (rounds + 1))] * (number >= 0)
        return list(zip(*arms.values(), strict=True))


async def arm(session: Any, waves: int, views: Views | None, number: int) -> dict[str, float]:
    output = output_seconds()
    seconds, tokens = await load(session, waves, views, number)
    output = output_seconds() - output
    computed, busiest = views.close() if views is not None else (0.0, 0.0)
    return {"rate": tokens / seconds, "views": computed / seconds, "output": output / seconds, "pictures": busiest}


async def load(session: Any, waves: int, views: Views | None, seed: int) -> tuple[float, int]:
    prompts = RandomPrompts(2000, seed)  # the same for both arms of a round
    await session.cache.clear(tier="memory")
    inputs = [prompts(length) for length in prompts.lengths(32, 256, REQUESTS * waves)]
    lengths = prompts.lengths(32, 96, REQUESTS * waves)
    start = time.perf_counter()
    handles = []
    for index, (prompt, length) in enumerate(zip(inputs, lengths, strict=True)):
        submit = session.submit if views is None or not views.follows(index) else views.submit
        handles.append(submit(prompt, max_tokens=length, ignore_eos=True))
    done = [await handle for handle in handles]
    return time.perf_counter() - start, sum(len(one.token_ids) for one in done)


class Views:
    """Views over one session, shown where there is a notebook."""

    def __init__(self, session: Any, kinds: Sequence[str], everyone: bool) -> None:
        self.session, self.kinds, self.everyone = session, kinds, everyone
        ENDED.clear()
        make = {"dashboard": session.watch, "tree": session.view.tree, "chat": session.view.chat}
        self.standing = [make[kind]() for kind in kinds if kind in make]
        self.streams: list[Any] = []
        for view in self.standing:
            show(view)

    def follows(self, index: int) -> bool:
        return "stream" in self.kinds and (self.everyone or index % REQUESTS == 0)

    def submit(self, prompt: Any, **options: Any) -> Any:
        view = self.session.view.stream(prompt, **options)
        show(view)
        self.streams.append(view)
        return view.handle

    def close(self) -> tuple[float, float]:
        """Seconds that their threads computed, and the most pictures that one of them drew a second."""
        for view in self.standing:
            view.stop()
        for view in self.standing + self.streams:
            view.join(10)
        return sum(seconds for seconds, _ in ENDED), max((rate for _, rate in ENDED), default=0.0)


ENDED: list[tuple[float, float]] = []  # of each view's thread: seconds it computed, pictures a second


def time_views() -> None:
    """A thread that ends leaves no record of its time: the views' write theirs down."""
    from rekindle._src.notebook.live import Live

    def timed(view: Any) -> None:
        start, pictures = time.perf_counter(), view.pictures
        run(view)
        seconds = max(1.0, time.perf_counter() - start)
        ENDED.append((time.thread_time(), (view.pictures - pictures) / seconds))

    run = Live._run
    Live._run = timed  # type: ignore[method-assign]


def output_seconds() -> float:
    """What the kernel's thread that sends outputs and widget updates has computed."""
    threads = [thread for thread in threading.enumerate() if thread.name == "IOPub" and thread.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)


def show(view: Any) -> None:
    with contextlib.suppress(ImportError):
        from IPython import get_ipython
        from IPython.display import display

        if get_ipython() is not None:
            display(view)


if __name__ == "__main__":
    main()
