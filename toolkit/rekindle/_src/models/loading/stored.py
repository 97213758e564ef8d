"""A checkpoint as it lies on disk, in any supported format: its headers are read, its config is not yet understood."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.core.plain_files import open_plain
from rekindle._src.models import drafters
from rekindle._src.models.loading import fingerprint as fingerprints
from rekindle._src.models.loading import tensor_files
from rekindle._src.models.loading.gguf import files as gguf_files
from rekindle._src.models.loading.hub import locate
from rekindle._src.models.loading.tensor_files import Header
from rekindle.errors import CheckpointError, ConfigError, UnsupportedModel

_log = logging.getLogger(__name__)
_mentioned: set[Path] = set()  # checkpoints with other parts that were mentioned
# Keys of the whole that are true of its language model, where that one's own config leaves them out.
_SHARED_KEYS = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")
# Keys that are added to a config here, from what else a checkpoint has. In its config.json they mean nothing.
_ADDED = frozenset(("pictures", "headless", "another_head", "nested_in"))
# Language models that differ from others by the name of their type alone, and by defaults.
_SAME_LAYERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "qwen3_vl_text": lambda own: {"rope_theta": 500_000.0, **own, "model_type": "qwen3"},
}
# Of assistants, which draft for another model: keys of the whole say how, and its parts are one model.
_ASSISTANT_KEYS = (
    "model_type", "backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k",
)  # fmt: skip
_BOTH_WAYS = ("gemma3",)  # models where a picture's tokens see later ones of it, in all layers
OWN = "model."  # the beginning of a language model's tensor names here, regardless of their names in the file
# Modules of the embedding, and of the layers next to it. Where both are, a language model is.
_EMBEDDINGS = ("embed_tokens", "word_embeddings", "wte", "embeddings", "embedding", "embeddings.tok_embeddings")
_LAYERS = frozenset(("layers", "h"))
_HEAD = "lm_head."  # stands anywhere above the language model, or in it
_DRAFT_HEAD = "draft_head"  # the key of a config whose model has a head that drafts tokens and is used
_DRAFTING = "mtp."  # heads that predict several tokens; some have an embedding and layers of their own
COMPARED_WHOLE, _SAMPLES, _BLOCK = 4 << 20, 32, 4096  # bytes; samples in all; bytes of each
MODULES = "modules.json"  # of sentence-transformers, next to a model that embeds
MAX_TOKENS = 1 << 24  # of a vocabulary
MAX_CONFIG = 16 << 20  # bytes; the longest published config.json has some 100 KB


class OtherParts(NamedTuple):
    """The parts of a checkpoint that are not its language model: an encoder of pictures."""

    config: Mapping[str, Any]  # of the whole model
    headers: tuple[Header, ...]  # of the other tensors, under the names that they have in the file
    projector: Path | None = None  # a GGUF file that has all of it, in which case the others are empty


class StoredCheckpoint(NamedTuple):
    """A checkpoint with its config parsed and its headers read."""

    path: Path  # the folder, or the GGUF file
    raw: dict[str, object]  # config.json, or its equivalent
    headers: tuple[Header, ...]  # a language model's tensors are named as in a checkpoint of its own: `OWN`
    fingerprint: str  # of config and weights as stored, whatever precision they are loaded in
    is_gguf: bool = False
    beginnings: tuple[str, ...] = (OWN,)  # of its language models' names in the file: one, or it can't be read
    others: OtherParts | None = None  # None if it is a language model alone

    @property
    def may_be_quantized(self) -> bool:
        """True if some of its tensors may not be stored as plain numbers."""
        return self.is_gguf or bool(self.raw.get("quantization_config") or self.raw.get("compression_config"))

    @property
    def described_by(self) -> str:
        """The place of the model's description, in words."""
        return "its metadata" if self.is_gguf else "its config.json"


def look(
    model: str | Path, projector: str | Path | None = None, *, drafts: bool = False, outline: bool = False
) -> StoredCheckpoint:
    """Read config, headers and fingerprint of a folder, a GGUF file, a name in a store or a hub id: milliseconds,
    whatever the size.

    `projector` is the file of a GGUF model's encoder of pictures, by default the one that its store says, or the only
    one next to it. With `drafts` the head that drafts tokens is part of the model, if it has one. An `outline`, for
    lists of models, has no fingerprint: no vocabulary is read for it, and none of the weights.
    """
    found = _look(model, projector, drafts=drafts, outline=outline)
    raw = {key: value for key, value in found.raw.items() if key != _DRAFT_HEAD}
    names = (entry.name for header in found.headers for entry in header.entries) if drafts else iter(())
    if not any(name.startswith(f"{_DRAFTING}fc.") or ".eh_proj." in name for name in names):
        return found if len(raw) == len(found.raw) else found._replace(raw=raw)
    fingerprint = f"{found.fingerprint}-drafts"  # pages have one layer more
    return found._replace(raw=raw | {_DRAFT_HEAD: True}, fingerprint=fingerprint)


