"""`python -m workshop.tiny_vision.train`: make "tiny-vision", the embedded model with an encoder of pictures.

The encoder and the language model learn apart (`encoder.py`, `reader.py`), so each can run without the other. A run
resumes from the checkpoints in `--work`. Figures for the card come from `python -m workshop.tiny_vision.evaluate`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from rekindle import tiny
from rekindle._src.models.base import Graph
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.registry import config_from_hf
from workshop.tiny.train import restore, save, tensors
from workshop.tiny_vision import encoder, reader
from workshop.tiny_vision.encoder import OptimizerState
from workshop.tiny_vision.pictures import LONGEST

BEGINNING = "model."  # of the encoder's tensors in a checkpoint, and of the language model's
TEXT = "model.text_model."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of one part of the training, and its rates, which rise, stay and fall to zero."""

    steps: int
    size: int  # pictures, or windows, of a step
    matrix_rate: float  # Muon
    other_rate: float  # Adam
    warmup: int = 30
    decay: float = 0.6  # the share of the steps over which the rates fall

    def rates(self, step: int) -> tuple[jax.Array, jax.Array]:
        """Return the rates of a step, counted from 0."""
        share = min(1.0, (step + 1) / self.warmup, (self.steps - step) / (self.steps * self.decay))
        return jnp.float32(share * self.matrix_rate), jnp.float32(share * self.other_rate)


ENCODER = Schedule(steps=1400, size=64, matrix_rate=0.02, other_rate=0.003, decay=0.5)
READER = Schedule(steps=840, size=12, matrix_rate=0.008, other_rate=0.001, warmup=15)
SAVED_EVERY = 50  # steps
Report = Callable[[str], None]


def tokenizer_and_embedding() -> tuple[Tokenizer, NDArray[np.float32]]:
    """Return the embedded model's tokenizer, with the tokens of pictures, and its embeddings of words."""
    words = Tokenizer.from_file(str(tiny.folder() / "tokenizer.json"))
    words.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in reader.ADDED])
    weights = load_file(tiny.folder() / "model.safetensors")
    return words, weights["model.embed_tokens.weight"].astype(np.float32)


def train_encoder(plan: Schedule, work: Path, report: Report = print, until: int | None = None) -> encoder.Weights:
    """Run the encoder's steps from the checkpoint in `work` on, up to `until`; return its weights."""
    words, embed = tokenizer_and_embedding()
    known = encoder.Words.of(embed, lambda word: words.encode(word).ids[0])
    file = work / "encoder.npz"
    first, state = restore(file, OptimizerState.of(encoder.initial(0, embed.shape[1])))
    last = plan.steps if until is None else min(until, plan.steps)
    if first >= last:
        return state.weights
    right, there, began = np.zeros(len(encoder.FACTS)), np.zeros(len(encoder.FACTS)), time.monotonic()
    for number, pictures in zip(range(first, last), encoder.batches(plan.size, first), strict=False):
        state, loss, correct, known_facts = encoder.step(
            state, known, pictures, jnp.float32(number + 1), plan.rates(number)
        )
        right, there = 0.9 * right + np.asarray(correct), 0.9 * there + np.asarray(known_facts)
        if (number + 1) % 10 == 0:
            shares = " ".join(
                f"{name} {share:.0%}" for name, share in zip(encoder.FACTS, right / np.maximum(there, 1), strict=True)
            )
            seconds = (time.monotonic() - began) / (number + 1 - first)
            report(f"encoder {number + 1}/{plan.steps}  loss {float(loss):.3f}  {seconds:.2f} s  {shares}")
        if (number + 1) % SAVED_EVERY == 0 or number + 1 == last:
            save(file, number + 1, state)
    return state.weights


def text_model(vocab_size: int, embed: NDArray[np.float32]) -> tuple[Graph, dict[str, jax.Array]]:
    """Return the embedded model with embeddings of the added tokens, as a graph and weights by path."""
    config = json.loads((tiny.folder() / "config.json").read_text()) | {"vocab_size": vocab_size}
    loaded = load(tiny.folder(), dtype="float32")
    weights = dict(zip(loaded.graph.paths, map(jnp.asarray, loaded.leaves), strict=True))
    mean = embed.mean(0, keepdims=True)
    random = np.random.default_rng(0).standard_normal((vocab_size - len(embed), embed.shape[1])).astype(np.float32)
    weights["embed.weight"] = jnp.concatenate([weights["embed.weight"], mean + random * embed.std()])
    rows = jnp.zeros((vocab_size - len(embed), embed.shape[1]), jnp.float32)
    weights["head.weight"] = jnp.concatenate([weights["head.weight"], rows])
    graph = dataclasses.replace(loaded.graph, config=config_from_hf(config))
    return graph, weights


