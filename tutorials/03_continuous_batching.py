# %% [markdown]
# # 03 Continuous batching
#
# *How do many requests of different lengths share one device?*
#
# A decode step reads all weights of the model to compute one token per text. Carrying more texts in a step costs little, so a
# server wants full batches. But texts begin and end at different times. We look at two ways to deal with that, on timelines made
# from the engine's own step reports, and then at what a long prompt does to everybody else.

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
counts, best = (1, 2, 4, 8, 16), {}
async with rekindle.open("tiny", max_requests=16, max_tokens_per_step=128, precompile="lazy") as wide:
    for _ in range(4):  # the first round compiles; of the others, the best one counts
        for count in counts:
            began = time.perf_counter()
            await wide.generate([prompt(8) for _ in range(count)], max_tokens=40, ignore_eos=True)
            best[count] = max(best.get(count, 0), 40 * count / (time.perf_counter() - began))
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
# long ones. We can play that by submitting in groups, and run the engine step by step to see what every step did.


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
    return session.submit(prompt(12), max_tokens=length, ignore_eos=True)


static = []
async with session.paused():
    for start in range(0, len(LENGTHS), SLOTS):
        static += await stepping([submit(length) for length in LENGTHS[start : start + SLOTS]])

# %% [markdown]
# ## Continuous batching
#
# The engine does better: whenever a text ends, its slot goes to the next request *at the next step*. No text waits for
# another one to end. Submit all twelve at once and let the scheduler decide.

# %%
async with session.paused():
    continuous = await stepping([submit(length) for length in LENGTHS])

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
# ## Long prompts
#
# A prompt of hundreds of tokens is a long step, and every text that is being decoded would wait for it. The engine gives
# every step a budget, here `max_tokens_per_step=128`, that decode rows and prefill share: decoding texts take one token each,
# and a *chunk* of the prompt at most half of the budget.

# %%
async with session.paused():
    talkers = [submit(24), submit(24)]
    for _ in range(4):
        await session.step()
    reader = session.submit(prompt(420), max_tokens=4)
    chunked = await stepping([*talkers, reader])

for report in chunked[:6]:
    print(report)

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
# The two talkers got a token in every step, while the 420 tokens of the reader's prompt were worked off in seven chunks beside
# them.
#
# ## The price and the choice
#
# Smaller chunks mean shorter pauses for the talkers, and more steps until the reader has its first token. The budget sets the
# balance. Below, the longest pause that a talker sees while a prompt of 900 tokens arrives, and the reader's time to its first
# token.

# %%
await session.aclose()


async def arrival() -> list[float]:
    """Seconds of every step from the arrival of a long prompt to its first token."""
    async with session.paused():
        talker = submit(100)
        for _ in range(4):
            await session.step()
        reports = await stepping([session.submit(prompt(900), max_tokens=1)])
        talker.cancel()
    return [report.host_seconds + report.device_seconds for report in reports]


budgets, pause, first = (64, 128, 256, 512), [], []
for budget in budgets:
    options = {"max_requests": SLOTS, "max_tokens_per_step": budget, "prefix_cache": False, "precompile": "lazy"}
    async with rekindle.open("tiny", **options) as session:
        await arrival()  # compiles what this needs
        rounds = [await arrival() for _ in range(5)]
    pause.append(min(max(seconds) for seconds in rounds) * 1e3)
    first.append(min(sum(seconds) for seconds in rounds) * 1e3)

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
# The pause grows several times over, while the first token comes only a little earlier. The default is 512. Choose less where
# a step takes long, because the model is large or the device is slow, and a person watches the text.
#
# Tutorial 05 is about prompts that need not be computed at all.
