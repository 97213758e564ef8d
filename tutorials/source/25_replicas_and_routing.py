# %% [markdown]
# # 25 Replicas and routing
#
# *Which replica should a request go to, and what does the wrong one cost?*
#
# **Before:** pages 03 and 05. **Afterwards you can** compare routers and numbers of replicas before there are machines, write a router, and run two replicas as one object.
#
# **Also called:** replica = worker, instance, data-parallel rank; affinity = prefix-aware or cache-aware routing, session stickiness; a fleet = a deployment.
#
# **Takes:** about 15 minutes, with the embedded model.
#
# ![A router sends a request to the replica that has its beginning](../source/pictures/25_routing.svg)
#
# One engine serves as many requests as fit into its steps. Beyond that you need several, and each has a prefix cache of its own.
# A router that spreads requests evenly spreads their beginnings, too: every replica computes every system prompt. A router that
# looks at beginnings alone sends everyone who uses a popular assistant to one replica.
#
# A simulation shows the difference without machines. Scheduler, prefix cache and routers below are the engine's own; only the
# device is replaced, by a step that takes
#
# $$t = t_{\mathrm{step}} + t_{\mathrm{row}} \cdot \mathrm{rows} + t_{\mathrm{prefill}} \cdot \mathrm{prompt\ tokens}$$
#
# Names from `rekindle._src` are private; they are shown here for teaching and may change. `rekindle simulate` is their command.

# %%
import importlib.util
import random

import matplotlib.pyplot as plt

import rekindle

# Names below `rekindle._src` are private: they may change from one version to the next.
from rekindle._src.bench.simulation import StepCost, chats, simulate
from rekindle._src.replicas.routing import Route

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
COST = StepCost(step=8e-3, row=50e-6, prefill=40e-6, context=1e-8)  # about 8B on one GPU
CONFIG = rekindle.EngineConfig(
    max_requests=64, max_tokens_per_step=512, max_model_len=8192, page_size=16, device_pages=2000
)
assert CONFIG.device_pages * CONFIG.page_size == 32_000, "tokens of cache in each replica"
asks = chats(random.Random(0), 300, 12.0, systems=8)
print(f"{len(asks)} requests in {asks[-1].at:.0f} s, {sum(ask.length for ask in asks) // len(asks)} prompt tokens each")

# %% [markdown]
# ## Three routers
#
# The load is chats: 8 system prompts, a few of them popular, and about four turns each. Eight replicas, each with room for
# 32,000 tokens of cache.
#
# **Predict.** `round-robin` gives the next request to the next replica. The busiest one has how many times the mean number of requests? And which router finds more in the caches, and by how much?
#
# <details><summary>Answer</summary>
#
# **1.0** times: nothing is as even as a circle. `affinity` finds more than **0.1** more of all prompt tokens, because a conversation
# comes back to the replica that has it.
#
# </details>

# %%
outcomes = {}
for router in ("round-robin", "shortest", "affinity"):
    outcomes[router] = one = simulate(asks, CONFIG, COST, replicas=8, router=router)
    print(f"{router:12} {one.hit_rate:.2f} from the cache, first token {one.first_token[0] * 1e3:3.0f} ms, "
          f"slowest hundredth {one.first_token[1] * 1e3:3.0f}; busiest {one.imbalance:.2f} of the mean")  # fmt: skip

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(outcomes["round-robin"].imbalance, 1) == 1.0, "a circle is even"
assert min(outcomes.values(), key=lambda one: one.first_token[0]) is outcomes["affinity"], "hits shorten most waits"
assert max(outcomes.values(), key=lambda one: one.first_token[1]) is outcomes["affinity"], (
    "a busy replica's are the longest"
)
assert outcomes["affinity"].hit_rate - outcomes["round-robin"].hit_rate > 0.1, "who comes back finds its pages"

# %% [markdown]
# Affinity finds the most, and its first tokens come soonest in the middle. The price is unevenness: its slowest hundredth waits
# longest of the three, in the queue of a popular replica. Unevenness is bounded at each moment: a replica whose requests are a quarter above
# the mean just then gets no request that could go elsewhere. Over the whole run the busiest one still gets more than that, as the last
# column shows: any replica may have two requests, so that a nearly idle fleet keeps its conversations together.
#
# ## How many replicas?
#
# **Predict.** One replica finds more than 80 % of the prompt tokens in its cache. Which share do eight find with `round-robin`, and with `affinity`?
#
# <details><summary>Answer</summary>
#
# Less than **0.6**: each of them sees an eighth of the requests, and computes every beginning for itself. With affinity it is above
# **0.7**.
#
# </details>

