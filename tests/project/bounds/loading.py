"""Bounds on checkpoints, and on the stores of other tools."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from project.bounds.records import AUTHOR, MACHINE, OURS, SHOWN, SMALL, Bound, Other, within
from rekindle._src.models.loading import tensor_files
from rekindle._src.models.loading.gguf import files, header
from rekindle._src.models.loading.stores import model_store
from rekindle.errors import CheckpointError

VALUES = tensor_files.MAX_VALUES
SHARDS = 1024


def file(content: bytes, name: str) -> Path:
    path = Path(tempfile.mkdtemp()) / name
    path.write_bytes(content)
    return path


def quietly(read: Callable[[], object]) -> Callable[[], object]:
    """What a reader makes of a file, or the error by which it refuses it in the end."""

    def work() -> object:
        try:
            return read()
        except CheckpointError as error:
            problem = str(error)
        if "more than" in problem:  # then it would cost nothing
            raise ValueError(problem)
        return problem

    return work


def lists(count: int) -> Callable[[], object]:
    text = b'{"__metadata__":{"a":[' + b"[]," * (count // 2 - 8) + b"[]]}}"
    path = file(len(text).to_bytes(8, "little") + text, "model.safetensors")
    return quietly(lambda: tensor_files.read_header(path))


def objects(count: int) -> Callable[[], object]:
    path = file(b'{"a":[' + b'{"a":1},' * (count // 3 - 8) + b"[]]}", "config.json")
    return quietly(lambda: tensor_files.read_json(path, dict, 1 << 30))


def tensors(count: int) -> Callable[[], object]:
    fields = {
        f"{number:x}": {"dtype": "U8", "shape": [], "data_offsets": [number, number + 1]}
        for number in range(count // 9 - 8)
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    path = file(len(text).to_bytes(8, "little") + text + bytes(len(fields)), "model.safetensors")
    return lambda: tensor_files.read_header(path)


def gguf(pairs: list[bytes], entries: list[bytes]) -> Callable[[], object]:
    from helpers.gguf_files import raw

    path = file(raw(pairs=pairs, entries=entries, data=bytes(64)), "model.gguf")

    def read() -> object:
        header.forget_headers()
        return header.read_header(path)

    return quietly(read)


def strings(count: int) -> Callable[[], object]:
    from helpers.gguf_files import pair

    return gguf([pair("a", 9, struct.pack("<IQ", 8, count) + bytes(8) * count)], [])


def keys(count: int) -> Callable[[], object]:
    from helpers.gguf_files import pair

    return gguf([pair(f"{number:x}", 6, struct.pack("<f", 0.1)) for number in range(count)], [])


def long_text(count: int) -> Callable[[], object]:
    from helpers.gguf_files import pair, text

    return gguf([pair("a", 8, text(b"a" * ((count << 20) - 100) + "😀".encode()))], [])


def entries(count: int) -> Callable[[], object]:
    from helpers.gguf_files import entry

    name = "a" * (header.MAX_NAME - 8)
    return gguf([], [entry(f"{name}{number:x}", [1], 0, 0) for number in range(count)])


def linked(path: Path, names: list[str]) -> list[Path]:
    """The names of a file, next to it."""
    for name in names:
        (path.parent / name).hardlink_to(path)
    return [path.parent / name for name in names]


def gguf_parts(count: int) -> Callable[[], object]:
    """Parts that share the longest header, each with a text of its own."""
    from helpers.gguf_files import pair, raw, text

    letters = header.MAX_HEADER // files.MAX_PARTS - 200
    content = raw(pairs=[pair("a", 8, text(b"a" * letters + "😀".encode()))], data=bytes(64))
    path = file(content, "m.gguf")
    parts = linked(path, [f"m-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)])
    return quietly(lambda: header.read_headers(parts))


def shards(count: int) -> Callable[[], object]:
    """Files that share the most values, each with as many tensors of one byte."""
    fields = {
        f"{number:x}": {"dtype": "U8", "shape": [], "data_offsets": [number, number + 1]}
        for number in range(VALUES // SHARDS // 9 - 8)
    }
    content = json.dumps(fields, separators=(",", ":")).encode()
    path = file(len(content).to_bytes(8, "little") + content + bytes(len(fields)), "a.safetensors")
    names = linked(path, [f"a{number}.safetensors" for number in range(count)])
    return quietly(lambda: tensor_files.read_headers(names))


def looks(count: int) -> Callable[[], object]:
    """A folder, looked at again and again."""
    folder = Path(tempfile.mkdtemp())
    for number in range(min(count, model_store.MAX_ENTRIES)):
        (folder / f"{number}.gguf").touch()

    def work() -> object:
        reader, found = model_store.StoreReader(), list[Any]()
        for _ in range(-(-count // model_store.MAX_ENTRIES)):
            found.append(reader.children(folder))
        return found

    return work


BOUNDS: list[Bound] = [
    AUTHOR(
        "models/loading/tensor_files.py: MAX_VALUES", counts="values of a checkpoint's JSON", most=VALUES,
        unit="an empty list", feed=lists, count=VALUES // 4, seconds=4, mib=420,
    ),
    AUTHOR(
        "models/loading/tensor_files.py: MAX_VALUES", counts="values in objects of a checkpoint's JSON", most=VALUES,
        unit="an object of one field", feed=objects, count=VALUES // 4, seconds=4, mib=420,
    ),
    AUTHOR(
        "models/loading/tensor_files.py: _MAX_HEADER, MAX_NAME, MAX_DIMENSIONS", counts="values of tensors' entries",
        most=VALUES, unit="a tensor of one byte", feed=tensors, count=VALUES // 4, seconds=10, mib=640,
    ),
    AUTHOR(
        "models/loading/tensor_files.py: _MAX_HEADER, MAX_VALUES", counts="files of a checkpoint", most=SHARDS,
        unit="a link to a file of many tensors", feed=shards, count=SHARDS // 4, seconds=10, mib=640,
    ),
    AUTHOR(
        "models/loading/gguf/header.py: MAX_TEXTS", counts="strings of an array", most=header.MAX_TEXTS,
        unit="an empty string", feed=strings, count=header.MAX_TEXTS // 8, seconds=3, mib=320,
    ),
    AUTHOR(
        "models/loading/gguf/header.py: MAX_KEYS, MAX_KEY", counts="keys of a GGUF file", most=header.MAX_KEYS,
        unit="a float", feed=keys, count=header.MAX_KEYS // 8, seconds=2, mib=64,
    ),
    AUTHOR(
        "models/loading/gguf/header.py: MAX_HEADER", counts="MiB of a GGUF header", most=header.MAX_HEADER >> 20,
        unit="a text with an emoji", feed=long_text, count=16, seconds=6, mib=2_304,
    ),
    AUTHOR(
        "models/loading/gguf/header.py: MAX_TENSORS, MAX_NAME", counts="tensors of a GGUF file",
        most=header.MAX_TENSORS, unit="a name of 1,024 bytes", feed=entries, count=header.MAX_TENSORS // 8, seconds=3,
        mib=384,
    ),
    AUTHOR(
        "models/loading/gguf/files.py: MAX_PARTS", counts="parts of a GGUF model", most=files.MAX_PARTS,
        unit="a link to a file with a long text", feed=gguf_parts, count=128, seconds=6, mib=2_304,
    ),
    AUTHOR(
        "models/loading/stores/model_store.py: MAX_LOOKS, MAX_ENTRIES, MAX_SCANNED", counts="entries of folders",
        most=model_store.MAX_LOOKS, unit="a file", feed=looks, count=model_store.MAX_LOOKS // 8, seconds=5, mib=128,
    ),
]  # fmt: skip

JSON = within("values of a checkpoint's JSON")

OTHERS: dict[str, dict[str, Other]] = {
    "models/config_kinds.py": {"_LARGEST": SMALL},
    "models/hf_config.py": {
        "MAX_LAYERS": MACHINE, "MAX_EXPERTS": MACHINE, "_MOST": MACHINE, "_MOST_ELSEWHERE": MACHINE,
    },
    "models/loading/gguf/architecture.py": {"_MOST": SMALL},
    "models/loading/gguf/header.py": {"_MAX_DIMENSIONS": SMALL},
    "models/loading/hub.py": {"MAX_DESCRIPTION": OURS},
    "models/loading/known_models.py": {"MOST": OURS},
    "models/loading/prepared.py": {"MAX_ENTRIES": OURS, "MAX_COPY": OURS},
    "models/loading/quantize.py": {"_LARGEST": OURS},
    "models/loading/quantized.py": {"_MOST_GROUPS": SMALL},
    "models/loading/sentence_transformers.py": {"_MAX_JSON": JSON, "_MOST_LAYERS": MACHINE},
    "models/loading/stored.py": {"MAX_CONFIG": JSON, "MAX_TOKENS": MACHINE},
    "models/loading/stores/lm_studio.py": {"MAX_SETTINGS": JSON},
    "models/loading/stores/model_store.py": {
        "MAX_MODELS": within("entries of folders"), "MAX_BYTES": JSON, "MAX_NAME": SMALL, "MOST_NAMED": SHOWN,
    },
    "models/loading/stores/ollama.py": {"MAX_MANIFEST": JSON, "MAX_LAYERS": JSON, "MAX_LISTED": JSON},
    "models/loading/tensor_files.py": {"MOST_LISTED": SHOWN},
    "models/vision/mmproj.py": {"_MOST_TABLES": SMALL},
}  # fmt: skip
