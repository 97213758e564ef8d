# %% [markdown]
# # 26 Pictures
#
# *How does a model read a picture?*
#
# **Before:** pages 02 and 05; 15 for the rows. **Afterwards you can** ask a model about a figure, say what a picture costs in tokens, and look at what an encoder hands to a language model.
#
# **Also called:** encoder of pictures = vision tower, ViT; projector = connector, adapter; the rows of a picture = image tokens, soft tokens, visual embeddings.
#
# **Takes:** about 15 minutes, with the embedded model.
#
# ![A picture is cut into patches, an encoder makes rows of them, and the rows stand among the embeddings of words](../source/pictures/26_pictures.svg)
#
# A language model reads rows of numbers, one for each token. It does not matter to its layers where a row comes from: those of words
# come from a table, and those of a picture from a second network, the encoder. It cuts the picture into patches of $p \times p$
# pixels, lets all patches look at each other, and joins $m \times m$ of them into a row. Of a picture of $H \times W$ pixels,
#
# $$\mathrm{rows} = \frac{H}{p\,m} \cdot \frac{W}{p\,m}$$
#
# `"tiny-vision"` is the embedded model with a small encoder. It was trained on drawings of shapes, digits, bars and lines, and
# knows nothing else. Models that read photographs work in the same way, with encoders two hundred times as large and more.

# %%
import random

import matplotlib.pyplot as plt
import numpy as np
from safetensors.numpy import load_file

import rekindle

plt.rcParams.update({"figure.dpi": 60})
session = await rekindle.open("tiny-vision", max_requests=4, max_model_len=512, page_size=8, quiet=True)


async def ask(picture, question, **options):
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return await session.chat([{"role": "user", "content": content}], temperature=0.0, max_tokens=32, **options)


# %%
sales, axes = plt.subplots()
axes.bar(["north", "south", "west"], [3, 8, 5], color=["green", "red", "blue"])
plt.show()

# %% [markdown]
# The figure above is an argument like any other.

# %%
for question in ("Which bar is the highest?", "Which bar is the lowest?", "How many bars are there?"):
    done = await ask(sales, question)
    print(f"{question}  {done.text}")
assert (await ask(sales, "Which bar is the highest?")).text == "The red bar is the highest.", "it has read the figure"

# %% [markdown]
# ## What a picture costs
#
# The encoder of this model takes 96 × 96 pixels, in patches of 12, and joins 2 × 2 of them.
#
# **Predict.** How many tokens of the prompt are the picture?
#
# <details><summary>Answer</summary>
#
# **16**: 96 / (12 · 2) = 4 in each direction. Every picture is stretched to that size, so that a large one costs no more, and small
# print is lost.
#
# </details>

# %%
done = await ask(sales, "Which bar is the lowest?")
print(f"{done.usage.prompt_tokens} tokens, {len(done.patches)} of them rows of the picture")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(done.patches) == 16, "a row for each square of 24 x 24 pixels"

# %% [markdown]
# ## What the encoder says
#
# Rows before the first layer can be captured. They have the size of the embeddings of words, so each can be compared with the
# embeddings of all words. This model's encoder was trained for that: each of its rows has one question to answer about the
# picture, and the target was the embedding of the answer. In encoders that were trained on photographs rows are not words.
#
# **Predict.** Rows tell the highest bar, the lowest one, and each bar from left to right. How many of the 16 rows are nearest to a
# colour?
#
# <details><summary>Answer</summary>
#
# **5**: the highest, the lowest, and three bars. Rows with nothing to say are nearest to "no".
#
# </details>

# %%
weights = load_file(rekindle.tiny.folder("tiny-vision") / "model.safetensors")
embeddings = weights["model.text_model.embed_tokens.weight"].astype(np.float32)
lengths = np.linalg.norm(embeddings, axis=1)


async def nearest_words(picture):
    capture = rekindle.Capture({"residual_before": [0]}, "prompt")
    done = await ask(picture, "What is it?", capture=capture)
    rows = done.captured.select(positions=list(done.patches))["residual_before", 0]
    nearest = (rows @ embeddings.T / lengths).argmax(axis=1)
    return [session.tokenizer.decode([int(token)]) for token in nearest]


