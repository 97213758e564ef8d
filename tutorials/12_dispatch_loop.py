# %% [markdown]
# # 12 Inside the dispatch loop
#
# *What are the parts between `submit` and the text, and can I put them together myself?*
#
# A request travels in one direction through four tasks, connected by bounded streams:
#
# ```
# submissions          requests              turns
# ──────────▶ intake ──────────▶ schedule ◀────────▶ step ── device thread
#                                 │   ▲    outcomes
#                          events ▼   │ stop strings
#                              detokenize ──▶ mailboxes
# ```
#
# None of them knows the others, and the device side is behind a contract of two methods. So we can build an engine without a
# model: all real parts around a fake runner. All names from `rekindle._src` are private; they are shown here for teaching and
# may change.

# %%
import dataclasses
import time
from typing import NamedTuple

import anyio
import numpy as np

# Names below `rekindle._src` are private: they may change from one version to the next.
from rekindle import EngineConfig, Sampling
from rekindle._src.core.records import Request, RowResult, StepPlan, StepResult
from rekindle._src.kvcache import PagePool, PrefixCache
from rekindle._src.scheduling.scheduler import Limits, Scheduler

# %% [markdown]
# ## The scheduler alone
#
# It is plain host code without tasks: `submit`, `plan`, `commit`. A pool of sixteen pages of eight tokens, at most three requests
# at once, at most eight tokens in a step.

# %%
limits = Limits(max_requests=3, max_tokens_per_step=8, max_model_len=48, page_size=8)


def make_scheduler() -> Scheduler:
    pool = PagePool(17)  # page 0 is the scratch page that padding is written to
    return Scheduler(limits, pool, cache=PrefixCache(pool, 8, b"any key"))


scheduler = make_scheduler()
for name, text in (("a", "hello there"), ("b", "hi")):
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    scheduler.submit(Request(name, ids, Sampling(max_tokens=4, seed=0)))


def show(plan: StepPlan) -> None:
    for kind, rows in (("decode ", plan.decode), ("prefill", plan.prefill)):
        for row in rows:
            span = f"{row.start}–{row.start + row.length - 1}"
            print(f"  {kind} {row.request.id}: positions {span:6} pages {row.pages.tolist()} slot {row.slot}")


plan = scheduler.plan()
show(plan)

# %% [markdown]
# Eight tokens of budget: the first eight of *a*'s eleven go into this step. Nothing has been computed yet, but the next step
# can be planned already. It assumes that this one succeeds.

# %%
following = scheduler.plan()
show(following)

# %% [markdown]
# The second plan finishes *a*'s prompt, and *b* comes along. This is what keeps a device busy: when step N ends, step N+1 has been
# waiting on the device. The host reads tokens one step late.
#
# ## A runner
#
# The contract: `dispatch(plan)` starts a step and returns at once, `fetch(in_flight)` waits for it; the rest is for saving pages
# and for statistics. Ours has no model. It spells a poem, and each row's next letter is the one at its position.

# %%
POEM = "the fire is low, the embers glow, a breath of air and up they go. "


@dataclasses.dataclass
class InFlight:
    plan: StepPlan
    ready: float


class Figures(NamedTuple):
    steps: int
    programs: dict[str, int]
    compilations: int = 0
    traces: int = 0


