# %% [markdown]
# # 28 Your own engine: prefixes, sampling, drafts
#
# *What is left between my engine and a quick one, and how quick is mine?*
#
# **Before:** page 27; pages 04, 05 and 22 help. **Afterwards you can** write a prefix tree, repeatable draws and drafts, and say how your engine compares with rekindle and transformers.
#
# **Also called:** prefix tree = radix tree, automatic prefix caching; drafts by lookup = prompt lookup, n-gram speculation; guess = draft token.
#
# **Takes:** about 20 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# ![Seven steps, each of which changes one decision of the step before](../source/pictures/27_engine.svg)
#
# Page 27 has built an engine in four steps. Its cells are in the file [engine.py](engine.py), from which this page takes the last of them, `Paged`. Three steps are left, and they are
# compared with rekindle in the same way.

# %%
import importlib.util
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from engine import PAGE, Paged, Request, arrays

import rekindle
from rekindle import tiny
from rekindle.models import Tokenizer, load

COUNT = 24
PROMPTS = ["Once upon a time", "Tom had a red ball.", "The little bird sat on the", "One day, Lily"]
model, tokenizer = load(tiny.folder(), dtype="float32"), Tokenizer.load(tiny.folder())
prompts = [tokenizer.encode(text) for text in PROMPTS]
session = await rekindle.open(model, dtype="float32", max_requests=4, max_model_len=256, precompile="lazy", quiet=True)


async def reference(prompts: list[list[int]], **options: object) -> list[list[int]]:
    """Rekindle's tokens for these prompts."""
    done = await session.generate(prompts, max_tokens=COUNT, ignore_eos=True, **options)
    return [list(one.token_ids) for one in done]


expected = await reference(prompts)

# %% [markdown]
# ## 5 The prefix tree
#
# Two texts with the same beginning have the same keys and values there. So a page is kept after its text has left, under what it stands for: the page before it,
# and its own tokens. A new text walks down from the root as long as its whole pages are there (page 05), and computes the rest. A page that no text uses, and no other page follows,
# can be given up; the one that was not used for longest goes first.


