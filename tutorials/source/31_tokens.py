# %% [markdown]
# # 31 Tokens
#
# *How does text become numbers, and what does the model never see because of it?*
#
# **Before:** page 01; dictionaries in Python. **Afterwards you can** write byte-pair encoding, compare vocabularies on your own text, and explain prompts that end in a space.
#
# **Also called:** byte-pair encoding = BPE; vocabulary = vocab; special tokens = control tokens, added tokens; tokens for each word = fertility.
#
# **Takes:** about 15 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# ![Text becomes tokens, tokens a distribution, and the token drawn from it is appended](../source/pictures/01_generation.svg)
#
# A model knows no letters. It reads a list of numbers, and each number stands for a piece of text that was frequent where the tokenizer was made. Prices, limits and speeds are counted in these pieces, and
# some of what models do badly begins here.

# %%
import itertools
import os
from collections import Counter
from pathlib import Path

import rekindle
from rekindle import tiny
from rekindle.models import Tokenizer

fetched = (Path.home() / ".cache" / "rekindle-course").glob("*/*.gguf")
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
tokenizers = {"embedded": Tokenizer.load(tiny.folder())}
if smollm2:
    tokenizers["SmolLM2"] = Tokenizer.load(smollm2)
print({name: f"{one.vocab_size:,} tokens" for name, one in tokenizers.items()})

# %% [markdown]
# ## Begin with bytes
#
# Every text is bytes (UTF-8), and there are 256 of them: a vocabulary that can write everything. It is also wasteful, since a step of the model would make one byte.
#
# **Predict.** How many bytes does `Käse` have? And the single character `🧀`?
#
# <details><summary>Answer</summary>
#
# **5**, since *ä* takes two, and **4**.
#
# </details>

# %%
for text in ("cheese", "Käse", "チーズ", "🧀"):
    print(f"{text:8} {len(text)} characters, {len(text.encode())} bytes")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len("Käse".encode()) == 5, "an umlaut has two bytes"
assert len("🧀".encode()) == 4, "an emoji has four"

# %% [markdown]
# ## Merge what is frequent
#
# Byte-pair encoding makes larger pieces: count all pairs of neighbours, give the most frequent pair a number of its own, replace it everywhere, and go on. Text is divided into words first (here before each space), so that
# no piece spans two words. Each merge makes a text shorter by as many tokens as the pair occurs:
#
# $$\mathrm{tokens} = \mathrm{bytes} - \sum_{\mathrm{merges}} \mathrm{occurrences}$$
#
# **Predict.** In `low low lower newest newest`, which pair of letters is merged first, *l o* or *e w*, and how often does it occur?
#
# <details><summary>Answer</summary>
#
# *l o*, **3** times. *e w* is there twice. *o w* and *w e* are there three times as well: the first that was counted wins.
#
# </details>


# %%
def words(text: str) -> list[bytes]:
    """The text, divided before each space."""
    return text.replace(" ", "\0 ").encode().split(b"\0")


def pairs(pieces: list[list[bytes]]) -> Counter[tuple[bytes, bytes]]:
    return Counter(pair for word in pieces for pair in itertools.pairwise(word))