def _look(model: str | Path, projector: str | Path | None, *, drafts: bool, outline: bool) -> StoredCheckpoint:
    place = locate(model)
    path = checkpoint_path(place.path)
    if gguf_files.is_file(path):
        from rekindle._src.models.loading.gguf import source as gguf  # other formats don't need it

        raw, headers = gguf.look(path, outline=outline)
        fingerprint = "" if outline else fingerprints.folder_fingerprint(raw, headers)
        own = place.projector or gguf_files.projector_of(path)
        file = own if projector is None else Path(projector).expanduser()
        others: OtherParts | None = None
        if file is not None:
            raw, others = _with_projector(raw, file, optional=projector is None)
        return StoredCheckpoint(path, raw, headers, fingerprint, is_gguf=True, others=others)
    if projector is not None:
        problem = "is for models in GGUF: a folder of safetensors has its encoder of pictures itself"
        raise ConfigError("projector", str(projector), problem, "Leave it out")
    files = tensor_files.weight_files(path)
    raw = read_config(path)
    headers = tensor_files.read_headers(files)
    fingerprint = "" if outline else fingerprints.folder_fingerprint(raw, headers)
    if any(name in drafters.ARCHITECTURES for name in _architectures(raw)):
        from rekindle._src.models.drafters.stored import read_head  # other checkpoints don't need it

        keys, headers = read_head(raw, headers, path, added=_ADDED)
        return StoredCheckpoint(path, keys, headers, fingerprint)
    config, names = text_config(raw), [entry.name for header in headers for entry in header.entries]
    found, others = beginnings(names), None
    if len(found) == 1:
        nested = isinstance(raw.get("text_config"), Mapping) and raw.get("model_type") not in drafters.MODULES
        pictures = pictures_of(raw) if nested else None
        headers, rest = _language_model(path, headers, found[0], nested=nested, alone=pictures is None, drafts=drafts)
        if pictures is not None and any(header.entries for header in rest):
            others, config = OtherParts(raw, rest), config | {"pictures": pictures}
    if (path / MODULES).is_file() and not any(_HEAD in name for name in names):
        config |= {"headless": True}
    if not outline and config.get("tie_word_embeddings") is not False and _has_another_head(headers):
        config |= {"another_head": True}
    return StoredCheckpoint(path, config, headers, fingerprint, beginnings=found, others=others)


