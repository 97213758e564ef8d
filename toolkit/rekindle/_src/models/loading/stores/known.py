"""The stores that are known, and the models in them by name: `ollama:qwen3:0.6b`, `lmstudio:publisher/model`."""

from __future__ import annotations

import difflib
from pathlib import Path

from rekindle._src.models.loading.stores.hub_cache import HubCache
from rekindle._src.models.loading.stores.llama_cpp import LlamaCpp
from rekindle._src.models.loading.stores.lm_studio import LMStudio
from rekindle._src.models.loading.stores.model_store import MAX_NAME, ModelStore, StoreEntry
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


def near_names(text: str, most: int = 1) -> list[str]:
    """Return names of models in the stores that are near to a text: with the same ending first, then alike."""
    known = names()
    same = [name for name in known if text and name.partition(":")[2].lower() == text.lower()]
    shorter = {name.partition(":")[2].lower(): name for name in known}
    close = [
        shorter[name] for name in difflib.get_close_matches(text[:MAX_NAME].lower(), [*shorter], n=most, cutoff=0.75)
    ]
    return [*dict.fromkeys([*same, *close])][:most]