# %%
counts, shares = (1, 2, 8), {}
for router in ("round-robin", "affinity"):
    measured = [simulate(asks, CONFIG, COST, replicas=count, router=router).hit_rate for count in counts[:-1]]
    shares[router] = [*measured, outcomes[router].hit_rate]
    plt.plot(counts, shares[router], "o-", label=router)
plt.xticks(counts)
plt.ylim(0)
plt.xlabel("replicas")
plt.ylabel("share of prompt tokens\nfrom the cache")
plt.legend()
plt.show()

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert shares["round-robin"][0] > 0.8, "one cache knows everybody"
assert shares["round-robin"][-1] < 0.6, "eight caches that know everybody a little"
assert shares["affinity"][-1] > 0.7, "eight caches that know their own conversations"

# %% [markdown]
# ## What hits are worth
#
# Tokens that are found need not be computed. The devices are idle for longer, or the same devices serve more people.
#
# **Predict.** With `round-robin` the eight devices compute for 35 % of the time. For about how many points less with affinity: 1, 5 or 15?
#
# <details><summary>Answer</summary>
#
# About **5**: one device in seven could go.
#
# </details>

# %%
for router, one in outcomes.items():
    print(f"{router:12} devices busy {one.busy:.1%} of the time")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert (
    min((1, 5, 15), key=lambda one: abs(one - 100 * (outcomes["round-robin"].busy - outcomes["affinity"].busy))) == 5
), "hits are time of devices"

# %% [markdown]
# ## For real
#
# `rekindle.fleet` opens sessions in processes of their own, on [Ray](https://docs.ray.io) (`pip install "rekindle[ray]"`), and is
# used as one session. Here are two, with two conversations. Without Ray, this part is left out.

# %%
fleet = None
if importlib.util.find_spec("ray") is not None:
    fleet = await rekindle.fleet("tiny", replicas=2, max_requests=4, max_model_len=512, precompile="lazy", quiet=True)
if fleet is not None:
    for name in ("Anna", "Tom"):
        system = {"role": "system", "content": f"You talk with {name}. " * 12}
        talk = [system, {"role": "user", "content": f"My name is {name}."}]
        for question in ("What is my name?", "What is 2 + 3?"):
            reply = await fleet.chat(talk, max_tokens=16)
            talk += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": question}]
        reply = await fleet.chat(talk, max_tokens=16)
        print(
            f"{name}: {reply.text!r}, {reply.usage.cached_tokens} of {reply.usage.prompt_tokens} tokens from the cache"
        )
        assert reply.usage.cached_tokens > 0, "a conversation comes back to its replica"
    await fleet.aclose()
else:
    print("Ray is not installed")

# %% [markdown]
# When a process dies, its requests go on in another one, from the tokens that have come. [Replicas](../guide/fleets.md)
# has the rest: growing with the load, other weights one replica at a time, a cache for many machines.

# %% [markdown]
# ## Exercise
#
# Write a router that looks at two replicas drawn at random and takes the one with fewer requests (*power of two choices*). How even is it, compared with `affinity`?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
class TwoChoices:
    def __init__(self) -> None:
        self.draw = random.Random(0)

    def choose(self, keys, loads):
        two = self.draw.sample([load for load in loads if not load.full], 2)
        best = min(two, key=lambda load: load.running)
        return Route(best.name, "the emptier of two")


two = simulate(asks, CONFIG, COST, replicas=8, router=TwoChoices())
print(f"{two.hit_rate:.2f} from the cache; busiest {two.imbalance:.2f} of the mean")
assert two.imbalance < outcomes["shortest"].imbalance, "two choices are evener than the first of the shortest"
assert two.hit_rate < outcomes["affinity"].hit_rate, "and know no conversations"

# %% [markdown]
# ## Takeaway
#
# Send a request where its beginning is cached, unless that replica is too busy. Even circles waste caches; pure affinity makes queues.
#
# ## In production
#
# Routers know what each replica has cached, from its events (vLLM's router, NVIDIA Dynamo, llm-d), and weigh hits against load. Prompts and answers are divided over machines where links are quick. Conversations are moved with their pages when a machine drains.
#
# ## Further reading
#
# - Mitzenmacher, *The Power of Two Choices in Randomized Load Balancing*, IEEE TPDS, 2001
# - Zhong et al., *DistServe*, 2024, [arXiv:2401.09670](https://arxiv.org/abs/2401.09670)
# - Qin et al., *Mooncake*, 2024, [arXiv:2407.00079](https://arxiv.org/abs/2407.00079)
# - Srivatsa et al., *Preble: Efficient Distributed Prompt Scheduling for LLM Serving*, 2024, [arXiv:2407.00023](https://arxiv.org/abs/2407.00023)
