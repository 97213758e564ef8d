"""Heads of other checkpoints as they are stored: trainers and converters write the same head in several forms."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path

from rekindle._src.models.drafters import BLOCK_ARCHITECTURE
from rekindle._src.models.loading.tensor_files import Header
from rekindle.errors import UnsupportedModel

_OWN = "model."  # the beginning of names here, whatever they begin with in the file
_LAYER_KEYS = "transformer_layer_config"  # the key of a "speculator" for its layers
_MASK_FILE = "mask_embedding.pt"  # in place of the embedding of its mask


def read_head(
    raw: Mapping[str, object], headers: tuple[Header, ...], path: Path, *, added: Container[str]
) -> tuple[dict[str, object], tuple[Header, ...]]:
    """Return the keys and the headers of a head in one form. Keys in `added` mean nothing in its config.json."""
    headers = tuple(_renamed(header, _head_name) for header in headers)
    architectures = raw.get("architectures")
    if isinstance(architectures, list) and BLOCK_ARCHITECTURE in architectures:
        return _block_keys(raw, path, added), headers
    return _eagle_keys(raw, headers, added), headers


def _eagle_keys(raw: Mapping[str, object], headers: Iterable[Header], added: Container[str]) -> dict[str, object]:
    """Return the keys of an EAGLE-3 head in one form, with the optional tensors that it has."""
    layer = raw.get(_LAYER_KEYS)
    kind = (layer if isinstance(layer, Mapping) and layer else raw).get("model_type", "llama")
    if kind != "llama":
        raise UnsupportedModel(
            f"model_type={str(kind)[:80]!r} of an EAGLE-3 head is not implemented: it has to be llama."
        )
    names = {entry.name for header in headers for entry in header.entries}
    optional = {"embed_tokens": f"{_OWN}embed_tokens.weight", "lm_head": "lm_head.weight", "d2t": "d2t"}
    present = [key for key, name in optional.items() if name in names]
    return _head_keys(raw, "eagle_config", added) | {"model_type": "eagle3", "tensors": present, "absolute_ids": False}


def _block_keys(raw: Mapping[str, object], path: Path, added: Container[str]) -> dict[str, object]:
    """Return the keys of a DFlash head in one form. Raise UnsupportedModel for a mask with an embedding of its own."""
    if (path / _MASK_FILE).exists():
        raise UnsupportedModel(
            f"{path.name} has the embedding of its mask in {_MASK_FILE}, a pickle, which could run any code. Use a "
            "head with a mask that is a token of the model."
        )
    keys = _head_keys(raw, "dflash_config", added)
    inputs = keys.get("aux_hidden_state_layer_ids")
    if isinstance(inputs, list) and all(type(one) is int for one in inputs):
        keys.setdefault("target_layer_ids", [one - 1 for one in inputs])
    return {**keys, "model_type": "dflash"}


def _head_keys(raw: Mapping[str, object], own: str, added: Container[str]) -> dict[str, object]:
    """Return the keys of a head's config in one form. A "speculator" has the keys of its layers apart, and the head's
    own keys may be under the key `own`. A key without a value does not replace another.
    """
    keys: dict[str, object] = {}
    for part in (raw.get(_LAYER_KEYS), raw, raw.get(own)):
        if isinstance(part, Mapping):
            keys |= {
                name: value
                for name, value in part.items()
                if name not in added and (value is not None or name not in keys)
            }
    return keys


def _head_name(name: str) -> str:
    """Normalise the name of a draft head's tensor: trainers and converters name the same tensor differently."""
    name = name.removeprefix(_OWN)
    if name.startswith("midlayer."):
        name = f"layers.0.{name.removeprefix('midlayer.')}"
    return _OWN + name if name.startswith(("layers.", "norm.", "embed_tokens.")) else name


def _renamed(header: Header, rename: Callable[[str], str]) -> Header:
    return header._replace(entries=tuple(entry._replace(name=rename(entry.name)) for entry in header.entries))
