"""`rekindle.models.calibrate`: a checkpoint in four bits, rounded for the texts that it will see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rekindle import tiny
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.dtypes import DTypeLike, checked_quantize
from rekindle._src.models import calibration
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.calibration import CalibrationProgress, Report
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import ConfigError

LENGTH = 512  # tokens of a sequence: longer texts are cut
FEWEST = 8  # the fewest tokens of a useful sequence


def calibrate(
    model: str | Path | LoadedModel,
    texts: Sequence[str] | Sequence[Sequence[int]],
    *,
    quantize: str | Mapping[str, str | None] = "int4",
    dtype: DTypeLike = "auto",
    max_tokens: int = 8192,
    quiet: bool = False,
    progress: Report | None = None,
) -> LoadedModel:
    """Return a model in four bits, rounded so that the matrices' products with these texts change least (GPTQ).

    `model` is a folder, a hub id or a model of floats from `rekindle.models.load`; `rekindle.open` takes the result.
    A few pages of text of the kind that the model will see are enough; texts, or lists of token ids, are cut into
    sequences of 512 tokens, at most `max_tokens` of them in all. It takes minutes for a billion parameters and needs
    room for the floats. Experts, the embedding and the head are rounded to the nearest. A bar shows the progress
    unless `quiet`; `progress` is called after each matrix.
    """
    plan = checked_quantize(quantize)
    if plan is None or "int4" not in plan:
        raise ConfigError("quantize", quantize, "has no part in four bits", "Use 'int4', or a dict that names it")
    loaded = model if isinstance(model, LoadedModel) else load(tiny.folder() if model == "tiny" else model, dtype=dtype)
    if loaded.graph.precision.quantizes:
        raise ConfigError("model", loaded, "is quantised already", "Load it without quantize")
    sequences = [*_cut(loaded, texts, max_tokens)]
    if not sequences:
        raise ConfigError("texts", f"{len(texts)} texts", "hold too few tokens", "Pass some pages of text")
    status = CalibrationProgress(0, 0, "")

    def report(reached: CalibrationProgress) -> None:
        nonlocal status
        status = reached
        if progress is not None:
            progress(reached)

    def look() -> State:
        return State(
            f"calibrating: {status or 'the first layer'}", status.done / status.total if status.total else None
        )

    with Activity(look, quiet=quiet):
        return calibration.calibrate(loaded, sequences, plan, report=report)


def _cut(model: LoadedModel, texts: Sequence[str] | Sequence[Sequence[int]], most: int) -> Iterator[list[int]]:
    """Yield the texts as sequences of at most LENGTH tokens, until there are `most`."""
    tokenizer, remaining = None, most
    length = min(LENGTH, model.config.max_position_embeddings)
    for text in texts:
        if isinstance(text, str):
            if model.folder is None:
                problem = "needs a tokenizer, and the model has no folder"
                raise ConfigError("texts", text[:40], problem, "Pass lists of token ids")
            tokenizer = tokenizer or Tokenizer.load(model.folder)
            tokens = tokenizer.encode(text)
        else:
            tokens = [int(token) for token in text]
        for start in range(0, len(tokens), length):
            part = tokens[start : start + min(length, remaining)]
            if len(part) >= FEWEST:
                remaining -= len(part)
                yield part
            if remaining < FEWEST:
                return
