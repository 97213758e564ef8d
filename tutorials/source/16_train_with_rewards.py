# %% [markdown]
# # 16 Train with rewards
#
# *Can I train the model that I have open, here, until it does what it could not do before?*
#
# **Before:** page 15 or some JAX; gradients. **Afterwards you can** write a reward, draw rollouts, and train the open model in a loop.
#
# **Also called:** rollout = generation phase; GRPO = group relative policy optimization; `swap_weights` = weight sync; advantage = normalised reward.
#
# **Takes:** about 15 minutes, with the embedded model.
#
# Reinforcement learning of a language model is a loop of two halves. The model writes many answers to each question, and each answer gets
# a reward; then its weights change a little, so that answers with more reward become likelier. The first half is inference and takes most
# of the time, so it needs an engine. The second half is a few lines of JAX. Here both run on one device and share one set of arrays.
#
# ![Answers, marks, an update, and again with the new weights](../source/pictures/16_rollouts.svg)

# %%
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import rekindle

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
model = rekindle.models.load(rekindle.tiny.folder(), dtype="float32")
session = await rekindle.open(model, dtype="float32", max_requests=64, max_model_len=64, precompile="lazy", quiet=True)

# %% [markdown]
# ## What it can't do
#
# The embedded model adds numbers that are written in digits. It has never seen a sum of numbers that are written in words.

# %%
for question in ("What is 6 + 5?", "What is six + five?", "What is six plus five?", "six + five = ?"):
    done = await session.chat([{"role": "user", "content": question}], max_tokens=16)
    print(f"{question:26} {done.text!r}")

# %% [markdown]
# ## A reward
#
# No example of a right answer is shown to the model. All it gets is marks: most for the right sum at the end, and a few for each number
# that it read correctly. Part marks matter. If only complete answers counted, most questions would have no answer that is better than
# the others, and nothing could be learned from them.
#
# **Predict.** Which mark does “6 + 5 = 12” get for six plus five?
#
# <details><summary>Answer</summary>
#
# **0.4**: both numbers were read correctly.
#
# </details>

# %%
WORDS = ("one", "two", "three", "four", "five", "six")


def ask(left, right, form="What is {} plus {}?"):
    """The prompt of a question, as the chat template has it."""
    text = form.format(WORDS[left - 1], WORDS[right - 1])
    return session.render([{"role": "user", "content": text}])


def marks(text, left, right):
    numbers = [int(number) for number in re.findall(r"\b\d+\b", text)]
    return 0.6 * (numbers[-1:] == [left + right]) + 0.2 * (numbers[:1] == [left]) + 0.2 * (numbers[1:2] == [right])


print(marks("6 + 5 = 11", 6, 5), marks("6 + 5 = 12", 6, 5), marks("I don't know that.", 6, 5))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert marks("6 + 5 = 12", 6, 5) == 0.4, "part marks for reading the question"

# %% [markdown]
# ## Rollouts
#
# `session.rollout` draws `n` answers to each prompt, which is computed once, and returns arrays of one shape: tokens, a mask of those
# that were drawn, and the log-probability that each had when it was drawn. `pad_to` keeps the shape the same from step to step.
#
# **Predict.** Eight answers of up to 12 tokens to one prompt. How many rows and columns has `batch.tokens` with `pad_to=32`?
#
# <details><summary>Answer</summary>
#
# **8** rows of **32**.
#
# </details>

# %%
batch = await session.rollout(ask(6, 5), n=8, max_tokens=12, pad_to=32, seed=0)
batch

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert batch.tokens.shape == (8, 32), "a row for each answer, padded to one length"

# %% [markdown]
# ## A loss
#
# The trainer's model is the engine's model: `merge` makes the module of the same arrays, and `token_logprobs` runs it over whole sequences
# in a form that can be differentiated. Before the first update both halves should agree about the answers above.

