"""The stores that are known, and the models in them by name: `ollama:qwen3:0.6b`, `lmstudio:publisher/model`."""

from __future__ import annotations

from pathlib import Path

from rekindle._src.core.names import nearest
from rekindle._src.models.loading.stores.hub_cache import HubCache
from rekindle._src.models.loading.stores.llama_cpp import LlamaCpp
from rekindle._src.models.loading.stores.lm_studio import LMStudio
from rekindle._src.models.loading.stores.model_store import ModelStore, StoreEntry
from rekindle._src.models.loading.stores.ollama import Ollama

HUB = HubCache()
STORES: tuple[ModelStore, ...] = (HUB, Ollama(), LMStudio(), LlamaCpp())
_BY_PREFIX = {store.PREFIX: store for store in STORES}


def store_of(model: str | Path) -> ModelStore | None:
    """Return the store that a name begins with; None for paths, hub ids and "tiny"."""
    return None if isinstance(model, Path) else _BY_PREFIX.get(model.partition(":")[0] if ":" in model else "")


def find(model: str | Path) -> tuple[ModelStore, StoreEntry] | None:
    """Return the store that a name begins with, and its model; None for names of another kind.

    Raise `CheckpointError` if the store does not have it.
    """
    store = store_of(model)
    return None if store is None else (store, store.find(str(model).partition(":")[2]))


def names() -> list[str]:
    """Return the names of the models of all stores that nothing is known against, as `rekindle.open` takes them."""
    return [f"{store.PREFIX}:{entry.name}" for store in STORES for entry in store.entries() if not entry.problem]


def names_at(path: Path) -> list[str]:
    """Return the names of the model at a path, as `rekindle.open` takes them. In the Hub's cache, names are hub ids,
    found in the path itself.
    """
    return [f"{store.PREFIX}:{name}" for store in STORES if store is not HUB for name in store.names_at(path)]


def near_name(text: str) -> str | None:
    """Return the name of a model in the stores that is near to a text: one with the same ending, else one like it."""
    known = names()
    same = [name for name in known if text and name.partition(":")[2].lower() == text.lower()]
    shorter = {name.partition(":")[2].lower(): name for name in known}
    close = nearest(text.lower(), shorter, 0.75)
    return same[0] if same else shorter.get(close or "")
