"""The model card: what was made, how, how good it is, and ten texts as they came."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from rekindle import reference
from rekindle.models.base import LoadedModel
from rekindle.tiny import evaluate
from rekindle.tiny.corpus import END, TURN, TURN_END, chat
from rekindle.tiny.recipe import CONTEXT, Recipe
from rekindle.tiny.tokenizer import token_id

HELD_OUT_BATCHES = 24
SAMPLES: tuple[tuple[str, float], ...] = (
    ("Once upon a time", 0.0),
    ("Once upon a time", 0.8),
    (chat([("Tell me a story about a dragon named Zoe.", "")]), 0.8),
    (chat([("Lily has a red kite. Tom has a blue boat. What does Tom have?", "")]), 0.0),
    (chat([("My name is Anna and I live in Rome.", "Nice to meet you, Anna!"), ("What is my name?", "")]), 0.0),
    (chat([("Mia is 7 years old. Mia likes plums. Write a JSON record.", "")]), 0.0),
    (chat([("What is 7 + 8?", "")]), 0.0),
    (chat([("Name three animals.", "")]), 0.8),
    (chat([("What is the capital of Japan?", "")]), 0.0),
    (chat([("Who are you?", "")]), 0.8),
)
KINDS = {
    "people": "facts about people in the conversation",
    "me": "what the user said about themselves",
    "story": "a story in the conversation",
    "comparison": "who is older, where they all live",
    "general": "small general questions",
    "sums": "sums up to 100 and word problems",
    "lists": "sentences to JSON",
}


def sample(model: LoadedModel, words: Tokenizer, prompt: str, temperature: float, seed: int) -> str:
    """What follows the prompt; a conversation's last answer, which is empty, is left open for the model to write."""
    ids = words.encode(prompt.removesuffix(TURN_END)).ids
    ends = (token_id(words, END), token_id(words, TURN_END))
    found = reference.generate(model, ids, 220, temperature=temperature, seed=seed, eos_ids=ends)
    return words.decode(found)


def shown(prompt: str, temperature: float, text: str) -> str:
    """One sample in Markdown."""
    said = prompt.removesuffix(TURN_END).replace(TURN_END, "").replace(TURN, "").removesuffix("assistant\n").strip()
    choice = "greedy" if temperature == 0 else f"temperature {temperature}"
    quoted = "\n".join(f"> {line}".rstrip() for line in f"{said}\n\n**→** {text}".splitlines())
    return f"({choice})\n\n{quoted}\n"


def write(recipe: Recipe, model: LoadedModel, words: Tokenizer, folder: Path, *, minutes: float) -> None:
    """Evaluate the exported weights and write README.md beside them."""
    score = evaluate.held_out(model.graph, model.leaves, words, HELD_OUT_BATCHES)
    answers = {kind: evaluate.exact_answers(model.graph, model.leaves, words, kind) for kind in evaluate.KINDS}
    tokens = sum(recipe.stage(step).rows * recipe.stage(step).length for step in range(recipe.steps))
    texts = [
        f"{number}. {shown(prompt, temperature, sample(model, words, prompt, temperature, number))}"
        for number, (prompt, temperature) in enumerate(SAMPLES, 1)
    ]
    rows = "\n".join(f"| {KINDS[kind]} | {share:.0%} |" for kind, share in answers.items())
    (folder / "README.md").write_text(f"""---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# tiny

A {model.num_parameters / 1e6:.1f}-million-parameter Llama with its own tokenizer, small enough to ship in a wheel. It tells
short stories, answers questions about what was said in the conversation and a few about the world, does small sums, and
writes lists and JSON records. It exists so that demos, tests and tutorials of an inference toolkit have something to run
without a download: it knows nothing else, and its general facts are a few dozen sentences learned by heart.

## Numbers

- Perplexity on held-out documents: **{score.perplexity:.3f}** per token ({score.tokens:,} tokens; {score.accuracy:.1%} of them were the
  model's first guess), measured with the bfloat16 weights of this folder in float32 arithmetic. The text is made from
  sentence frames, so most of it is predictable; short held-out questions can also occur in training.
- Questions that greedy decoding answers with exactly the expected words ({evaluate.QUESTIONS} held-out conversations of each kind):

| about | exact |
|---|---|
{rows}

## How it was made

`python -m rekindle.tiny.train`, with its default arguments, on two CPU cores, in {minutes:.0f} minutes: {recipe.steps:,} steps, {tokens / 1e6:.1f} million
tokens, each document seen once. The corpus is written by `rekindle/tiny/corpus.py` from a seed; no outside data or
weights. {recipe.num_layers} layers, hidden size {recipe.hidden_size}, {recipe.num_heads} query and {recipe.num_kv_heads} key-value heads of {recipe.head_dim}, vocabulary {recipe.vocab_size:,} (byte-level BPE, digits apart),
context {CONTEXT:,} tokens. Muon for the matrices of the blocks, Adam for embedding and norms.

## Ten texts, as they came

{chr(10).join(texts)}""")
