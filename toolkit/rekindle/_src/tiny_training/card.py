"""The model card: the model, its training, its scores, and ten unselected samples."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from rekindle._src.bench import reference
from rekindle._src.models.base import LoadedModel
from rekindle._src.tiny_training import asking, evaluate
from rekindle._src.tiny_training.corpus import END, TURN, TURN_END, chat
from rekindle._src.tiny_training.recipe import CONTEXT, Recipe
from rekindle._src.tiny_training.tokenizer import token_id

HELD_OUT_BATCHES = 24
SAMPLES: tuple[tuple[str, float], ...] = (
    ("Once upon a time", 0.0),
    ("Once upon a time", 0.8),
    (chat([("Tell me a story about a dragon.", "")]), 0.8),
    (chat([("Lily has a red kite. Tom has a blue boat. What does Tom have?", "")]), 0.0),
    (
        chat(
            [("My name is Ben.", "Nice to meet you, Ben!"), ("What is 7 + 8?", "7 + 8 = 15"), ("What is my name?", "")]
        ),
        0.0,
    ),
    (chat([("Mia is 7 years old. Mia likes plums. Write a JSON record.", "")]), 0.0),
    (chat([("What is 37 + 25?", "")]), 0.0),
    (chat([("Name three animals.", "")]), 0.8),
    (chat([("Who is the president of France?", "")]), 0.0),
    (chat([("Who are you?", "")]), 0.8),
)
KINDS = {
    "people": "facts about people in the conversation",
    "me": "what the user said about themselves",
    "story": "a story in the conversation",
    "comparison": "who is older, where they all live",
    "general": "small general questions",
    "sums": "small sums and word problems",
    "lists": "sentences to JSON",
    "unknown": "questions outside of its world",
}


def sample(model: LoadedModel, words: Tokenizer, prompt: str, temperature: float, seed: int) -> str:
    """Return the model's continuation of a prompt. An empty last answer of a conversation is left open for it."""
    ids = words.encode(prompt.removesuffix(TURN_END)).ids
    ends = (token_id(words, END), token_id(words, TURN_END))
    tokens = reference.generate(model, ids, 220, temperature=temperature, seed=seed, eos_ids=ends)
    return words.decode(tokens)


def format_sample(prompt: str, temperature: float, text: str) -> str:
    """Return one sample in Markdown."""
    question = prompt.removesuffix(TURN_END).replace(TURN_END, "").replace(TURN, "").removesuffix("assistant\n").strip()
    choice = "greedy" if temperature == 0 else f"temperature {temperature}"
    quoted = "\n".join(f"> {line}".rstrip() for line in f"{question}\n\n**→** {text}".splitlines())
    return f"({choice})\n\n{quoted}\n"


CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# tiny

A {millions:.1f}-million-parameter Llama with its own tokenizer, small enough to ship in a wheel. It tells short
stories about what it is asked for, answers questions about what was said in the conversation and a few about the world,
does small sums, and writes lists and JSON records. It exists so that demos, tests and tutorials of an inference toolkit
have something to run without a download. It knows nothing else, and was taught to say so: its general facts are a few
dozen sentences learned by heart.

## Numbers

Perplexity on held-out documents: **{perplexity:.3f}** per token, over {tokens:,} tokens; {accuracy:.1%} of them were
the model's first guess. Measured with the bfloat16 weights of this folder in float32 arithmetic. The text is made from
sentence frames, so much of it is predictable, and a short held-out question can also occur in training.

Asked as people ask, with prompts written by hand whose names, stories and questions are in no list of the corpus
(`asking.py`); greedy unless said otherwise:

| | |
|---|---|
{asked}

Questions of the corpus's own kinds that greedy decoding answers with exactly the expected words, of {questions}
held-out conversations each:

| about | exact |
|---|---|
{rows}

## How it was made

`python -m rekindle.tiny` with its default arguments, on two CPU cores{minutes}: {steps:,} steps over
{trained:.1f} million tokens, each document seen once. The corpus is written by
`rekindle/_src/tiny_training/corpus.py` from a seed; no outside data or weights.

| | |
|---|---|
| layers, hidden size, MLP size | {recipe.num_layers}, {recipe.hidden_size}, {recipe.intermediate_size} |
| query heads, key-value heads, head size | {recipe.num_heads}, {recipe.num_kv_heads}, {recipe.head_dim} |
| vocabulary | {recipe.vocab_size:,} (byte-level BPE, digits apart) |
| context | {context:,} tokens |
| optimizer | Muon for the matrices of the blocks, Adam for embedding, head and norms |

## Ten texts, as they came

{samples}"""


def write(recipe: Recipe, model: LoadedModel, words: Tokenizer, folder: Path, *, minutes: float | None = None) -> None:
    """Evaluate the exported weights and write README.md to their folder."""
    score = evaluate.held_out(model.graph, model.leaves, words, HELD_OUT_BATCHES)
    answers = {kind: evaluate.exact_answers(model.graph, model.leaves, words, kind) for kind in evaluate.KINDS}
    measures = asking.measure(model, words)
    samples = [
        f"{number}. {format_sample(prompt, temperature, sample(model, words, prompt, temperature, number))}"
        for number, (prompt, temperature) in enumerate(SAMPLES, 1)
    ]
    text = CARD.format(
        recipe=recipe,
        context=CONTEXT,
        steps=recipe.steps,
        millions=model.num_parameters / 1e6,
        trained=recipe.tokens / 1e6,
        minutes="" if minutes is None else f" in {minutes:.0f} minutes",
        perplexity=score.perplexity,
        tokens=score.tokens,
        accuracy=score.accuracy,
        questions=evaluate.QUESTIONS,
        asked="\n".join(f"| {about} | {result} |" for about, result in measures.items()),
        rows="\n".join(f"| {KINDS[kind]} | {share:.0%} |" for kind, share in answers.items()),
        samples="\n".join(samples),
    )
    (folder / "README.md").write_text(text)