colours = {" red", " orange", " yellow", " green", " blue", " purple", " pink", " black"}
words = await nearest_words(sales)
print(words)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert sum(word in colours for word in words) == 5, "the highest, the lowest, and three bars"

# %% [markdown]
# A digit is the same game with other words.

# %%
seven, axes = plt.subplots()
axes.text(0.5, 0.5, "7", fontsize=200, ha="center", va="center", color="purple")
axes.axis("off")
plt.show()
print(await nearest_words(seven))
print((await ask(seven, "Which digit is it?")).text)

# %% [markdown]
# ## A second question
#
# Pages of a prompt are found again by the picture's pixels (page 05).
#
# **Predict.** A page has 8 tokens. The first answer about a new figure computes its whole prompt. How many times does the encoder run for a second question about it, and how many tokens of its prompt are found in the cache?
#
# <details><summary>Answer</summary>
#
# It runs **0** times: the pages of the picture have what the layers made of its rows. More than **16** tokens are found: the picture,
# and the words before it.
#
# </details>

# %%
trend, axes = plt.subplots()
axes.plot([0, 1, 2, 3], [4, 3, 2.5, 1], color="orange", linewidth=3)
axes.plot([0, 1, 2, 3], [1, 2, 2.2, 3.5], color="blue", linewidth=3)
plt.show()
first = await ask(trend, "Which line rises?")
second = await ask(trend, "Which line falls?")
print(first.text, f"({first.usage.cached_tokens} tokens from the cache)")
print(second.text, f"({second.usage.cached_tokens} tokens from the cache)")
encoded = [line for line in str(session.explain(second)).splitlines() if "encoder ran" in line]

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert second.usage.cached_tokens > 16, "the picture, and what is before it"
assert len(encoded) == 0, "the encoder was not asked"

# %% [markdown]
# ## Where it ends
#
# It was taught two to five bars, eight colours, and nothing else. It has no word for what it does not know.

# %%
many, axes = plt.subplots()
axes.bar(range(9), range(1, 10), color="red")
plt.show()
done = await ask(many, "How many bars are there?")
print(done.text)
assert "9" not in done.text, "it answers with what it was taught"

# %% [markdown]
# ## Exercise
#
# How often does it name the highest of four bars? Draw forty figures, and count.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
rng, right = random.Random(0), 0
for _ in range(40):
    heights, inks = rng.sample(range(1, 11), 4), rng.sample(["red", "green", "blue", "orange", "purple"], 4)
    figure, axes = plt.subplots()
    axes.bar(list("abcd"), heights, color=inks)
    plt.close(figure)
    done = await ask(figure, "Which bar is the highest?")
    right += done.text == f"The {inks[heights.index(max(heights))]} bar is the highest."
print(f"{right} of 40")
assert right >= 32, "four times in five, or more"
await session.aclose()

# %% [markdown]
# ## Takeaway
#
# A picture becomes rows of numbers that stand in the prompt like tokens. They are cached by the picture's content, so that a second question about it
# costs only its words.
#
# ## In production
#
# Encoders have 100 to 600 million parameters, and were trained on pairs of pictures and captions. Pictures keep their shape, or are cut into tiles, so that small print is read: a page of text costs a thousand rows and more. Servers encode apart from decoding, on devices of their own, and keep rows by the digest of the pixels.
#
# ## Further reading
#
# - Dosovitskiy et al., *An Image is Worth 16x16 Words*, 2020, [arXiv:2010.11929](https://arxiv.org/abs/2010.11929)
# - Liu et al., *Visual Instruction Tuning*, 2023, [arXiv:2304.08485](https://arxiv.org/abs/2304.08485)
# - Marafioti et al., *SmolVLM: Redefining small and efficient multimodal models*, 2025, [arXiv:2504.05299](https://arxiv.org/abs/2504.05299)
# - [Pictures](../guide/pictures.md), what this package does with them