def joined(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """The pieces of a word with each occurrence of a pair made one."""
    made: list[bytes] = []
    for piece in word:
        if made and (made[-1], piece) == pair:
            made[-1] += piece
        else:
            made.append(piece)
    return made


def train(text: str, merges: int) -> list[tuple[bytes, bytes]]:
    pieces, learned = [[bytes([byte]) for byte in word] for word in words(text)], []
    for _ in range(merges):
        counts = pairs(pieces)
        if not counts or counts.most_common(1)[0][1] < 2:
            break
        learned.append(counts.most_common(1)[0][0])
        pieces = [joined(word, learned[-1]) for word in pieces]
    return learned


def encode(text: str, merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Apply the merges in the order in which they were learned."""
    pieces = [[bytes([byte]) for byte in word] for word in words(text)]
    for pair in merges:
        pieces = [joined(word, pair) for word in pieces]
    return [piece for word in pieces for piece in word]


example = "low low lower newest newest"
first = pairs([[bytes([byte]) for byte in word] for word in words(example)])
print(first.most_common(4))
print(encode("newer lows", train(example, 8)))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert first[b"l", b"o"] == 3, "low, low and lower"
assert b"".join(encode("Käse, lower", train(example, 8))).decode() == "Käse, lower", "nothing is lost"

# %% [markdown]
# The word *newer* was never seen, and is written with pieces of others. That is the point: no text is impossible, and frequent text is short.
#
# ## What a vocabulary knows
#
# A tokenizer is good at what it was trained on. The embedded model's was made of children's stories.

# %%
SAMPLES = {
    "a story": "Once upon a time there was a little girl who had a red ball.",
    "English": "The committee postponed its decision on the proposed amendment.",
    "German": "Der Ausschuss hat seine Entscheidung über den Antrag vertagt.",
    "Japanese": "委員会は提案された修正案に関する決定を延期した。",
    "Python": "def add(left: int, right: int) -> int:\n    return left + right",
    "digits": "3141592653 + 2718281828",
}
print(f"{'characters per token':22}" + "".join(f"{name:>10}" for name in tokenizers))
rates = {}
for name, text in SAMPLES.items():
    rates[name] = [len(text) / len(one.encode(text, add_special_tokens=False)) for one in tokenizers.values()]
    print(f"{name:22}" + "".join(f"{rate:10.1f}" for rate in rates[name]))
best, worst = (choose(rates, key=lambda name: rates[name][-1]) for choose in (max, min))
print(
    f"{list(tokenizers)[-1]}: {worst} takes {rates[best][-1] / rates[worst][-1]:.1f} times the tokens of {best} for as many characters"
)
assert rates["a story"][0] > rates["English"][0], "children's stories are what this vocabulary was made of"

# %% [markdown]
# The same limit of tokens is a different length of text in each language, and so is the price. The vocabulary is the first bias of a model.
#
# ## What the model does not see
#
# It sees pieces, not letters. How many letters *r* are in a word it can only have read somewhere; sums of long numbers depend on how digits were grouped. And a space belongs to the *following* word:
#
# **Predict.** `"Once upon a time"` and `"Once upon a time "` differ by a space. Is the first list of tokens the beginning of the second, and by how many tokens do they differ?
#
# <details><summary>Answer</summary>
#
# It is, with **1** token more: a lone space, after which the model has hardly ever seen a word, since words bring their own. A prompt should not end in a space.
#
# </details>

# %%
tokenizer = tokenizers["embedded"]
plain, spaced = (tokenizer.encode(text) for text in ("Once upon a time", "Once upon a time "))
print([tokenizer.token(one) for one in plain], [tokenizer.token(one) for one in spaced])

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert spaced[: len(plain)] == plain, "the pieces before the space stay"
assert len(spaced) - len(plain) == 1, "a lone space is a token"

# %%
session = await rekindle.open("tiny", max_requests=2, max_model_len=256, precompile="lazy", quiet=True)
for prompt in ("Once upon a time", "Once upon a time "):
    done = await session.generate(prompt, max_tokens=12)
    print(repr(prompt), "→", repr(done.text))
there_and_back = [
    one.decode(one.encode(text, add_special_tokens=False)) == text
    for one in tokenizers.values()
    for text in SAMPLES.values()
]
print(f"{sum(there_and_back)} of {len(there_and_back)} samples come back as they were")

# %% [markdown]
# ## Exercise
#
# Train your own vocabulary on the page's own samples, with as many merges as it finds up to 200. How many tokens does `"a story"` have with it, and with none?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
merges = train(" ".join(SAMPLES.values()) * 2, 200)
story = SAMPLES["a story"]
print(f"{len(encode(story, merges))} tokens with {len(merges)} merges, {len(encode(story, []))} without")
assert len(encode(story, [])) == len(story.encode()), "without merges a token is a byte"
assert len(encode(story, merges)) < len(story.encode()) / 2, "merges halve it, at least"

# %% [markdown]
# ## Takeaway
#
# A tokenizer replaces frequent neighbours by one number, so that any text can be written and frequent text is short. Limits and prices count these numbers. The model never sees letters, and a prompt should not end in a space.
#
# ## In production
#
# Vocabularies have one to three hundred thousand tokens, split digits into groups of up to three, and keep special tokens for turns, tools and pictures. Tokenizing a long prompt takes milliseconds on the host, in a process of its own if the text is long.
#
# ## Further reading
#
# - Sennrich et al., *Neural Machine Translation of Rare Words with Subword Units*, 2015, [arXiv:1508.07909](https://arxiv.org/abs/1508.07909)
# - Karpathy, *Let's build the GPT Tokenizer*, 2024
# - Petrov et al., *Language Model Tokenizers Introduce Unfairness Between Languages*, 2023, [arXiv:2305.15425](https://arxiv.org/abs/2305.15425)

# %%
await session.aclose()