def train_reader(
    plan: Schedule, work: Path, report: Report = print, until: int | None = None
) -> tuple[Graph, dict[str, jax.Array]]:
    """Run the language model's steps from the checkpoint in `work` on; return it."""
    words, embed = tokenizer_and_embedding()
    graph, weights = text_model(words.get_vocab_size(), embed)
    file, writer = work / "reader.npz", reader.Reader(words, embed)
    first, state = restore(file, OptimizerState.of(weights))
    last, began = plan.steps if until is None else min(until, plan.steps), time.monotonic()
    for number in range(first, last):
        windows = writer.windows(f"reader {number}", plan.size)
        state, loss, right = reader.step(graph, state, windows, jnp.float32(number + 1), plan.rates(number))
        if (number + 1) % 10 == 0:
            seconds = (time.monotonic() - began) / (number + 1 - first)
            report(f"reader {number + 1}/{plan.steps}  loss {float(loss):.3f}  {seconds:.2f} s  {float(right):.1%}")
        if (number + 1) % SAVED_EVERY == 0 or number + 1 == last:
            save(file, number + 1, state)
    return graph, state.weights


CHAT_TEMPLATE = (
    "{%- if tools %}{{ raise_exception('this model was not trained to call tools') }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{ message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)


TEXT_BITS = 4  # of 7 of a bfloat16's mantissa, for the language model's weights: a wheel compresses the zeros


def rounded(array: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Return the nearest numbers with a mantissa of `bits` bits after the point."""
    cut = 23 - bits
    codes = array.astype(np.float32).view(np.uint32)
    return ((codes + np.uint32(1 << (cut - 1))) >> np.uint32(cut) << np.uint32(cut)).view(np.float32)


def export(seer: encoder.Weights, graph: Graph, weights: dict[str, jax.Array], folder: Path) -> None:
    """Write the model as a folder of the SmolVLM family."""
    folder.mkdir(parents=True, exist_ok=True)
    words, _ = tokenizer_and_embedding()
    text = json.loads((tiny.folder() / "config.json").read_text()) | {"vocab_size": words.get_vocab_size()}
    leaves = [rounded(np.asarray(weights[path]), TEXT_BITS) for path in graph.paths]
    state = tensors(graph.config, graph, leaves)
    arrays = {name.replace(BEGINNING, TEXT, 1) if name.startswith(BEGINNING) else name: a for name, a in state.items()}
    for name, leaf in seer.items():
        if not name.startswith("heights."):  # which only the training has
            array = np.asarray(leaf)
            if name.endswith("patch_embedding.weight"):
                array = array.reshape(len(array), 3, encoder.PATCH, encoder.PATCH)
            arrays[BEGINNING + name] = array.astype(ml_dtypes.bfloat16)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    own = {
        "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm",
        "image_token_id": words.token_to_id(reader.IMAGE), "scale_factor": encoder.MERGE, "pad_token_id": 0,
        "eos_token_id": text["eos_token_id"], "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": encoder.VISION,
    }  # fmt: skip
    pictures = {
        "image_processor_type": "SmolVLMImageProcessor", "do_convert_rgb": True, "do_resize": True, "resample": 1,
        "size": {"longest_edge": LONGEST}, "max_image_size": {"longest_edge": encoder.SIDE},
        "do_image_splitting": False, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_pad": True,
    }  # fmt: skip
    whole = {"processor_class": "SmolVLMProcessor", "image_seq_len": encoder.TOKENS}
    words.save(str(folder / "tokenizer.json"))
    texts = json.loads((tiny.folder() / "tokenizer_config.json").read_text())
    plain = next(iter(texts["added_tokens_decoder"].values()))
    for token in reader.ADDED:
        texts["added_tokens_decoder"][str(words.token_to_id(token))] = plain | {"content": token}
    texts["chat_template"] = CHAT_TEMPLATE
    generation = json.loads((tiny.folder() / "generation_config.json").read_text())
    files = {
        "config": own, "generation_config": generation, "tokenizer_config": texts, "preprocessor_config": pictures,
        "processor_config": whole,
    }  # fmt: skip
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m workshop.tiny_vision.train", description=__doc__)
    parser.add_argument("part", choices=("encoder", "reader", "all"), nargs="?", default="all")
    parser.add_argument("--work", type=Path, default=Path("build/tiny-vision"), help="the checkpoints")
    parser.add_argument("--out", type=Path, help="where the model's folder is written; default WORK/model")
    parser.add_argument("--encoder-steps", type=int, default=ENCODER.steps)
    parser.add_argument("--reader-steps", type=int, default=READER.steps)
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    plans = (
        dataclasses.replace(ENCODER, steps=options.encoder_steps),
        dataclasses.replace(READER, steps=options.reader_steps),
    )

    def report(line: str) -> None:
        print(line, flush=True)

    if options.part == "encoder":
        train_encoder(plans[0], options.work, report)
    elif options.part == "reader":
        train_reader(plans[1], options.work, report)
    else:
        weights = train_encoder(plans[0], options.work, report)
        out = options.out or options.work / "model"
        export(weights, *train_reader(plans[1], options.work, report), out)
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
