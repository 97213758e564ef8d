# %% [markdown]
# # 03 Continuous batching
#
# *How do many requests of different lengths share one device?*
#
# **Before:** page 02. **Afterwards you can** read a timeline of steps, predict how many steps a set of requests takes, and choose `max_tokens_per_step`.
#
# **Also called:** continuous batching = iteration-level scheduling (Orca), in-flight batching (TensorRT-LLM); `max_tokens_per_step` = `max_num_batched_tokens` (vLLM), chunked prefill = stall-free batching (Sarathi).
#
# **Takes:** about 15 minutes, with the embedded model.
#
# ![Static batches wait for their longest text; continuous batching fills a free slot at once](../source/pictures/03_batching.svg)
#
# A decode step reads all weights of the model to compute one token per text, and with eight texts it reads them once for eight tokens.
# So a server wants full batches. But texts begin and end at different times. We run twelve texts in two ways, draw what each step did
# from the engine's own reports, and then send a long prompt among them.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

import rekindle

plt.rcParams.update({"figure.figsize": (8, 3), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False})
SLOTS = 4
session = await rekindle.open(
    "tiny", max_requests=SLOTS, max_tokens_per_step=128, prefix_cache=False, precompile="lazy"
)
rng = np.random.default_rng(4)


def prompt(length: int) -> list[int]:
    return rng.integers(300, 1500, length).tolist()


# %% [markdown]
# ## Why a batch costs little
#
# How many tokens a second come out, over the number of texts that are made together? The dotted line is what it would be if a
# step with more texts took proportionally longer.

# %%
counts, best, taken = (1, 2, 4, 8, 16), {}, {}
async with rekindle.open("tiny", max_requests=16, max_tokens_per_step=128, precompile="lazy") as wide:
    for _ in range(4):  # the first round compiles; of the others, the best one counts
        for count in counts:
            before, began = wide.stats().steps, time.perf_counter()
            await wide.generate([prompt(8) for _ in range(count)], max_tokens=40, ignore_eos=True)
            taken[count] = wide.stats().steps - before
            best[count] = max(best.get(count, 0), 40 * count / (time.perf_counter() - began))
print(f"one text {best[1]:,.0f} tokens/s, eight {best[8]:,.0f}, sixteen {best[16]:,.0f}")
assert taken[8] < 2 * taken[1], "eight texts take hardly more steps than one"
plt.plot(counts, best.values(), "o-", label="measured")
plt.axhline(best[1], color="grey", linestyle=":", label="no gain")
plt.xticks(counts)
plt.ylim(0)
plt.xlabel("texts at once")
plt.ylabel("tokens per second")
plt.legend()
plt.show()

# %% [markdown]
# ## Static batching
#
# The simplest server takes four requests, runs them until *all* have ended, and takes the next four. Short texts then wait for
# long ones. We submit twelve requests in groups of four, and run the engine step by step to see what every step did. With
# groups $g$ and lengths $n_i$,
#
# $$\mathrm{steps} = \sum_{g} \max_{i \in g} n_i$$
#
# **Predict.** `LENGTHS` below says how many tokens each of the twelve gets. How many steps do three static groups take?
#
# <details><summary>Answer</summary>
#
# **106** = 40 + 36 + 30, the longest of each group.
#
# </details>


# %%
async def stepping(handles) -> list:
    """Run the paused session until all handles have ended; the reports of all steps."""
    reports = []
    while not all(handle.done for handle in handles):
        report = await session.step()
        if report is None:
            break
        reports.append(report)
    return reports


LENGTHS = [40, 8, 12, 6, 10, 36, 7, 14, 9, 30, 8, 12]


def submit(length: int):
    return session.submit(prompt(12), max_tokens=length, ignore_eos=True)  # exactly `length` tokens


static = []
async with session.paused():
    for start in range(0, len(LENGTHS), SLOTS):
        static += await stepping([submit(length) for length in LENGTHS[start : start + SLOTS]])

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(static) == 106, "a static batch takes the steps of its longest text"

