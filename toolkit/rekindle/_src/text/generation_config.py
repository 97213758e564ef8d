"""Defaults of sampling from generation_config.json, for requests that bring no `Sampling`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rekindle._src.core.options import options_of
from rekindle._src.core.sampling import Sampling
from rekindle._src.models.loading.gguf.files import is_file
from rekindle._src.text.tokenizer import read_json
from rekindle.errors import InvalidRequest

log = logging.getLogger("rekindle.engine")
# Options with the same name in both. Lengths are left out: the caller decides how long an answer may be.
NAMES = tuple(option.name for option in options_of(Sampling) if "checkpoint" in option.also)


def checkpoint_sampling(folder: str | Path) -> Sampling | None:
    """Return the defaults of a folder or GGUF file; None if it has none or asks for greedy decoding.

    Greedy means that do_sample is off. Sampling without a temperature means 1, as in transformers; every other absent
    value is off, as in vLLM.
    """
    path = Path(folder)
    if is_file(path):
        from rekindle._src.text.gguf import reading as gguf  # other formats don't need it

        fields = gguf.read_sampling(path)
    else:
        path /= "generation_config.json"
        fields = read_json(path)
    if fields.get("do_sample") is not True:
        return None
    options: dict[str, Any] = {"temperature": 1.0}
    options |= {name: fields[name] for name in NAMES if fields.get(name) is not None}
    try:
        return Sampling(**options)
    except InvalidRequest as error:
        log.warning("%s is left alone, requests are greedy by default: %s", path, error)
        return None


def describe(sampling: Sampling) -> str:
    """Return the options that differ from `Sampling()`, in words."""
    plain = Sampling()
    changed = {name: getattr(sampling, name) for name in NAMES if getattr(sampling, name) != getattr(plain, name)}
    return ", ".join(f"{name} {value:g}" for name, value in changed.items())
