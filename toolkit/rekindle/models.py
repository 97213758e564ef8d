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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rekindle._src.core.dtypes import DTypeLike
from rekindle._src.core.foreign_calls import MODELS, missing
from rekindle._src.evaluation.parity import ParityReport, TokenDifference, compare, deterministic_logprobs
from rekindle._src.models.base import Graph, LoadedModel, Model, merge
from rekindle._src.models.calibration import CalibrationProgress
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading import checkpoint, reading
from rekindle._src.models.loading.checkpoint import Report
from rekindle._src.models.loading.load_progress import LoadProgress
from rekindle._src.models.placement import random_model
from rekindle._src.models.plain import logits, token_logprobs
from rekindle._src.models.registry import config_from_hf
from rekindle._src.opening.exporting import calibrate, export
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest
from rekindle.tiny import located

if TYPE_CHECKING:
    import jax
    from flax import nnx

    from rekindle._src.session.session import Session

__all__ = [
    "CalibrationProgress", "Graph", "LoadProgress", "LoadedModel", "Model", "ModelConfig", "ParityReport",
    "TokenDifference", "Tokenizer", "calibrate", "config_from_hf", "export", "load", "logits", "logprobs_like",
    "merge", "parity", "random_model", "token_logprobs",
]  # fmt: skip


def load(
    model: str | Path,
    *,
    dtype: DTypeLike = "auto",
    quantize: str | Mapping[str, str | None] | None = None,
    quantize_embeddings: bool = True,
    progress: Report | None = None,
    cache_dir: str | Path | None = None,
    place: reading.Place = reading.place_on_default_device,
) -> LoadedModel:
    """Load a folder, a GGUF file, a hub id or "tiny", tensor by tensor into its final layout, in parallel.

    With `cache_dir`, weights that had to be converted or quantised are kept there in their final form, on CPU others
    up to 4 GiB too, and the next start uses those. `progress` is called from this thread. `place(path, array)` puts a
    leaf on its device or devices.
    """
    return checkpoint.load(
        located(model),
        dtype=dtype,
        quantize=quantize,
        quantize_embeddings=quantize_embeddings,
        progress=progress,
        cache_dir=cache_dir,
        place=place,
    )


def parity(
    session: Session, model: LoadedModel | nnx.Module, texts: Sequence[str] | Sequence[Sequence[int]]
) -> ParityReport:
    """Compare a session's log-probabilities with a trainer's model, token by token.

    `model` is what the trainer differentiates: a module as `merge` returns it, or a loaded model. `texts` are strings
    or lists of at least two token ids. The session computes them as it computes prompts, in chunks over pages; the
    model in one piece, with plain attention. Both graphs are also run part by part in this plain form, which says where
    they begin to differ: in a layer, if weights or their format differ; in none, if just the order of
    the sums in the session's programs differs. Texts are computed in full, so pass some pages, not a corpus.
    """
    return compare(session, partial(_weights_of, session), model, texts)


def logprobs_like(session: Session) -> Callable[[Any, Any], jax.Array]:
    """Return a function of weights and tokens [B, T] that computes a deterministic session's log-probabilities.

        logprobs = rekindle.models.logprobs_like(session)
        ratio = jnp.exp(logprobs(params, batch.tokens) - batch.logprobs)  # with the weights of the draw: exactly 1

    Its values [B, T] equal `RolloutBatch.logprobs` to the last bit, for the places of completions that were
    drawn from the model's own distribution (at temperature 1, with no other option) by these weights. So it needs a
    session that was opened with `deterministic=True`, so that kernels give a token the same numbers in any batch. Its
    derivatives are taken from `token_logprobs`, since native kernels have none. Weights are a module, an nnx state or
    a loaded model.
    """
    if not session.config.deterministic:
        problem = "gives a token other last bits in other batches"
        raise InvalidRequest("session", repr(session), problem, "Open it with deterministic=True")
    return deterministic_logprobs(_weights_of(session).graph, session.config)


def _weights_of(session: Session) -> LoadedModel:
    from rekindle._src.session.session import weights_of  # loading a model alone needs no session

    return weights_of(session)


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise missing("module 'rekindle.models'", name, MODELS, __all__)
