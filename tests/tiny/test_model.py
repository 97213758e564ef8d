"""The shipped folder is valid, small, good enough, and means the same to transformers."""

from __future__ import annotations

import json
import struct
from itertools import islice, takewhile

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

import rekindle
from helpers.plain_loop import plain_loop
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading.checkpoint import load
from rekindle.tiny import folder
from workshop import reference
from workshop.tiny import evaluate
from workshop.tiny.corpus import chat, encoded, pack
from workshop.tiny.train import CONTEXT, Recipe


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(folder(), dtype="float32")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.from_file(str(folder() / "tokenizer.json"))


def answer(model: LoadedModel, words: Tokenizer, *turns: tuple[str, str]) -> str:
    prompt = chat([*turns[:-1], (turns[-1][0], "")]).removesuffix("<|im_end|>")
    return words.decode(greedy(model, words.encode(prompt).ids, 48))


def greedy(model: LoadedModel, ids: list[int], count: int) -> list[int]:
    return list(takewhile(lambda token: token not in (0, 2), plain_loop(model, ids, count, context=128)))


def test_the_folder_is_complete_and_small() -> None:
    names = {path.name for path in folder().iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in folder().iterdir()) < 10_000_000


def test_config_and_weights_are_those_of_the_recipe(model: LoadedModel) -> None:
    config = json.loads((folder() / "config.json").read_text())
    assert config == Recipe().config([2, 0], 0)
    assert config["max_position_embeddings"] == CONTEXT >= 1024
    assert 2_000_000 < model.num_parameters < 4_200_000
    with (folder() / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in model.leaves)


@pytest.mark.thorough
def test_perplexity_on_held_out_documents(model: LoadedModel, words: Tokenizer) -> None:
    score = evaluate.held_out(model.graph, model.leaves, words, 1)
    assert score.tokens > 3500
    assert score.perplexity < 1.7


@pytest.mark.slow  # CI asks them: they change when the weights do
@pytest.mark.parametrize(
    ("kind", "share"), [("me", 0.8), ("general", 0.8), ("people", 0.5)]
)  # the weights that ship: 0.625
def test_chat_answers_the_question_asked(model: LoadedModel, words: Tokenizer, kind: str, share: float) -> None:
    assert evaluate.exact_answers(model.graph, model.leaves, words, kind, rows=16) >= share


@pytest.mark.slow
def test_it_is_worth_talking_to(words: Tokenizer) -> None:
    """On prompts written by hand; the model before this corpus recalled no name and refused nothing."""
    outside = [([(question, "")], evaluate.REFUSAL) for question in evaluate.OUTSIDE]
    inside = [([(question, "")], answer) for question, answer in evaluate.INSIDE]
    with rekindle.open_sync("tiny", dtype="float32", quiet=True) as session:
        ask = evaluate.asker(session, words)
        assert evaluate.share(ask, evaluate.names(), 16).right >= 14
        assert evaluate.share(ask, outside, 16).right >= 30
        assert evaluate.share(ask, inside, 24).right >= 14


@pytest.mark.thorough
def test_a_story_is_a_story_and_the_prompt_matters(model: LoadedModel, words: Tokenizer) -> None:
    start = words.encode("Once upon a time").ids
    told = words.decode(greedy(model, start, 60))
    sampled = words.decode(reference.generate(model, start, 60, eos_ids=(0, 2), temperature=0.8, seed=1))
    assert told.startswith(", ")
    assert " lived " in told
    assert told != sampled
    assert "Rome" in answer(model, words, ("Anna lives in Rome. Where does Anna live?", ""))
    assert "Paris" in answer(model, words, ("Tom lives in Paris. Where does Tom live?", ""))


@pytest.mark.thorough
def test_far_positions_are_trained(model: LoadedModel, words: Tokenizer) -> None:
    windows = pack(islice(encoded(words, "far"), 200), 2, CONTEXT + 1)
    loss, counts, _ = evaluate.measured(model.graph, model.leaves, jnp.asarray(windows))
    near, far = (float(loss[:, part].sum() / counts[:, part].sum()) for part in (slice(256, 512), slice(768, 1024)))
    assert far < near + 0.25


def test_transformers_loads_the_folder_and_computes_the_same(model: LoadedModel, words: Tokenizer) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder())
    text = "Once upon a time, there was a brave owl named Pip. 12 + 7"
    ids = words.encode(text).ids
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    cache = reference.empty_cache(model, len(ids))
    ours, _ = reference.prefill(model, ids, cache)
    np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=1e-3)
