# %% [markdown]
# # 12 Inside the dispatch loop
#
# *What are the parts between `submit` and the text, and can I put them together myself?*
#
# **Before:** pages 03 and 05; anyio's task groups. **Afterwards you can** name the parts between `submit` and the text, plan steps by hand, and say why the host reads tokens one step late.
#
# **Also called:** the dispatch loop = engine loop, `step()` (vLLM), with asynchronous scheduling; overlap scheduling (SGLang); a runner = a model runner or executor.
#
# **Takes:** about 15 minutes, with no model.
#
# ![The host plans step N+1 while the device runs step N](../source/pictures/12_loop.svg)
#
# A request travels in one direction, through tasks that are connected by bounded streams:
#
# ```
#              front                 backend              front
# submissions         requests                   events
# ──────────▶ intake ─────────▶ engine ────────────────▶ detokenize ──▶ mailboxes
#                               schedule ⇄ step          (text, stop strings)
#                               (loop)     (device thread)
# ```
#
# None of them knows the others, and the device side is reached by a contract of two methods. So we can build an engine without a
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
#
# **Predict.** *a* has 11 tokens, *b* has 2, a step has room for 8. How many tokens does the first plan hold?
#
# <details><summary>Answer</summary>
#
# **8**, all of them of *a*.
#
# </details>

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

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert sum(row.length for row in plan.rows) == 8, "a plan fills its budget in order of arrival"

# %% [markdown]
# Eight tokens of budget: the first eight of *a*'s eleven go into this step. Nothing has been computed yet, but the next step
# can be planned already. It assumes that this one succeeds.
#
# **Predict.** And the second?
#
# <details><summary>Answer</summary>
#
# **5**: the last 3 of *a* and both of *b*.
#
# </details>

# %%
following = scheduler.plan()
show(following)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert sum(row.length for row in following.rows) == 5, "the next request comes along"

# %% [markdown]
# The second plan finishes *a*'s prompt, and *b* comes along. This is what keeps a device busy: when step N ends, step N+1 is on the
# device already, and the host reads tokens one step late. A step then takes
#
# $$\max(t_{\mathrm{host}}, t_{\mathrm{device}}) \quad \mathrm{instead\ of} \quad t_{\mathrm{host}} + t_{\mathrm{device}}$$
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
# An `Engine` owns a scheduler and a runner. Its `turn()` is all of the loop: plan a step, dispatch it, fetch the step before it
# and commit that one. Everything else is plumbing around it.

# %%
from rekindle._src.dispatch.engine import Engine

scheduler, runner = make_scheduler(), Poet()
engine = Engine(scheduler, runner)
for name in "abcde":
    engine.submit(Request(name, np.array([ord("t")], np.int32), Sampling(max_tokens=6, seed=0)))

texts = dict.fromkeys("abcde", "")
while (events := engine.turn()) is not None:
    for event in events:
        texts[event.request_id] += bytes(event.token_ids).decode()
print(texts)
scheduler.check_integrity()

# %% [markdown]
# Five requests, three slots, and all of them spelled. Look at the order of the first calls: the next step is dispatched *before* the
# last one is fetched.
#
# **Predict.** How many steps are dispatched before the first is fetched?
#
# <details><summary>Answer</summary>
#
# **2**.
#
# </details>

# %%
print([f"{what} {step}" for what, step, _ in runner.log[:7]])

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert [what for what, *_ in runner.log].index("fetch") == 2, (
    "the next step is dispatched before the last one is fetched"
)

# %% [markdown]
# ## The tasks
#
# Now with text. `intake.run` tokenizes, `engine.serve` runs the same turns in two tasks, one of which waits for the device in a
# thread of its own, and `detokenize.run` makes text and puts it into mailboxes. We need a tokenizer of letters.

# %%
from rekindle._src.dispatch import detokenize, intake
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capabilities import Capabilities
from rekindle._src.dispatch.threads import DeviceThread, Mailbox


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
engine = Engine(make_scheduler(), Poet(), config)
front = Front(engine, Letters(), LetterByLetter, config, vocab_size=256)

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
    to_engine, inbox = anyio.create_memory_object_stream(64)
    events, happened = anyio.create_memory_object_stream(1)
    device = DeviceThread()
    async with anyio.create_task_group() as group:
        group.start_soon(intake.run, submitted, to_engine.clone(), front, outputs, Capabilities())
        group.start_soon(engine.serve, inbox, to_engine.clone(), events, device)
        group.start_soon(detokenize.run, happened, to_engine.clone(), outputs)
        to_engine.close()
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
# `Session` takes the same parts, a front over an engine, and runs the tasks in a daemon thread with an event loop of its own. So a cell that blocks the
# notebook does not stop generation, a slow step does not make widgets lag, and callers may sit on asyncio, on trio or on no loop.

# %%
from rekindle import Session

with Session(make_scheduler(), Poet(), Letters(), config, detokenizer=LetterByLetter, model="poet") as session:
    done = await session.generate("the fire", max_tokens=20)
    time.sleep(0.1)  # the notebook is blocked, the session is not
    stats = session.stats()
print(done.text)
stats

# %% [markdown]
# ## Exercise
#
# Write a runner `Shouter` whose tokens are the poem's in capitals, and run an engine with it. Nothing but `fetch` differs from `Poet`.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
class Shouter(Poet):
    def fetch(self, in_flight: InFlight) -> StepResult:
        result = super().fetch(in_flight)
        loud = [row._replace(token_id=row.token_id and ord(chr(row.token_id).upper())) for row in result.rows]
        return dataclasses.replace(result, rows=tuple(loud))


engine = Engine(make_scheduler(), Shouter())
engine.submit(Request("loud", np.array([ord("t")], np.int32), Sampling(max_tokens=6, seed=0)))
shouted = ""
while (events := engine.turn()) is not None:
    shouted += "".join(bytes(event.token_ids).decode() for event in events)
print(shouted)
assert shouted == POEM[1:7].upper(), "an engine runs any runner that keeps the contract"

# %% [markdown]
# ## Takeaway
#
# Between submit and the text stand four parts that know nothing of each other: intake, scheduler, runner, detokenizer. Planning one step ahead keeps
# the device busy.
#
# ## In production
#
# The loop is the same; it spans processes. Tokenizing, scheduling and detokenizing run side by side, because Python holds one lock, and plans travel to workers over shared memory. The one step of lateness is what vLLM calls asynchronous scheduling.
#
# ## Further reading
#
# - Yu et al., *Orca*, OSDI 2022
# - Zheng et al., *SGLang*, 2023, [arXiv:2312.07104](https://arxiv.org/abs/2312.07104)
# - Nathaniel J. Smith, *Notes on structured concurrency*, 2018