# %% [markdown]
# ## Continuous batching
#
# The engine does better: whenever a text ends, its slot goes to the next request *at the next step*. No text waits for
# another one to end. Submit all twelve at once and let the scheduler decide.
#
# **Predict.** 192 tokens in 4 slots need at least 48 steps. How many does the engine take?
#
# <details><summary>Answer</summary>
#
# **58**: the text of 30 tokens comes late, and at the end it runs alone.
#
# </details>

# %%
async with session.paused():
    continuous = await stepping([submit(length) for length in LENGTHS])

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert sum(LENGTHS) / SLOTS == 48, "192 tokens fill four slots for 48 steps"
assert len(continuous) == 58, "a free slot goes to the next request at once"

# %% [markdown]
# On a timeline, every line is a slot and every block is one request's part in one step: strong for prefill, pale for decode. The
# colour changes when the slot's next request begins.

# %%
COLOURS = plt.colormaps["tab10"].colors


def timeline(reports, title: str, axis) -> None:
    slots: dict[str, int] = {}
    names: dict[str, int] = {}
    for step, report in enumerate(reports):
        for row in report.rows:
            if row.request_id not in slots:
                slots[row.request_id] = min(set(range(SLOTS)) - set(slots.values()))
                names[row.request_id] = len(names)
            colour = COLOURS[names[row.request_id] % len(COLOURS)]
            alpha = 1.0 if row.kind == "prefill" else 0.45
            axis.broken_barh([(step, 1)], (slots[row.request_id] - 0.4, 0.8), color=colour, alpha=alpha)
            if row.finish_reason is not None:
                del slots[row.request_id]
    rows = sum(len(report.rows) for report in reports)
    share = rows / (SLOTS * len(reports))
    axis.set_title(f"{title}: {len(reports)} steps, {share:.0%} of the slots busy", fontsize=10)
    axis.set_yticks(range(SLOTS))
    axis.set_ylabel("slot")


figure, axes = plt.subplots(2, 1, sharex=True, figsize=(9, 4.4), layout="constrained")
timeline(static, "static", axes[0])
timeline(continuous, "continuous", axes[1])
axes[1].set_xlabel("step")
plt.show()

# %% [markdown]
# Go through the second one step by step: which requests are in it, which positions they compute, and what they have written by then.

# %%
session.view.steps(continuous)

# %% [markdown]
# ## Long prompts
#
# A prompt of hundreds of tokens is a long step, and every text that is being decoded would wait for it. The engine gives
# every step a budget, here `max_tokens_per_step=128`: decoding texts take one token each, and a *chunk* of the prompt
# takes the rest, but with this page's CPU kernels no more than half of the budget while others are being decoded. The two
# talkers end after 8 tokens; from then on the chunks are whole.
#
# **Predict.** A prompt of 420 tokens arrives while two texts are being decoded. How many tokens does the largest of its steps compute?
#
# <details><summary>Answer</summary>
#
# **128**: the whole budget, once the talkers have ended.
#
# </details>

# %%
async with session.paused():
    talkers = [submit(8), submit(8)]
    for _ in range(4):
        await session.step()
    reader = session.submit(prompt(420), max_tokens=4)
    chunked = await stepping([*talkers, reader])

for report in chunked[:6]:
    print(report)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert max(report.tokens for report in chunked) == 128, (
    "a step never exceeds its budget, and a lone prompt uses all of it"
)

# %%
figure, axis = plt.subplots()
steps = range(len(chunked))
decode = [sum(row.kind == "decode" for row in report.rows) for report in chunked]
prefill = [report.tokens - rows for report, rows in zip(chunked, decode, strict=True)]
axis.bar(steps, decode, label="decode tokens")
axis.bar(steps, prefill, bottom=decode, label="prefill tokens")
axis.axhline(128, color="grey", linewidth=0.8, linestyle="--", label="budget")
axis.xaxis.set_major_locator(MaxNLocator(integer=True))
axis.set_xlabel("step")
axis.set_ylabel("tokens in the step")
axis.legend()
plt.show()

# %% [markdown]
# Each talker got a token in every step until it ended, while the prompt was worked off alongside: at half the budget first, then
# at the whole.
#
# ## The price and the choice
#
# Smaller chunks mean shorter pauses for the talkers, and more steps until the reader has its first token. Below, a prompt of 900
# tokens arrives next to one talker, under four budgets: tokens in the largest step, steps to the first token, and the
# times that follow from them.

