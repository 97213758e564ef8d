"""`rekindle ls`, `pull` and `rm`: the models on this machine, stored by rekindle or by other tools.

`pull` downloads into the Hub's cache, where other tools find the model as well. `rm` removes what rekindle has made
of a model, in its own cache; a model in another tool's store is that tool's to remove, and `rm` says how.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rekindle._src.cli import cache
from rekindle._src.cli.controls import for_stream
from rekindle._src.core import words
from rekindle._src.core.config import cache_folder
from rekindle._src.models.loading.hub import EMBEDDED, download
from rekindle._src.models.loading.stores import known
from rekindle._src.models.loading.stores.model_store import ModelStore, StoreEntry
from rekindle._src.opening.local_models import LocalModel, describe, local_models, size_words
from rekindle.errors import CheckpointError


def ls(arguments: argparse.Namespace) -> int:
    """Print a line for each model: its name, family, size, precision, and why it isn't opened."""
    if arguments.names:
        print(*(name for name in [*known.names(), *EMBEDDED] if name.startswith(arguments.begin)), sep="\n")
        return 0
    models = [model for model in local_models(arguments.cache_dir) if model.name.startswith(arguments.begin)]
    if arguments.json:
        print(json.dumps([_fields(model) for model in models], indent=1))
        return 0
    _print(models)
    by_path = sum(model.by_path for model in models)
    refused = sum(not model.opens for model in models) - by_path
    others = f", {by_path:,} opened by path" if by_path else ""
    print(
        f"({words.count(len(models), 'model')}, {refused:,} of them refused{others}; "
        "`rekindle chat --model NAME` opens one)"
    )
    return 0


def pull(arguments: argparse.Namespace) -> int:
    """Download a model and print a description. Files that an earlier call has completed are not downloaded again."""
    path = download(arguments.model)
    model = describe(arguments.model, path)
    print(path)
    _print([model])
    return int(not model.opens)


def rm(arguments: argparse.Namespace) -> int:
    """Remove the cached data of models, after showing it; say who can remove the models themselves."""
    folder = cache_folder(arguments.cache_dir)
    items, chosen, others = cache.entries(folder), [], []
    for name in arguments.names:
        found = _found(name)
        same = {name, name.removeprefix("hub:"), *(known.names_at(found[1].path) if found else ())}
        mine = [item for item in items if item.model and item.model in same]
        words = _removal(*found) if found else ""
        if not mine and not words:
            chosen += cache.named(items, [name])  # raises, with the nearest name
        chosen += [item for item in mine if item not in chosen]
        others += [words] if words else []
    status = cache.remove_items(folder, chosen, arguments.yes) if chosen else 0
    for words in others:
        print(words, file=sys.stderr)
    return status if chosen else 1


def _found(name: str) -> tuple[ModelStore, StoreEntry] | None:
    """Return the store that has a model of this name, and the model there; None if none has."""
    if "/" in name and known.store_of(name) is None and not Path(name).exists():
        name = f"{known.HUB.PREFIX}:{name}"
    try:
        return known.find(name)
    except CheckpointError:
        return None


def _removal(store: ModelStore, entry: StoreEntry) -> str:
    """Return how a model is removed from another tool's store."""
    how = store.REMOVAL.format(entry.name)
    return f"{entry.name} itself is in {store.TITLE}, which rekindle leaves alone. Remove it with {how}"


def _fields(model: LocalModel) -> dict[str, object]:
    names = ("name", "store", "family", "size", "precision", "opens", "problem")
    return {**{name: getattr(model, name) for name in names}, "path": str(model.path)}


def _print(models: list[LocalModel]) -> None:
    rows = [
        (model.name, model.family or "?", size_words(model.size) if model.size else "?", model.precision or "?",
         model.problem or "opens")
        for model in models
    ]  # fmt: skip
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for name, family, size, precision, note in rows:
        cells = f"{name:{widths[0]}}  {family:{widths[1]}}  {size:>{widths[2]}}  {precision:{widths[3]}}"
        print(for_stream(f"{cells}  {note}", sys.stdout))  # the note may quote the model's files
