"""The models that are on this machine already, in other tools' stores and in rekindle's cache, by their headers alone.

Of each model the config and the headers are read: its family, its size, its precision, and the reason why rekindle
doesn't open it, if there is one. A model may still be refused later, when all of its tensors are compared.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from rekindle import tiny
from rekindle._src.core import words
from rekindle._src.core.atomic_checkpoint import ITEM
from rekindle._src.core.config import cache_folder
from rekindle._src.core.drawable import Record
from rekindle._src.core.plain_files import read_plain
from rekindle._src.models.loading import known_models, stored, tensor_files
from rekindle._src.models.loading.gguf import files as gguf_files
from rekindle._src.models.loading.gguf import header as gguf
from rekindle._src.models.loading.hub import EMBEDDED, MAX_DESCRIPTION
from rekindle._src.models.loading.stores.known import HUB, STORES
from rekindle._src.models.loading.stores.model_store import MAX_MODELS, StoreEntry, children
from rekindle._src.models.registry import config_from_hf
from rekindle._src.views import html
from rekindle.errors import ConfigError

BY_PATH = "pass the file or folder that these weights were made of"
OWN = "rekindle"  # the store of what rekindle has made
_WEIGHTS = "weights"  # in a cache folder
_WIDTH, _REASON = 60, 200  # characters of a family or precision, and of a reason
_PRECISIONS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8"}


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LocalModel(Record):
    """A model on this machine."""

    name: str  # as `rekindle.open` takes it; kept weights have the name of their model
    store: str  # "hub", "ollama", "lmstudio", "llamacpp" or "rekindle"
    family: str  # its model_type, or its architecture in GGUF; "" if that can't be read
    size: int  # bytes of its weights on the disk
    precision: str  # of most of its weights
    problem: str  # why rekindle doesn't open it; "" if it does
    path: Path  # its folder or file

    @property
    def by_path(self) -> bool:
        """True for kept weights of a model that was opened by its path, and so opens by that path again."""
        return self.problem == BY_PATH

    @property
    def opens(self) -> bool:
        """True if nothing in its headers speaks against opening it."""
        return not self.problem


class LocalModels(Sequence[LocalModel]):
    """The models on this machine: a table, and a mapping by their names as well as a sequence."""

    def __init__(self, models: Iterable[LocalModel]) -> None:
        self._models = tuple(models)

    def __len__(self) -> int:
        return len(self._models)

    @overload
    def __getitem__(self, key: int | str) -> LocalModel: ...
    @overload
    def __getitem__(self, key: slice) -> LocalModels: ...
    def __getitem__(self, key: int | str | slice) -> LocalModel | LocalModels:
        if isinstance(key, slice):
            return LocalModels(self._models[key])
        if isinstance(key, int):
            return self._models[key]
        for model in self._models:
            if model.name == key:
                return model
        raise KeyError(f"{key!r} is not on this machine; `.names` lists the models that are")

    @property
    def names(self) -> list[str]:
        """The names, as `rekindle.open` takes them."""
        return [model.name for model in self._models]

    def _ipython_key_completions_(self) -> list[str]:
        return self.names

    def __repr__(self) -> str:
        opened = sum(model.opens for model in self._models)
        return f"<LocalModels: {words.count(len(self), 'model')}, {opened:,} of them open>"

    def _repr_html_(self) -> str:
        rows = [
            (model.name, model.family, size_words(model.size), model.precision, model.problem or "yes")
            for model in self._models
        ]
        return str(html.table(("name", "family", "size", "precision", "opens"), rows, limit=MAX_MODELS))


class ModelFacts(NamedTuple):
    """The facts of a model that its headers have."""

    family: str = ""
    precision: str = ""


def local_models(cache_dir: str | Path | None = None) -> LocalModels:
    """List the models on this machine: in the Hub's cache, Ollama, LM Studio and llama.cpp, the embedded one, and the
    models with weights in rekindle's cache, which is `cache_dir` or the default.

    Names are what `rekindle.open` takes. Headers alone are read, and nothing is downloaded or written. Other tools'
    folders are where their variables say (`HF_HOME`, `OLLAMA_MODELS`, `LLAMA_CACHE`…), or where they are by default.
    """
    if not isinstance(cache_dir, str | Path | None):
        raise ConfigError("cache_dir", cache_dir, "is not a folder", "Pass a path, or leave it out")
    models = [
        _described(f"{store.PREFIX}:{entry.name}", store.PREFIX, entry) for store in STORES for entry in store.entries()
    ]
    gguf.forget_headers()
    models += [_described(name, OWN, StoreEntry(name, Path(tiny.located(name)))) for name in EMBEDDED]
    names = {name for model in models for name in (model.name, model.name.removeprefix("hub:"))}
    return LocalModels([*models, *kept_models(cache_folder(None if cache_dir is None else str(cache_dir)), names)])


def kept_models(cache: Path, names: Collection[str]) -> list[LocalModel]:
    """List the models with weights in a cache, stored as a session computes with them.

    They are used when the model with their name is opened; a model without one of the `names` lies elsewhere.
    """
    models = []
    for path in children(cache / _WEIGHTS)[:MAX_MODELS]:
        with contextlib.suppress(Exception):  # a damaged entry is made again when its model is opened
            fields: dict[str, Any] = known_models.checked(read_plain(path / ITEM / "model.json", MAX_DESCRIPTION))
            config, size = fields["graph"]["config"], sum(file.stat().st_size for file in (path / ITEM).iterdir())
            held = fields["graph"]["precision"]
            kind = held.get("quantize") or _most((kind, 1) for _, kind in held["kinds"])  # the latter as stored
            precision = _short(kind or fields["dtype"])
            name, family = _short(fields["name"]), _short(config["model_type"])
            problem = "" if name in names else BY_PATH
            models.append(LocalModel(name, OWN, family, size, precision, problem, path))
    return sorted(models, key=lambda model: model.name.lower())


def size_words(size: int) -> str:
    """Return a size in words: 1.2 GiB, 340 MiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{-(-size // 2**10)} KiB"


def describe(name: str, path: Path) -> LocalModel:
    """Return a model of the Hub's cache, by the folder or file of its download."""
    return _described(name, HUB.PREFIX, StoreEntry(name, path))


def _described(name: str, store: str, entry: StoreEntry) -> LocalModel:
    facts, size, problem = ModelFacts(), 0, entry.problem
    if not problem:
        try:
            path = stored.checkpoint_path(entry.path)
            size = sum(file.stat().st_size for file in _files(path))
            facts = _facts(path)
            config_from_hf(stored.look(entry.path, entry.projector, outline=True).raw)
        except Exception as error:  # a stranger's file, which must not hide the others
            problem = _reason(error, entry.path)
    problem = words.shorten(problem, _REASON)
    return LocalModel(name, store, facts.family, size, facts.precision, problem, entry.path)


def _files(path: Path) -> list[Path]:
    """Return the files of a model's weights."""
    return gguf_files.parts(path) if gguf_files.is_file(path) else [*path.glob("*.safetensors")]


def _reason(error: Exception, path: Path) -> str:
    """Return the first sentence of an error, without the model's own path, as it may be shown."""
    words = str(error).strip().partition("\n")[0].replace(f"{path}: ", "").replace(f"{path}{os.sep}", "")
    sentence = words.removeprefix(f"{path} ").partition(". ")[0].rstrip(".")
    return "".join(letter for letter in sentence if letter.isprintable())


def _facts(path: Path) -> ModelFacts:
    """Return the facts of a folder or a GGUF file, also of one that rekindle doesn't open."""
    if gguf_files.is_file(path):
        headers = gguf.read_headers(_files(path), outline=True)
        kinds = ((tensor.kind.name, tensor.nbytes) for header in headers for tensor in header.tensors)
        family = headers[0].metadata.text("general.architecture", "")
        return ModelFacts(_short(family), _most(kinds))
    raw = stored.read_config(path)
    files = tensor_files.read_headers(tensor_files.weight_files(path))
    kinds = ((entry.dtype, entry.nbytes) for header in files for entry in header.entries)
    model_type = stored.text_config(raw).get("model_type", "")
    precision = _quantization(raw.get("quantization_config")) or _most(kinds)
    return ModelFacts(_short(model_type), precision)


def _most(kinds: Iterable[tuple[str, int]]) -> str:
    """Return the precision that most bytes have."""
    sizes = collections.Counter[str]()
    for kind, nbytes in kinds:
        sizes[kind] += nbytes
    return _short(_PRECISIONS.get(kind := max(sizes, key=sizes.__getitem__), kind)) if sizes else ""


def _quantization(config: Any) -> str:
    if not isinstance(config, Mapping):
        return ""
    bits = config.get("bits")
    method = _short(config.get("quant_method", ""))
    return f"{method}, {bits} bits" if type(bits) is int and 0 < bits <= 64 else method


def _short(value: object) -> str:
    """Return a stranger's text as it may be shown."""
    text = value if isinstance(value, str) else ""
    return words.shorten("".join(letter for letter in text[: 2 * _WIDTH] if letter.isprintable()), _WIDTH)
