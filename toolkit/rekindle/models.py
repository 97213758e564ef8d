"""Models without a session: load a checkpoint, look at its weights, and run or compare it in your own JAX code.

    model = rekindle.models.load("path/to/checkpoint", dtype="float32")
    weights = dict(zip(model.graph.paths, model.leaves))
    module = rekindle.models.merge(model.graph, model.leaves)

`rekindle.open` takes a `LoadedModel` as well as a folder. `rekindle.models.calibrate(folder, texts)` makes one in four
bits. `rekindle.models.export` writes a checkpoint as a GGUF file or as a folder:

    rekindle.models.export("Qwen/Qwen3-0.6B", "qwen3.gguf", type="q8_0")

`rekindle.models.token_logprobs(module, tokens)` is what a loss differentiates.
`rekindle.models.parity(session, module, texts)` compares a session's log-probabilities with a trainer's module.
"""

from __future__ import annotations

from rekindle._src.models.base import Graph, LoadedModel, Model, merge
from rekindle._src.models.calibration import CalibrationProgress
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.loading.load_progress import LoadProgress
from rekindle._src.models.placement import random_model
from rekindle._src.models.plain import logits, token_logprobs
from rekindle._src.models.registry import config_from_hf
from rekindle._src.session.exporting import calibrate, export
from rekindle._src.session.parity import ParityReport, TokenDifference, logprobs_like, parity
from rekindle._src.text.tokenizer import Tokenizer

__all__ = [
    "CalibrationProgress", "Graph", "LoadProgress", "LoadedModel", "Model", "ModelConfig", "ParityReport",
    "TokenDifference", "Tokenizer", "calibrate", "config_from_hf", "export", "load", "logits", "logprobs_like",
    "merge", "parity", "random_model", "token_logprobs",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__]