def text_config(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the config of the language model in a model of images or sounds; any other config is returned as it is."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return {name: value for name, value in raw.items() if name not in _ADDED}
    shared = {name: raw[name] for name in _SHARED_KEYS if raw.get(name) is not None}
    own = {
        name: value for name, value in text.items() if name not in _ADDED and (value is not None or name not in shared)
    }
    own = _SAME_LAYERS.get(str(own.get("model_type")), lambda own: own)(own)
    if raw.get("model_type") in drafters.MODULES:
        own |= {name: raw[name] for name in _ASSISTANT_KEYS if name in raw}
    tied = {name: shared[name] for name in ("tie_word_embeddings",) if name in shared}  # the whole model decides
    return {**shared, **own, **tied, "nested_in": raw.get("model_type")}


def _architectures(raw: Mapping[str, object]) -> list[object]:
    found = raw.get("architectures")
    return found if isinstance(found, list) else []


def _with_projector(
    raw: dict[str, Any], projector: Path, *, optional: bool
) -> tuple[dict[str, Any], OtherParts | None]:
    """Return a model's config with its pictures, and the file that reads them; an optional one has to fit to count."""
    from rekindle._src.models.vision.mmproj import read_mmproj  # other models don't need it

    try:
        vision = read_mmproj(projector).config
        if vision.out_size != raw.get("hidden_size"):
            raise CheckpointError(
                f"{projector} makes rows of {vision.out_size:,} numbers, and the model's have "
                f"{raw.get('hidden_size'):,}: it belongs to another model."
            )
    except (CheckpointError, UnsupportedModel, OSError) as error:
        if not optional:
            raise
        _log.warning("pictures can't be read: %s", error)
        return raw, None
    both_ways = "all" if vision.model_type in _BOTH_WAYS else "no"
    token = 0 if raw.get("hidden_size_per_layer_input") else None
    pictures = {"levels": len(vision.deepstack), "token": token, "both_ways": both_ways}
    return raw | {"pictures": pictures}, OtherParts({}, (), projector)


def pictures_of(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how a model's text takes the rows of pictures, as `PictureSpec`; None if it reads text alone here."""
    if raw.get("vision_config") is None:
        return None
    from rekindle._src.models.vision.registry import vision_config  # other models don't need it

    text = raw.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    both_ways = "all" if raw.get("model_type") in _BOTH_WAYS else "no"
    if text.get("use_bidirectional_attention") == "vision":
        both_ways = "windows"
    try:
        config = vision_config(raw)
    except UnsupportedModel as error:
        _log.warning("pictures can't be read: %s", error)
        return None
    token = text.get("pad_token_id") if text.get("hidden_size_per_layer_input") else None
    if token is not None and not (type(token) is int and 0 <= token < MAX_TOKENS):
        _log.warning("pictures can't be read: pad_token_id=%.80r in text_config is no token", token)
        return None
    return None if config is None else {"levels": len(config.deepstack), "token": token, "both_ways": both_ways}


def beginnings(names: Iterable[str]) -> tuple[str, ...]:
    """Return the beginning of each language model's names: `model.`, `model.language_model.`, or empty."""
    embeddings, layers, stack = set[str](), set[str](), _DRAFTING
    for name in names:
        if name.startswith((_DRAFTING, stack)):  # most names are those of the stack before
            continue
        module, parts = name.rpartition(".")[0], name.split(".")
        embeddings |= {module.removesuffix(own) for own in _EMBEDDINGS if f".{module}".endswith(f".{own}")}
        numbered = (at for at, part in enumerate(parts[:-1]) if part in _LAYERS and parts[at + 1].isdecimal())
        for at in itertools.islice(numbered, 1):
            layers.add("".join(f"{part}." for part in parts[:at]))
            stack = "".join(f"{part}." for part in parts[: at + 1])
    return tuple(sorted(embeddings & layers))


def own_name(name: str, beginning: str) -> str | None:
    """Return the name of a language model's tensor in a checkpoint of its own; None for other tensors."""
    above, head, rest = name.rpartition(_HEAD)
    if head and beginning.startswith(above) and above[-1:] in ("", "."):
        return head + rest
    mine = name.startswith(beginning) and not name.startswith(_DRAFTING)
    return OWN + name.removeprefix(beginning) if mine else None


def _language_model(
    path: Path, headers: tuple[Header, ...], beginning: str, *, nested: bool, alone: bool, drafts: bool
) -> tuple[tuple[Header, ...], tuple[Header, ...]]:
    """Return the headers with the language model's tensors under their names in a checkpoint of its own, and the
    headers with the tensors of other parts.

    Other parts, such as an image encoder, are apart from a model in which it is `nested`. Elsewhere their tensors keep
    their names and are differences. It is said if the language model is used `alone`.
    """
    kept, apart, names, others = [], [], dict[str, str](), list[str]()
    for header in headers:
        entries, rest = [], []
        for entry in header.entries:
            name = own_name(entry.name, beginning)
            if name is None and not (drafts and entry.name.startswith(_DRAFTING)):
                others.append(entry.name)
                if nested:
                    rest.append(entry)
                    continue
            name = entry.name if name is None else name
            if (other := names.setdefault(name, entry.name)) != entry.name:
                raise CheckpointError(
                    f"{path} has two tensors for {name}: {other} and {entry.name}. Keep the weights of one model in it"
                )
            entries.append(entry._replace(name=name))
        kept.append(header._replace(entries=tuple(entries)))
        apart.append(header._replace(entries=tuple(rest)))
    if alone and nested and others and path not in _mentioned:
        _mentioned.add(path)
        towers = ", ".join(sorted({name.removeprefix(OWN).partition(".")[0] for name in others}))
        _log.warning("%s: only the language model is used; %d tensors of %s are not", path, len(others), towers)
    return tuple(kept), tuple(apart)


def _has_another_head(headers: Iterable[Header]) -> bool:
    """True if the stored head differs from the embedding; a large one is compared by samples."""
    entries = {entry.name: entry for header in headers for entry in header.entries}
    head = entries.get(f"{_HEAD}weight")
    names = (f"{OWN}{module}.weight" for module in _EMBEDDINGS)
    embedding = next((entries[name] for name in names if name in entries), None)
    if head is None or embedding is None:
        return False
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return True
    count = 1 if head.nbytes <= COMPARED_WHOLE else _SAMPLES
    size = head.nbytes if count == 1 else _BLOCK
    places = [(head.nbytes - size) * number // max(1, count - 1) for number in range(count)]
    with open_plain(head.file) as one, open_plain(embedding.file) as other:
        for place in places:
            one.seek(head.offset + place)
            other.seek(embedding.offset + place)
            if one.read(size) != other.read(size):
                return True
    return False


def checkpoint_path(path: Path) -> Path:
    """Return the GGUF file of a folder that has one and no safetensors; any other path as it is."""
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return path
    return gguf_files.in_folder(path) or path


def read_config(folder: Path) -> dict[str, object]:
    """Return the parsed config.json of a folder. Raise `CheckpointError` if it is missing, unreadable or no object."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = tensor_files.read_json(path, dict, MAX_CONFIG)
    except CheckpointError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise CheckpointError(
            f"{folder} has no config.json. Pass the folder of a Hugging Face checkpoint."
        ) from error.__cause__
    return config