class Poet:
    """A device that takes two milliseconds a step."""

    programs = None  # nothing is compiled

    def __init__(self) -> None:
        self.log: list[tuple[str, int, float]] = []

    def dispatch(self, plan: StepPlan) -> InFlight:
        self.log.append(("dispatch", plan.step, time.perf_counter()))
        return InFlight(plan, time.perf_counter() + 0.002)

    def fetch(self, in_flight: InFlight) -> StepResult:
        time.sleep(max(0.0, in_flight.ready - time.perf_counter()))
        self.log.append(("fetch", in_flight.plan.step, time.perf_counter()))
        rows = []
        for row in in_flight.plan.rows:
            letter = ord(POEM[(row.start + row.length) % len(POEM)])
            rows.append(RowResult(row.request.id, row.epoch, letter if row.samples else None))
        return StepResult(in_flight.plan, tuple(rows), program="poem", device_seconds=0.002)

    def program(self, plan: StepPlan) -> str:
        return "poem"

    def read_pages(self, pages):
        return [() for _ in pages]

    def statistics(self) -> Figures:
        return Figures(len(self.log) // 2, {"poem": len(self.log) // 2})

    def close(self) -> None: ...


# %% [markdown]
# ## The whole engine in one loop
#
# The loop below is all of it: plan, dispatch, then commit what the step before has made. Everything else is plumbing around it.

# %%
scheduler, runner = make_scheduler(), Poet()
for name in "abcde":
    scheduler.submit(Request(name, np.array([ord("t")], np.int32), Sampling(max_tokens=6, seed=0)))

last, texts = None, {}
while scheduler.has_work:
    plan = scheduler.plan()
    current = runner.dispatch(plan) if plan is not None else None
    if last is not None:
        for event in scheduler.commit(runner.fetch(last)):
            texts[event.request_id] = texts.get(event.request_id, "") + bytes(event.token_ids).decode()
    last = current
print(texts)
scheduler.check_integrity()

# %% [markdown]
# Five requests, three slots, and all of them spelled. Look at the order of the first calls: the next step is dispatched *before* the
# last one is fetched.

# %%
print([f"{what} {step}" for what, step, _ in runner.log[:7]])

# %% [markdown]
# ## The four tasks
#
# Now with text. `step.run` answers every *turn* with one *outcome*, `schedule.run` is the only owner of the scheduler,
# `intake.run` tokenizes, `detokenize.run` makes text and puts it into mailboxes. We need a tokenizer of letters.

# %%
from rekindle._src.dispatch import detokenize, intake, schedule, step
from rekindle._src.dispatch.device import DeviceThread
from rekindle._src.dispatch.mailbox import Mailbox
from rekindle._src.dispatch.messages import Engine, Submission


class Letters:
    """Bytes are token ids; text is made without ever looking back."""

    vocab_size, eos_ids, has_text = 256, (), True
    encodes_apart = False  # encoding costs nothing, so it needs no process of its own

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("latin-1")


class LetterByLetter:
    """What detokenize asks of a detokenizer: push tokens, get text that is final."""

    def __init__(self, sampling: Sampling, visible: frozenset[str] = frozenset()) -> None:
        self.stopped, self.tokens, self.released = None, 0, 0

    def push(self, token_ids) -> tuple[str, str | None]:
        self.tokens = self.released = self.tokens + len(token_ids)
        return Letters().decode(token_ids), None

    def flush(self) -> str:
        return ""


config = EngineConfig(max_requests=3, max_tokens_per_step=8, max_model_len=48, page_size=8)
engine = Engine(make_scheduler(), Poet(), Letters(), LetterByLetter, config, vocab_size=256)

# %% [markdown]
# Streams connect them. Each is bounded, so a slow consumer slows its producer down instead of filling the memory. Closing the
# first stream drains the pipe: every task ends when its inbox does.


# %%
def submission(name: str, text: str, **options) -> Submission:
    sampling = Sampling(**options)
    return Submission(name, text, None, True, sampling, Mailbox(sampling.n), time.perf_counter())


async def run(submissions: list[Submission]) -> None:
    outputs: dict[str, detokenize.OutputState] = {}
    submit, submitted = anyio.create_memory_object_stream(16)
    to_schedule, inbox = anyio.create_memory_object_stream(64)
    turns, turned = anyio.create_memory_object_stream(1)
    events, happened = anyio.create_memory_object_stream(1)
    device = DeviceThread()
    async with anyio.create_task_group() as group:
        group.start_soon(intake.run, submitted, to_schedule.clone(), engine, outputs)
        group.start_soon(schedule.run, inbox, turns, events, engine.scheduler)
        group.start_soon(step.run, turned, to_schedule.clone(), engine.runner, device)
        group.start_soon(detokenize.run, happened, to_schedule.clone(), outputs)
        to_schedule.close()
        async with submit:
            for one in submissions:
                await submit.send(one)
    device.stop(1.0)


asked = [submission("first", "t", max_tokens=12), submission("second", "the fire", max_tokens=9, n=2)]
await run(asked)
for one in asked:
    for done in one.mailbox.results:
        print(f"{done.id:9} {done.prompt!r} → {done.text!r}, ended by {done.finish_reason}")

# %% [markdown]
# Requests went in at one end and completions came out at the other; the mailboxes hold the pieces of text in between, too.

# %%
print([delta.text for delta in asked[0].mailbox.deltas])

# %% [markdown]
# ## A session is this, in a thread
#
# `Session` takes the same parts and runs the tasks in a daemon thread with an event loop of its own. So a cell that blocks the
# notebook does not stop generation, a slow step does not make widgets lag, and callers may sit on asyncio, on trio or on no loop.

# %%
from rekindle import Session

with Session(make_scheduler(), Poet(), Letters(), config, detokenizer=LetterByLetter, model="poet") as session:
    done = await session.generate("the fire", max_tokens=20)
    time.sleep(0.1)  # the notebook is blocked, the session is not
    stats = session.stats()
print(done.text)
stats