# %%
graph, params = nnx.split(rekindle.models.merge(model.graph, model.leaves))
logprobs = jax.jit(lambda params, tokens: rekindle.models.token_logprobs(nnx.merge(graph, params), tokens))
difference = np.abs(logprobs(params, batch.tokens) - batch.logprobs)[batch.completion_mask]
print(f"{len(difference)} tokens, largest difference of log-probabilities {difference.max():.1e}")

# %% [markdown]
# GRPO (Shao et al., 2024) compares answers with the others to the same question. An answer's *advantage* is how much better than their
# mean it is, in their standard deviations. Tokens of good answers become likelier, those of bad ones less likely, but not by more than a
# fifth in one step: a ratio beyond that has no gradient.
#
# $$A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)} \qquad \rho_i = \frac{p_{\mathrm{new}}}{p_{\mathrm{old}}} \qquad \max \sum_i \min(\rho_i A_i, \mathrm{clip}(\rho_i, 0.8, 1.2) A_i)$$

# %%
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, b2=0.99))
state = optimizer.init(params)


@jax.jit
def update(params, state, tokens, mask, drawn, advantages):
    def loss(params):
        ratio = jnp.exp(rekindle.models.token_logprobs(nnx.merge(graph, params), tokens) - drawn)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -(gain * mask).sum() / mask.sum()

    gradients = jax.grad(loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


# %% [markdown]
# ## The loop
#
# Forty-eight sums of two dice with eight answers each; one update with the 96 answers that stand out the most (many groups agree, and have
# nothing to say); then `swap_weights`: the engine goes on with the trainer's arrays as they are, without a copy.

# %%
STEPS, QUESTIONS, ANSWERS, LINES = 20, 48, 8, 96
random = np.random.default_rng(0)
rewards, right = [], []

for step in range(STEPS):
    sums = random.integers(1, 7, (QUESTIONS, 2)).tolist()
    prompts = [ask(*pair) for pair in sums]
    batch = await session.rollout(prompts, n=ANSWERS, max_tokens=12, pad_to=32, seed=step)
    earned = np.array([marks(text, *sums[group]) for text, group in zip(batch.texts, batch.groups, strict=True)])
    groups = earned.reshape(QUESTIONS, ANSWERS)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    advantages = advantages.reshape(-1, 1).astype(np.float32)
    best = np.argsort(-np.abs(advantages[:, 0]), kind="stable")[:LINES]
    chosen = (array[best] for array in (batch.tokens, batch.completion_mask, batch.logprobs, advantages))
    params, state = update(params, state, *chosen)
    version = await session.swap_weights(params)
    rewards.append(earned.mean())
    right.append((earned > 0.5).mean())
    if step == 3:
        compiled = session.stats().compilations
    if step % 4 == 0 or step == STEPS - 1:
        print(f"step {step:2}  reward {rewards[-1]:.2f}  {batch.texts[0]!r}")

# %%
recompiled = session.stats().compilations - compiled
plt.plot(rewards, label="reward")
plt.plot(right, label="share of right sums", color="0.7")
plt.xlabel("step")
plt.ylim(0, 1)
plt.legend(fontsize=8)
plt.show()
print(f"reward {rewards[0]:.2f} in the first step, {np.mean(rewards[-4:]):.2f} in the last four")
assert rewards[0] < 0.2, "before training nearly no sum in words is right"
assert np.mean(rewards[-4:]) > 0.8, "twenty steps teach it"

# %% [markdown]
# ## What it can do now
#
# Every sum of two dice, answered greedily, also in two forms that it was never trained on. The old weights are still there: `model` has
# them.
#
# **Predict.** There are 36 sums of two dice. About how many does the trained model get right in the form that it was trained on, and how many before: 5, 18 or 35?
#
# <details><summary>Answer</summary>
#
# About **35**, and **5** before.
#
# </details>

# %%
FORMS = ("What is {} plus {}?", "What is {} + {}?", "{} + {} = ?")


async def right_sums():
    pairs = [(left, right, form) for form in FORMS for left in range(1, 7) for right in range(1, 7)]
    answers = await session.generate([ask(*pair) for pair in pairs], max_tokens=16)
    return [marks(done.text, *pair[:2]) > 0.5 for done, pair in zip(answers, pairs, strict=True)]


after = await right_sums()
await session.swap_weights(model)
before = await right_sums()
await session.swap_weights(params)
for number, form in enumerate(FORMS):
    part = slice(36 * number, 36 * number + 36)
    print(f"{form:22} {sum(before[part]):2} of 36 before, {sum(after[part]):2} after")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert min((5, 18, 35), key=lambda one: abs(one - sum(after[:36]))) == 35, (
    "it has learned the form that it was trained on"
)
assert min((5, 18, 35), key=lambda one: abs(one - sum(before[:36]))) == 5, "which it could not do before"

# %%
for question in ("What is six plus five?", "What is 6 + 5?", "Who are you?"):
    done = await session.chat([{"role": "user", "content": question}], max_tokens=24)
    print(f"{question:26} {done.text!r}")

# %% [markdown]
# It pays for that: asked who it is, it answers with a sum. Nothing in the marks says that other questions should keep their answers, and
# 20 steps at this rate are enough to overwrite them. Trainers add a term for it, a penalty on the distance from the first model.
#
# ## What the engine does
#
# The arrays of the last update are the engine's weights: the same memory, at the same address. Prompts and answers of other weights are not
# in the cache any more, and sequences that run during a swap go on with the new weights; `batch.versions` says which weights drew a token.
# Other weights compile nothing: the few programs that the later steps compiled are for batches of sizes that had not come up before.

# %%
assert recompiled < 8, "swapping the weights sixteen times compiles fewer than eight programs"
leaves = jax.tree.leaves(params)
print(f"version {version}; {recompiled} programs were compiled in steps 4 to 19")
print(
    f"{len(leaves)} arrays of {sum(leaf.nbytes for leaf in leaves) / 1e6:.0f} MB; the last answers are of",
    np.unique(batch.versions)[1:],
)

# %% [markdown]
# A larger model would share an accelerator with its optimizer the same way, or sleep during updates: `session.sleep()` gives the device's
# memory back, and `session.wake(weights=params)` goes on. A session with `deterministic=True` draws with the trainer's log-probabilities to
# the last bit (`rekindle.models.logprobs_like`).

# %% [markdown]
# ## Exercise
#
# Write `advantages(rewards)` by the formula. What does a group get in which all answers earn the same? And the only right one among eight?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def advantages_of(rewards: list[float]) -> np.ndarray:
    marks = np.array(rewards)
    return (marks - marks.mean()) / (marks.std() + 1e-4)


print(advantages_of([0.4] * 8).round(2), advantages_of([1.0] + [0.0] * 7).round(2), sep="\n")
assert np.all(advantages_of([0.4] * 8) == 0), "a group that agrees teaches nothing"
assert abs(advantages_of([1.0] + [0.0] * 7)[0] - np.sqrt(7)) < 0.01, "one right among eight is worth the root of seven"

# %% [markdown]
# ## Takeaway
#
# Sampling and training can share one set of weights. Rewards move the model to forms that it could nearly produce already, and a held-out form shows
# what it has not learned.
#
# ## In production
#
# Trainers such as veRL and OpenRLHF put engine and optimizer on many devices, send weights over the network, let rollouts run a few versions behind, and correct for it with the ratio above.
#
# ## Further reading
#
# - Schulman et al., *Proximal Policy Optimization Algorithms*, 2017, [arXiv:1707.06347](https://arxiv.org/abs/1707.06347)
# - Shao et al., *DeepSeekMath*, 2024 (GRPO), [arXiv:2402.03300](https://arxiv.org/abs/2402.03300)
# - Sheng et al., *HybridFlow: A Flexible and Efficient RLHF Framework*, 2024, [arXiv:2409.19256](https://arxiv.org/abs/2409.19256)

# %%
await session.aclose()
