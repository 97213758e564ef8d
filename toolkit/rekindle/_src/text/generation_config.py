"""Sampling defaults for requests without a `Sampling`: from generation_config.json, and for chats."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.core.options import options_of
from rekindle._src.core.sampling import Sampling
from rekindle._src.models.loading.gguf.files import is_file
from rekindle._src.text.tokenizer import read_json
from rekindle.errors import InvalidRequest

log = logging.getLogger("rekindle.engine")
FILE = "generation_config.json"
# Options with the same name in both. Lengths are left out: the caller decides how long an answer may be.
NAMES = tuple(option.name for option in options_of(Sampling) if "checkpoint" in option.also)


# Of chats without values in the checkpoint. Small models repeat themselves when greedy, and other tools for local
# models draw: these are the values of llama.cpp and LM Studio; Ollama has the same temperature and top_k.
CHAT = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


class Defaults(NamedTuple):
    """The options of requests without options of their own; None: greedy."""

    sampling: Sampling | None = None
    chat: Sampling | None = None  # of chats


def defaults_of(folder: str | Path | None) -> Defaults:
    """Return the defaults of a checkpoint: its own; in a chat `CHAT`, unless the checkpoint asks for or against
    sampling.

    It does so with do_sample, on or off, or with a temperature.
    """
    if folder is None:
        return Defaults()
    path = Path(folder)
    fields = _fields(path)
    sampling = _asked(path, fields)
    if sampling is not None:
        return Defaults(sampling, sampling)
    temperature = fields.get("temperature")
    if fields.get("do_sample") is not None or temperature == 0:
        return Defaults()
    try:
        named = {name: fields[name] for name in NAMES if fields.get(name) is not None}
        return Defaults(None, dataclasses.replace(CHAT, **named))
    except InvalidRequest:
        return Defaults(None, CHAT)


def checkpoint_sampling(folder: str | Path) -> Sampling | None:
    """Return the defaults of a folder or GGUF file; None if it has none or asks for greedy decoding.

    Greedy means that do_sample is off. Sampling without a temperature means 1, as in transformers; every other absent
    value is off, as in vLLM.
    """
    path = Path(folder)
    return _asked(path, _fields(path))


def _asked(path: Path, fields: Mapping[str, Any]) -> Sampling | None:
    if fields.get("do_sample") is not True:
        return None
    options: dict[str, Any] = {"temperature": 1.0}
    options |= {name: fields[name] for name in NAMES if fields.get(name) is not None}
    try:
        return Sampling(**options)
    except InvalidRequest as error:
        place = path if is_file(path) else path / FILE
        log.warning("%s is left alone, requests are greedy by default: %s", place, error)
        return None


def _fields(path: Path) -> Mapping[str, Any]:
    if is_file(path):
        from rekindle._src.text.gguf import reading as gguf  # other formats don't need it

        return gguf.read_sampling(path)
    return read_json(path / FILE)


def describe(sampling: Sampling) -> str:
    """Return the options that differ from `Sampling()`, in words."""
    plain = Sampling()
    changed = {name: getattr(sampling, name) for name in NAMES if getattr(sampling, name) != getattr(plain, name)}
    return ", ".join(f"{name} {_shown(value)}" for name, value in changed.items())


def _shown(value: float | Sequence[str]) -> str:
    return f"{value:g}" if isinstance(value, int | float) else ";".join(value)
