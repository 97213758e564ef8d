"""The GGUF file that a path means: a file, one of the parts of a large one, or the only one of a folder."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rekindle._src.models.loading.tensor_files import listed
from rekindle.errors import CheckpointError

SUFFIX, MAGIC = ".gguf", b"GGUF"
MAX_PARTS = 1000
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_OTHERS = ("mmproj", "imatrix", "adapter", "lora")  # files next to a model that are not models


def is_gguf(path: Path) -> bool:
    """True if a path names a GGUF file."""
    return path.suffix.lower() == SUFFIX


def is_file(path: str | Path) -> bool:
    """True if a path is an existing GGUF file, by its name or, as in Ollama's store, its first bytes."""
    path = Path(path).expanduser()
    if is_gguf(path) or not path.is_file():
        return path.is_file()
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def models(names: Sequence[str]) -> list[str]:
    """Return the models among the names of files, sorted; of one in several parts, the first part."""
    files = [name for name in names if name.lower().endswith(SUFFIX)]
    files = [name for name in files if not name.rpartition("/")[2].lower().startswith(_OTHERS)]
    parts = [(name, _PART.fullmatch(name)) for name in files]
    return sorted(name for name, part in parts if part is None or int(part[2]) == 1)


def only(names: Sequence[str], where: str, form: str) -> str | None:
    """Return the only model among the names; None if there is none. `form` says how one of several is passed."""
    files = models(names)
    if len(files) > 1:
        raise CheckpointError(
            f"{where} has {len(files)} models in GGUF: {listed(files, ', ')}. Pass one of them: {form.format(files[0])}"
        )
    return files[0] if files else None


def projector_of(model: Path) -> Path | None:
    """Return the only encoder of pictures next to a model's file; None if there is none, or several."""
    try:
        names = os.listdir(model.parent)
    except OSError:  # a folder that may not be read has a file that may
        return None
    found = [model.parent / name for name in names if name.lower().endswith(SUFFIX) and "mmproj" in name.lower()]
    return found[0] if len(found) == 1 and found[0] != model else None


def in_folder(folder: Path) -> Path | None:
    """Return the only GGUF model of a folder, None if there is none. Raise `CheckpointError` if there are several."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read ({error.strerror}). Check who may read it.") from error
    name = only(names, str(folder), f"{folder}/{{}}")
    return None if name is None else folder / name


def parts(path: Path) -> list[Path]:
    """Return all files of the model that `path` belongs to; most models are one file."""
    names = siblings(path.name)
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of the {len(names)} parts of {path.name}: {listed(missing, ', ')}. "
            "Download them."
        )
    return [path.parent / name for name in names]


def siblings(name: str) -> list[str]:
    """Return the names of all parts of a model, given one of them; just that name for a whole file."""
    part = _PART.fullmatch(name)
    if part is None:
        return [name]
    count = int(part[3])
    if not 1 <= count <= MAX_PARTS:
        raise CheckpointError(f"{name} calls itself a part of {count}; 1 to {MAX_PARTS} are possible. Check the name.")
    return [f"{part[1]}-{number:05d}-of-{part[3]}.gguf" for number in range(1, count + 1)]