# %% tags=["engine"]
class Shared(Paged):
    """Step 5: pages stay after their texts, and a text begins with those that it finds."""

    def build(self, rows: int) -> None:
        super().build(rows)
        self.tree: dict[tuple[int, tuple[int, ...]], int] = {}  # (page before, tokens) → page; last used last
        self.users: Counter[int] = Counter()

    def keys(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The tokens of each whole page, without the last token, which is always computed."""
        return [tuple(tokens[at : at + PAGE]) for at in range(0, len(tokens) - PAGE, PAGE)]

    def find(self, tokens: Sequence[int]) -> list[int]:
        pages, before = [], 0
        for key in self.keys(tokens):
            if (before, key) not in self.tree:
                break
            page = self.tree.pop((before, key))
            self.tree[before, key] = before = page  # now it was used last
            pages.append(page)
        return pages

    def keep(self, request: Request) -> None:
        """Put the whole pages of a text into the tree."""
        before = 0
        for key, page in zip(self.keys(request.tokens), request.pages, strict=False):
            before = self.tree.setdefault((before, key), page)  # another text may have been first

    def enter(self, row: int, request: Request) -> bool:
        request.pages = self.find(request.prompt)
        request.found = len(request.pages) * PAGE
        self.users.update(request.pages)  # so that they are not given up for its own new pages
        if not super().enter(row, request):
            self.users.subtract(request.pages)
            return False
        self.users.update(request.pages[request.found // PAGE :])
        self.keep(request)
        return True

    def leave(self, request: Request) -> None:
        self.keep(request)
        self.users.subtract(request.pages)
        kept = set(self.tree.values())
        self.free += [page for page in request.pages if page not in kept]

    def unused(self) -> list[tuple[int, tuple[int, ...]]]:
        """The keys of pages that no text uses: a page in use has only such pages before it."""
        return [key for key, page in self.tree.items() if not self.users[page]]

    def room(self) -> int:
        return len(self.free) + len(self.unused())

    def take(self) -> int:
        if not self.free:
            followed = {before for before, _ in self.tree}
            oldest = next(key for key in self.unused() if self.tree[key] not in followed)
            self.free.append(self.tree.pop(oldest))
        return self.free.pop()


# %% [markdown]
# **Predict.** Four prompts begin with the same 40 tokens, in pages of 16. How many tokens does the second one find?
#
# <details><summary>Answer</summary>
#
# **32**: two whole pages. The eight tokens in the third page are computed again.
#
# </details>

# %%
story = tokenizer.encode("Once upon a time there was a boy. His name was Tom. He had a dog. " * 3)[:40]
long = [story + prompt for prompt in prompts]
long_expected = await reference(long)
shared = Shared(model)
mine = shared.generate(long, COUNT)
print(mine == long_expected, [request.found for request in shared.last])
small = Shared(model, pages=9)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert shared.last[1].found == 32, "whole pages are found"
assert mine == long_expected, "step 5 says what rekindle says"
assert small.generate(long, COUNT) == long_expected, "pages are given up and computed again, and the tokens stay"

# %% [markdown]
# ## 6 Sampling
#
# A draw needs chance, and an engine needs to repeat itself. The solution is chance by *position*: a text's random numbers follow from its seed and the position of
# the token, not from what else runs or when (page 04). Ours are those of `jax.random.fold_in`. Two numbers choose a token: the first a block of the vocabulary by its share, the second
# a token within it. For `top_p` we draw, and draw again among likelier tokens if the token is not in the nucleus, so nothing has to be sorted.


# %% tags=["engine"]
def uniforms(seed: int, position: int, attempt: int) -> np.ndarray:
    """Two numbers from 0 to 1 that depend on nothing but these three."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), attempt)
    return (np.asarray(jax.random.key_data(key)) >> 8).astype(np.float32) / np.float32(2**24)


def first_above(weights: np.ndarray, uniform: float) -> int:
    """The index at which the cumulative share exceeds a number."""
    total = np.cumsum(weights, dtype=np.float32)
    return int(np.argmax((total > uniform * total[-1]) & (weights > 0)))


class Sampled(Shared):
    """Step 6: tokens are drawn."""

    def choose(self, request: Request, logits: np.ndarray) -> int:
        if not request.temperature:
            return super().choose(request, logits)
        size = 1 << max(5, round(math.log2(len(logits)) / 2))  # of a block
        scores = np.pad(logits - logits.max(), (0, -len(logits) % size), constant_values=-np.inf)
        scores = (scores / np.float32(request.temperature)).astype(np.float32)
        weights, floor = np.exp(scores), -np.inf
        for attempt in range(64):
            first, second = uniforms(request.seed, len(request.tokens), attempt)
            allowed = np.where(scores > floor, weights, 0).reshape(-1, size)
            block = first_above(allowed.sum(axis=1), first)
            token = block * size + first_above(allowed[block], second)
            if request.top_p >= 1 or weights[scores > scores[token]].sum() < request.top_p * weights.sum():
                break
            floor = scores[token]
        return token


# %% [markdown]
# **Predict.** The vocabulary has 2,048 tokens. A block has about as many tokens as there are blocks, rounded to a power of two: $2^5$ or $2^6$ tokens. With 64 tokens, how many blocks are there?
#
# <details><summary>Answer</summary>
#
# **32** blocks: two short looks instead of one along 2,048 numbers.
#
# </details>

# %%
options = {"temperature": 0.9, "top_p": 0.8, "seed": 7}
drawn = await reference(prompts, **options)
sampled = Sampled(model)
mine = sampled.generate(prompts, COUNT, **options)
print(mine == drawn, repr(tokenizer.decode(mine[0])))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert tokenizer.vocab_size == 2048, "the embedded vocabulary"
assert tokenizer.vocab_size // 64 == 32, "32 blocks of 64 tokens"
assert mine == drawn, "step 6 draws what rekindle draws"
assert mine != expected, "and that is not the likeliest text"
assert sampled.generate(prompts, COUNT) == expected, "without a temperature it takes the likeliest tokens"

# %% [markdown]
# ## 7 Drafts
#
# A step of one text reads all weights for one token. If we guess the next tokens, the same step can check several guesses, since the logits of all positions come out of one pass (page 22). Our
# guess is cheap: look for the last two tokens earlier in the text, and propose what followed them. Each position *chooses its own token* as before; a guess
# that is equal saves a step, and the first that is not ends the row. So drafts change how many steps a text takes, and never its tokens. If a guess is right with the
# share $a$, a step with $k$ guesses gives on average
#
# $$1 + a + a^2 + \ldots + a^k = \frac{1 - a^{k+1}}{1 - a} \quad \mathrm{tokens}$$


# %% tags=["engine"]
class Engine(Sampled):
    """Step 7: rows also compute guesses, and keep those that are right."""

    width = 5  # the last token, and four guesses

    def feed(self, request: Request) -> list[int]:
        most = min(self.width - 1, len(request.prompt) + request.count - len(request.tokens) - 1)
        return request.tokens[-1:] + lookup(request.tokens, most)

    def accept(self, request: Request, feed: list[int], logits: np.ndarray) -> None:
        for at, row in zip(range(len(feed)), logits, strict=False):
            token = self.choose(request, row)
            request.tokens.append(token)
            if feed[at + 1 : at + 2] != [token]:
                break


def lookup(tokens: Sequence[int], most: int, match: int = 2) -> list[int]:
    """The tokens that followed the last two at their latest earlier place."""
    last = list(tokens[-match:])
    for at in range(len(tokens) - match - 1, -1, -1):
        if list(tokens[at : at + match]) == last:
            return list(tokens[at + match : at + match + most])
    return []


# %% [markdown]
# **Predict.** A row computes its last token and four guesses. How many tokens does a step give a text at most?
#
# <details><summary>Answer</summary>
#
# **5**: the last guess's logits are good for one more.
#
# </details>

# %%
engine = Engine(model)
loop, taken = tokenizer.encode("The old clock\nwagon wagon wagon wagon"), []
for given, expected_texts in ([loop], await reference([loop])), (long, long_expected), (prompts, expected):
    before = engine.steps
    mine = engine.generate(given, COUNT)
    taken.append(engine.steps - before)
    print(mine == expected_texts, f"{len(given)} texts of {COUNT} tokens in {taken[-1]} steps")
    assert mine == expected_texts, "step 7 says what rekindle says"

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert engine.generate(prompts, COUNT, **options) == drawn, "drawn texts stay the same, too"
assert taken[0] <= COUNT / 2, "what repeats itself is guessed"
assert engine.width == 5, "a step gives a token more than it has guesses"

# %% [markdown]
# ## A real model
#
# The same classes run SmolLM2-135M-Instruct, whose file page 18 fetches. Its four-bit weights are unpacked to float32. The last part of the file is what a terminal calls:


# %% tags=["engine"]
def main() -> None:
    """`python engine.py MODEL "Once upon a time"`."""
    path, text = sys.argv[1], " ".join(sys.argv[2:]) or "Once upon a time"
    tokenizer, engine = Tokenizer.load(path), Engine(load(path, dtype="float32"), rows=1)
    prompt = tokenizer.encode(text)
    engine.generate([prompt], 2)  # compiles
    began, before = time.perf_counter(), engine.steps
    (tokens,) = engine.generate([prompt], 64)
    seconds = time.perf_counter() - began
    print(tokenizer.decode(prompt + tokens))
    print(f"{len(tokens)} tokens in {engine.steps - before} steps, {len(tokens) / seconds:.0f} tokens/s")


# %% tags=["real"]
fetched = (Path.home() / ".cache" / "rekindle-course").glob("*/*.gguf")
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
print(
    Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this section goes on with the embedded one"
)
real_path = smollm2 or tiny.folder()
real, real_tokenizer = load(real_path, dtype="float32"), Tokenizer.load(real_path)
TEXTS = ["The capital of Italy is", "Once upon a time", "Water boils at", "List the days: Monday, Tuesday, Wednesday,"]
real_prompts = [real_tokenizer.encode(text) for text in TEXTS]


def measure(name: str, rows: int, run: Callable[[], list[list[int]]]) -> None:
    """Keep the texts of a run, which compiles, and the tokens a second of the quickest run of the next seconds."""
    texts[name, rows] = run()
    end, seconds = time.perf_counter() + 2, []
    while not seconds or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    speeds[name, rows] = REAL_COUNT * rows / min(seconds)


real_engine, texts, speeds, REAL_COUNT = Engine(real), {}, {}, 12
for rows in (1, 4):
    measure("this page", rows, partial(real_engine.generate, real_prompts[:rows], REAL_COUNT))

# %% [markdown]
# The same with rekindle, with the same weights in float32 and with the file as it is, and, if torch and transformers are installed, with
# `transformers.generate`. It gets the same weights under its own names.

# %% tags=["real"]
for name, given in (("rekindle, float32", real), ("rekindle, the file", real_path)):
    with rekindle.open_sync(
        given, max_requests=4, max_model_len=256, prefix_cache=False, precompile="lazy", quiet=True
    ) as other:

        def run(rows: int) -> list[list[int]]:
            done = other.generate_sync(real_prompts[:rows], max_tokens=REAL_COUNT, ignore_eos=True)
            return [list(one.token_ids) for one in done]

        for rows in (1, 4):
            measure(name, rows, partial(run, rows))

# %% tags=["real"]
if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config, w = real.config, {name: torch.tensor(np.asarray(a)) for name, a in arrays(real).items()}
    with torch.device("meta"):
        llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=w["layers.0.mlp.down.weight"].shape[1],
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.ropes[0].theta},
                tie_word_embeddings="head.weight" not in w,
            )
        )
    named = {"model.embed_tokens.weight": w["embed.weight"], "model.norm.weight": w["norm.weight"]}
    named["lm_head.weight"] = w.get("head.weight", w["embed.weight"])
    sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        qkv = dict(zip("qkv", w[f"{ours}.attention.qkv.weight"].split(sizes), strict=True))
        named |= {f"{theirs}.self_attn.{part}_proj.weight": matrix for part, matrix in qkv.items()}
        named[f"{theirs}.self_attn.o_proj.weight"] = w[f"{ours}.attention.out.weight"]
        gate, up = w[f"{ours}.mlp.gate_up.weight"].chunk(2)
        named |= {f"{theirs}.mlp.gate_proj.weight": gate, f"{theirs}.mlp.up_proj.weight": up}
        named[f"{theirs}.mlp.down_proj.weight"] = w[f"{ours}.mlp.down.weight"]
        named[f"{theirs}.input_layernorm.weight"] = w[f"{ours}.attention_norm.weight"]
        named[f"{theirs}.post_attention_layernorm.weight"] = w[f"{ours}.mlp_norm.weight"]
    llama.load_state_dict(named, assign=True)
    llama.model.rotary_emb = type(llama.model.rotary_emb)(llama.config)  # its frequencies are no weights
    llama.generation_config.eos_token_id = None
    length = {"max_new_tokens": REAL_COUNT, "min_new_tokens": REAL_COUNT, "do_sample": False, "pad_token_id": 0}

    def padded(rows: int) -> list[list[int]]:
        """Texts of one batch have one length there: shorter prompts get padding in front."""
        given = real_prompts[:rows]
        pad = [max(map(len, given)) - len(prompt) for prompt in given]
        ids = torch.tensor([[0] * n + prompt for n, prompt in zip(pad, given, strict=True)])
        mask = torch.tensor([[0] * n + [1] * len(prompt) for n, prompt in zip(pad, given, strict=True)])
        return llama.generate(ids, attention_mask=mask, **length)[:, ids.shape[1] :].tolist()

    for rows in (1, 4):
        measure("transformers", rows, partial(padded, rows))

