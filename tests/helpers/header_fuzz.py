"""Opens a GGUF file again and again with mutated headers, in a process with little memory: `python header_fuzz.py FILE
FIRST COUNT FOLDER` writes a line of JSON for each mutation.

Only the header is a copy; the tensors are a hole in a sparse file. Each mutation is drawn from its number: a field (a
count, a length, a key, a type, a value, a dimension, an offset) gets an extreme or another one's content, bytes are
flipped, cut out, put in or copied, or the file ends early.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type
STRING, ARRAY = 8, 9
FLOATS = {6: "<f", 12: "<d"}
MEMORY = 3 << 30  # of address space, beyond what the process has once everything is imported
SECONDS = 120  # without an answer, after which the process ends with all stacks
INTEGERS = (0, 1, 2, 3, 7, 31, 32, 255, 256, 1023, 65_535, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
            1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
REALS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    b"", b"\0", b"\xff\xfe", b"{{" * 4096, b"{%" + b" for a in b" * 2000, b"llama", b"gemma3", b"../../etc/passwd",
    b"qwen35", b"lfm2", b"granitehybrid", b"gpt2", b"\xe2\x80\xae", b"a" * 70_000, b"bert", b"mamba", b"nan",
)  # fmt: skip


class Field(NamedTuple):
    """A place in a header."""

    kind: str  # "count", "length", "text", "type", "integer", "real" or "bytes"
    start: int
    size: int


def fields_of(data: bytes) -> tuple[list[Field], int, int]:
    """Return the fields of a header, of long arrays only some; how many come before the tensors; where it ends."""
    fields = [Field("bytes", 0, 4), Field("type", 4, 4), Field("count", 8, 8), Field("count", 16, 8)]
    at = 24

    def text() -> None:
        nonlocal at
        (length,) = struct.unpack_from("<Q", data, at)
        fields.extend((Field("length", at, 8), Field("text", at + 8, length)))
        at += 8 + length

    def value(kind: int) -> None:
        nonlocal at
        if kind == STRING:
            text()
        elif kind == ARRAY:
            inner, count = struct.unpack_from("<IQ", data, at)
            fields.extend((Field("type", at, 4), Field("count", at + 4, 8)))
            at += 12
            for index in range(count):
                known = len(fields)
                value(inner)
                if index % 997 and index > 3:
                    del fields[known:]
        else:
            fields.append(Field("real" if kind in FLOATS else "integer", at, SIZES[kind]))
            at += SIZES[kind]

    tensors, keys = struct.unpack_from("<QQ", data, 8)
    for _ in range(keys):
        text()
        (kind,) = struct.unpack_from("<I", data, at)
        fields.append(Field("type", at, 4))
        at += 4
        value(kind)
    keyed = len(fields)
    for _ in range(tensors):
        text()
        (dimensions,) = struct.unpack_from("<I", data, at)
        fields.append(Field("count", at, 4))
        at += 4
        fields.extend(Field("integer", at + 8 * index, 8) for index in range(dimensions))
        at += 8 * dimensions
        fields.extend((Field("type", at, 4), Field("integer", at + 4, 8)))
        at += 12
    return fields, keyed, at


def mutated(header: bytes, fields: list[Field], keyed: int, draw: random.Random) -> bytes:
    """Return a header with one to three changes; the first `keyed` fields do not belong to tensors."""
    changed = bytearray(header)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        where = draw.random()
        if where < 0.6:
            field = draw.choice(fields[:keyed] if draw.random() < 0.7 else fields)
            changed[field.start : field.start + field.size] = content_of(field, changed, fields, draw)
        elif where < 0.75:
            for _ in range(draw.randrange(1, 9)):
                changed[place(changed, draw)] ^= 1 << draw.randrange(8)
        elif where < 0.9:
            start, length = place(changed, draw), draw.choice((1, 2, 4, 8, 100, 5000))
            other = place(changed, draw)
            piece = draw.choice((b"", changed[other : other + length], bytes(length), draw.randbytes(length)))
            changed[start : start + draw.choice((0, length))] = piece
        else:
            del changed[place(changed, draw) :]
            break
    return bytes(changed)


def place(header: bytearray, draw: random.Random) -> int:
    """Return a place: in the first kilobytes, which have most of the keys, or anywhere."""
    return draw.randrange(max(1, min(len(header), draw.choice((64, 2048, 1 << 40)))))


def content_of(field: Field, header: bytearray, fields: list[Field], draw: random.Random) -> bytes:
    """Return a replacement for a field's content."""
    now = bytes(header[field.start : field.start + field.size])
    if field.kind == "real" and len(now) == field.size:
        return struct.pack("<f" if field.size == 4 else "<d", draw.choice(REALS))
    if field.kind == "text":
        other = draw.choice([one for one in fields if one.kind == "text"])
        swapped = bytes(header[other.start : other.start + other.size])
        replaced = draw.choice((swapped, draw.choice(TEXTS), draw.randbytes(field.size)))
        if draw.random() < 0.7:  # the length stays right
            header[field.start - 8 : field.start] = struct.pack("<Q", len(replaced))
            return replaced
        return replaced[: field.size].ljust(field.size, b"x")
    number = int.from_bytes(now, "little")
    near = (number + 1, number - 1, number * 2, number // 2, -number)
    chosen = draw.choice((*near, draw.choice(INTEGERS), draw.choice(INTEGERS), draw.randrange(16)))
    return (chosen % (1 << (8 * field.size))).to_bytes(field.size, "little")


def main(file: Path, first: int, count: int, folder: Path) -> None:
    sys.path[:0] = [str(ROOT / part) for part in ("toolkit", "kernels")]
    os.environ |= {"JAX_PLATFORMS": "cpu", "REKINDLE_CACHE": str(folder / "cache")}
    from rekindle._src.models.loading.checkpoint import describe, load
    from rekindle._src.models.loading.gguf.header import forget_headers
    from rekindle._src.models.loading.kept_weights import WeightForm
    from rekindle._src.text.chat import ChatTemplate
    from rekindle._src.text.generation_config import defaults_of
    from rekindle._src.text.tokenizer import Tokenizer
    from rekindle.errors import RekindleError

    def opened(path: Path, *, weights: bool) -> str:
        """Do what opening a file does until its programs are made."""
        if weights:
            load(path, dtype="bfloat16")
        else:
            describe(path, WeightForm("bfloat16"))
        tokenizer = Tokenizer.load(path)
        ids = tokenizer.encode("Once upon a time, 3 + 4 was 7.")
        tokenizer.decode(ids)
        template = ChatTemplate.load(path)
        if template is not None:
            template.render([{"role": "user", "content": "Who are you?"}])
        defaults_of(path)
        return "loads"

    with file.open("rb") as stream:
        data = stream.read(64 << 20)
    fields, keyed, end = fields_of(data)
    header, size = data[:end], file.stat().st_size
    del data
    path = folder / "model.gguf"
    path.write_bytes(header)
    os.truncate(path, size)
    assert opened(path, weights=False) == opened(path, weights=True) == "loads", "the file itself"
    forget_headers()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    loads = 0
    for number in range(first, first + count):
        draw = random.Random(f"{file.name} {number}")
        changed = mutated(header, fields, keyed, draw)
        path.write_bytes(changed)
        if len(changed) >= len(header) or draw.random() < 0.5:
            os.truncate(path, size)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        began, result = time.process_time(), ""
        print(json.dumps({"begun": number}), flush=True)
        try:
            result = opened(path, weights=loads % 16 == 0)
            loads += 1
        except RekindleError as error:
            result = f"refused: {error}"[:300]
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            places = ", ".join(f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
            result = f"{type(error).__name__}: {error}"[:300] + f" in {places}"
        faulthandler.cancel_dump_traceback_later()
        forget_headers()
        shutil.rmtree(folder / "cache" / "tokenizers", ignore_errors=True)  # each header's own: several MB
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        seconds = time.process_time() - began
        print(json.dumps({"number": number, "result": result, "seconds": seconds, "resident": resident}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
