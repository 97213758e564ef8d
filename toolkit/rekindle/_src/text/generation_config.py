"""How a checkpoint asks to be sampled: generation_config.json, the default of requests that bring no `Sampling`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rekindle._src.core.sampling import Sampling
from rekindle._src.models.loading.gguf.files import is_file
from rekindle._src.text.tokenizer import read_json
from rekindle.errors import InvalidRequest

log = logging.getLogger("rekindle.engine")
# What both have under the same name. Lengths are left out: how long an answer may be is the caller's to say.
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def checkpoint_sampling(folder: str | Path) -> Sampling | None:
    """The defaults that a folder or GGUF file asks for; None for none, or for greedy decoding (do_sample is off).

    Sampling without a temperature means 1, as in transformers; every other value that is absent is off, as in vLLM.
    """
    path = Path(folder)
    if is_file(path):
        from rekindle._src.text.gguf import reading as gguf  # other formats don't need it

        given = gguf.read_sampling(path)
    else:
        path /= "generation_config.json"
        given = read_json(path)
    if given.get("do_sample") is not True:
        return None
    found: dict[str, Any] = {"temperature": 1.0}
    found |= {name: given[name] for name in NAMES if given.get(name) is not None}
    try:
        return Sampling(**found)
    except InvalidRequest as error:
        log.warning("%s is left alone, requests are greedy by default: %s", path, error)
        return None


def told(sampling: Sampling) -> str:
    """The options that differ from `Sampling()`, in words."""
    plain = Sampling()
    changed = {name: getattr(sampling, name) for name in NAMES if getattr(sampling, name) != getattr(plain, name)}
    return ", ".join(f"{name} {value:g}" for name, value in changed.items())