# %% tags=["real"]
print(f"{'tokens/s':20}{'one text':>10}{'four texts':>12}   same tokens as this page")
for name in dict.fromkeys(name for name, _ in speeds):
    same = sum(a == b for a, b in zip(texts[name, 4], texts["this page", 4], strict=True))
    print(f"{name:20}{speeds[name, 1]:10.0f}{speeds[name, 4]:12.0f}   {same} of 4 texts")
print(repr(TEXTS[0] + real_tokenizer.decode(texts["this page", 4][0])))
assert texts["rekindle, float32", 4] == texts["this page", 4], "on a trained model, too, both say the same"
assert texts.get(("transformers", 4), texts["this page", 4]) == texts["this page", 4], "and so does transformers"

# %% [markdown]
# ## Exercise
#
# Write an eighth step, `Penalised`: a token that the text has since its prompt loses `penalty` from its logit, each time it is chosen from. One method is enough. rekindle calls the option `presence_penalty`.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
class Penalised(Engine):
    penalty = 1.0

    def choose(self, request: Request, logits: np.ndarray) -> int:
        logits = logits.copy()
        logits[list(set(request.tokens[len(request.prompt) :]))] -= self.penalty
        return super().choose(request, logits)


penalised = await reference(prompts, presence_penalty=1.0)
mine = Penalised(model).generate(prompts, COUNT)
print(mine == penalised, repr(tokenizer.decode(mine[0])))
assert mine == penalised, "an option is one decision of the engine"
assert mine != expected, "and it changes the text"

# %% [markdown]
# ## Takeaway
#
# Because a token's choice depends on its text, its seed and its position alone, an engine may find a beginning, guess ahead or change the company a text runs in without changing a token. Speed is in *how*
# a step computes, not in what it decides: the table above shows how much of it is left to kernels and formats.
#
# ## In production
#
# What real engines add to these seven steps is mostly kernels and edges: pages read in place, weights in 4 to 16 bits, the next step planned while this one runs (page 12), texts moved out when pages run short; and cancelling, errors, limits, servers.
#
# ## Further reading
#
# - Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2022, [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)
# - Zheng et al., *SGLang* (the prefix tree), 2023, [arXiv:2312.07104](https://arxiv.org/abs/2312.07104)
# - Saxena, *Prompt Lookup Decoding*, 2023

# %%
await session.aclose()