# %%
await session.aclose()


async def arrival() -> list:
    """Reports of every step from the arrival of a long prompt to its first token."""
    async with session.paused():
        talker = submit(100)
        for _ in range(4):
            await session.step()
        reports = await stepping([session.submit(prompt(900), max_tokens=1)])
        talker.cancel()
    return reports


def seconds(report) -> float:
    return report.host_seconds + report.device_seconds


budgets = (64, 128, 256, 512)
options = {"max_requests": SLOTS, "prefix_cache": False, "precompile": "lazy"}
sessions = {budget: await rekindle.open("tiny", max_tokens_per_step=budget, **options) for budget in budgets}
rounds: dict[int, list] = {budget: [] for budget in budgets}
for _ in range(9):  # in turn, so that what else the machine does meets all budgets; the first round compiles
    for budget in budgets:
        session = sessions[budget]
        rounds[budget].append(await arrival())
for session in sessions.values():
    await session.aclose()

pause, first, largest, steps = [], [], [], []
for budget, (_, *measured) in rounds.items():
    pause.append(min(max(map(seconds, reports)) for reports in measured) * 1e3)
    first.append(min(sum(map(seconds, reports)) for reports in measured) * 1e3)
    largest.append(max(report.tokens for report in measured[0]))
    steps.append(len(measured[0]))
    print(
        f"budget {budget:3}: largest step {largest[-1]:3} tokens, {pause[-1]:5.1f} ms; "
        f"first token after {steps[-1]:2} steps, {first[-1]:5.1f} ms"
    )
assert steps[-1] * 4 <= steps[0], "eight times the budget means at most a quarter of the steps to the first token"
assert largest[-1] >= 4 * largest[0], "eight times the budget means a pause of at least four times as many tokens"

plt.plot(budgets, pause, "o-", label="the talker's longest pause")
plt.plot(budgets, first, "o-", label="the reader's first token")
plt.xscale("log", base=2)
plt.xticks(budgets, budgets)
plt.ylim(0)
plt.xlabel("max_tokens_per_step")
plt.ylabel("ms")
plt.legend()
plt.show()

# %% [markdown]
# From a budget of 64 to one of 512 the talker's pause grows to several times its length, while the reader's first token comes only
# somewhat sooner: a step of 257 tokens takes longer than one of 33, but 4 steps replace 29. The default is 512. A person who reads along notices pauses above 0.1 s:
# if a step of yours takes longer (page 19 says how long it takes), choose a smaller budget.
#
# Page 05 is about prompts that need not be computed at all.

# %% [markdown]
# ## Exercise
#
# Write `continuous_steps(lengths, slots)` without the engine: how many steps do requests take that come in order, each into the first slot that is free? Check it against the engine's 58, then find how few slots bring all twelve below 45 steps.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def continuous_steps(lengths: list[int], slots: int) -> int:
    ends = [0] * slots
    for length in lengths:
        first_free = ends.index(min(ends))
        ends[first_free] += length
    return max(ends)


fewest = next(slots for slots in range(1, 13) if continuous_steps(LENGTHS, slots) < 45)
print(fewest, "slots")
assert continuous_steps(LENGTHS, SLOTS) == len(continuous), "the schedule is first come, first served"
assert continuous_steps(LENGTHS, fewest - 1) >= 45, "no smaller number of slots does it"

# %% [markdown]
# ## Takeaway
#
# Texts share steps, not turns. A free row goes to the next text at once, and a budget of tokens for each step decides how long the others pause for a
# new prompt.
#
# ## In production
#
# vLLM and SGLang schedule as here, one iteration at a time with chunked prefill, thousands of tokens per step. Batches are bounded by cache memory more often than by slots; when it runs out, the youngest request is preempted and computed again. Large deployments prefill and decode on different machines.
#
# ## Further reading
#
# - Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022
# - Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180)
# - Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, 2024, [arXiv:2403.02310](https://arxiv.org/abs/2403.02310)
