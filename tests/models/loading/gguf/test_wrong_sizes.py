"""Each type of tensors with wrong sizes: the right values, or an error that names tensor, value and fix."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import checkpoints, gguf_files
from helpers.gguf_files import entry, raw
from helpers.thorough import by_default
from rekindle._src.models.loading.gguf.blocks import BY_NAME, NUMBERS, TYPES, UNREAD, BlockType, dequantize
from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf
from rekindle._src.models.loading.gguf.header import read_header
from rekindle._src.models.loading.gguf.rows import PACKINGS, GgufRows
from rekindle.errors import CheckpointError

UNLIKE = ("F32", "BF16", "I8", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ3_S", "MXFP4", "NVFP4")  # numbers and blocks
ROWS = 3
AFTER = 2048  # values of the vector after the tensor in question
UNKNOWN = next(number for number in range(100) if number not in TYPES and number not in UNREAD)
MEMORY = 6 << 20  # bytes that reading a file of a few kilobytes may take: a file is read by 4 MiB
RAW = checkpoints.CASES["llama"] | {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
}  # fmt: skip
FIXES = ("Download", "Convert", "Read are", "Use ", "Check")


class WrongSize(NamedTuple):
    """A file, and what its error has to say."""

    what: str
    content: bytes
    said: tuple[str, ...]


def columns_of(kind: BlockType) -> int:
    return max(2 * kind.values, 32)


def blocks_of(kind: BlockType) -> bytes:
    rng = np.random.default_rng(NUMBERS[kind.name])
    return gguf_files.random_blocks(kind, ROWS, columns_of(kind), rng).tobytes()


def file_of(
    kind: BlockType, *, shape: tuple[int, ...] | None = None, number: int | None = None, offset: int = 64,
    cut: int = 0, version: int = 3, dimensions: int | None = None,
) -> bytes:  # fmt: skip
    """A file in which "w" of this type lies between two vectors, with other sizes where they are given."""
    data = blocks_of(kind)
    after = 64 + -(-len(data) // 32) * 32
    stored = entry(
        "w",
        (ROWS, columns_of(kind)) if shape is None else shape,
        NUMBERS[kind.name] if number is None else number,
        offset,
        dimensions=dimensions,
    )
    content = raw(
        version=version,
        entries=[entry("before", (16,), 0, 0), stored, entry("after", (AFTER,), 0, after)],
        data=bytes(64) + data.ljust(after - 64, b"\0") + bytes(4 * AFTER),
    )
    return content[: len(content) - cut] if cut else content


def last(kind: BlockType, cut: int, shape: tuple[int, ...] | None = None) -> bytes:
    """A file that ends with "w", and `cut` bytes before that."""
    data = blocks_of(kind)
    stored = entry("w", shape or (ROWS, columns_of(kind)), NUMBERS[kind.name], 64)
    content = raw(entries=[entry("before", (16,), 0, 0), stored], data=bytes(64) + data)
    return content[: len(content) - cut]


def wrong_sizes(kind: BlockType) -> Iterator[WrongSize]:
    """Return files of one type whose sizes are wrong, each with what its error names."""
    columns, name = columns_of(kind), kind.name
    block, size = kind.layout.itemsize, len(blocks_of(kind))
    if kind.values > 1:
        for odd in (columns + 1, columns - 1, kind.values // 2, 1, (1 << 63) + 1):
            yield WrongSize(f"row of {odd}", file_of(kind, shape=(ROWS, odd)), ("w", f"{odd}", f"({name})"))
    ends = ("w", name, f"[{ROWS}, {columns}]", "ends at byte", "the file has")
    for cut in (1, block, size):
        yield WrongSize(f"cut by {cut}", last(kind, cut), ends)
    for shape in ((0, columns), (ROWS, 0), (0,), (0, 0, 0, 0)):
        yield WrongSize(f"shape {shape}", file_of(kind, shape=shape), ("w", str([*shape]), f"({name})"))
    for shape in (
        (1 << 31, 1 << 32), (1 << 32, 1 << 32), (1 << 62, 256), (256, (1 << 64) - 256),
        (1 << 63, 1 << 62, 1 << 62, 256), ((1 << 64) - 1, 256), (ROWS + 1000, columns), (ROWS, columns, 1 << 40, 256),
    ):  # fmt: skip
        if shape[-1] % kind.values == 0:
            yield WrongSize(
                f"shape {shape}", file_of(kind, shape=shape), ("w", name, str([*shape])[:70], "ends at byte")
            )
    yield WrongSize("a row too many", file_of(kind, shape=(ROWS + 1, columns)), ("overlaps", "after"))
    yield WrongSize("on another", file_of(kind, offset=32), ("overlaps", "before"))
    yield WrongSize("on the header", file_of(kind, offset=(1 << 64) - 32), ("w", "ends at byte"))
    for offset in (1, 63, 65, 72):
        yield WrongSize(
            f"offset {offset}", file_of(kind, offset=offset), ("w", f"begins at {offset}", "multiple of 32")
        )
    for offset in (1 << 20, 1 << 40, 1 << 63, (1 << 64) - (1 << 20)):
        yield WrongSize(f"offset {offset}", file_of(kind, offset=offset), ("w", name, "ends at byte"))
    yield WrongSize("an unknown type", file_of(kind, number=UNKNOWN), ("w", f"type {UNKNOWN}", name))
    yield WrongSize("a type of 32 bits", file_of(kind, number=(1 << 32) - 1), ("w", "type 4294967295", name))
    for number, known in UNREAD.items():
        yield WrongSize(f"type {known}", file_of(kind, number=number), ("w", known, "not read"))
    larger = next(
        (other for other in TYPES.values() if other.layout.itemsize / other.values > block / kind.values), None
    )
    if larger is not None and columns % larger.values == 0:
        said = ("overlaps", "after")
        yield WrongSize(f"as {larger.name}", file_of(kind, shape=(64, columns), number=NUMBERS[larger.name]), ("w",))
        yield WrongSize(f"as {larger.name} in place", file_of(kind, number=NUMBERS[larger.name]), said)
    for dimensions in (0, 5, (1 << 32) - 1):
        stored = file_of(kind, dimensions=dimensions)
        yield WrongSize(f"{dimensions} dimensions", stored, ("w", f"{dimensions} dimensions", "1 to 4"))
    yield WrongSize("big-endian", file_of(kind, version=3 << 24), ("big-endian",))


@pytest.mark.parametrize("kind", by_default(list(BY_NAME), lambda kind: kind in UNLIKE))
def test_wrong_sizes_are_refused_by_name_before_anything_is_read(kind: str, tmp_path: Path) -> None:
    path, wrong = tmp_path / "model.gguf", list[str]()
    tracemalloc.start()
    try:
        for one in wrong_sizes(BY_NAME[kind]):
            path.unlink(missing_ok=True)
            path.write_bytes(one.content)
            tracemalloc.reset_peak()
            try:
                read_header(path)
                wrong.append(f"{one.what}: no error")
            except CheckpointError as error:
                message = str(error)
                if not all(part in message for part in (*one.said, str(path))) or len(message) > 700:
                    wrong.append(f"{one.what}: {message}")
                if not any(fix in message for fix in FIXES):
                    wrong.append(f"{one.what} names no fix: {message}")
            if (peak := tracemalloc.get_traced_memory()[1]) > MEMORY:
                wrong.append(f"{one.what}: {peak:,} bytes")
    finally:
        tracemalloc.stop()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", BY_NAME)
def test_the_right_sizes_are_the_right_values_and_a_file_cut_later_is_an_error(kind: str, tmp_path: Path) -> None:
    """The file is cut between the reading of its header and that of its numbers: by a byte, by a block, by all."""
    path, form = tmp_path / "model.gguf", BY_NAME[kind]
    path.write_bytes(last(form, 0))
    (_, stored) = read_header(path).tensors
    rows = GgufRows(path, stored.name, form, stored.shape, stored.offset)
    blocks = np.frombuffer(blocks_of(form), form.layout)
    expected = dequantize(form, blocks).reshape(ROWS, -1)
    np.testing.assert_array_equal(rows(0, ROWS), expected)
    np.testing.assert_array_equal(rows(1, 2), expected[1:2])
    size = path.stat().st_size
    for cut in (1, form.layout.itemsize, stored.nbytes):
        os.truncate(path, size - cut)
        with pytest.raises(CheckpointError, match=r"\bw\b") as caught:
            rows(0, ROWS)
        assert str(path) in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.of_types(tmp_path_factory.mktemp("whole") / "whole.gguf", RAW, lambda name: "F32")


def with_tensor(whole: Path, path: Path, name: str, shape: tuple[int, ...], kind: BlockType) -> Path:
    """The file with one tensor of another shape and type."""
    tensors, pieces, content = list[OutgoingTensor](), list[NDArray[Any]](), whole.read_bytes()
    header = read_header(whole)
    for one in header.tensors:
        piece = np.frombuffer(content, np.uint8, one.nbytes, one.offset)
        if one.name == name:
            one = one._replace(kind=kind, shape=shape)
            piece = gguf_files.random_blocks(kind, 1, int(np.prod(shape)), np.random.default_rng(1))
        tensors.append(OutgoingTensor(one.name, one.kind, one.shape))
        pieces.append(piece)
    path.unlink(missing_ok=True)
    write_gguf(path, dict(header.metadata), tensors, pieces)
    return path


def other_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Shapes of other numbers of dimensions, and of twice and half the rows and columns."""
    if len(shape) == 1:
        yield from ((1, *shape), (2 * shape[0],), (1, 1, *shape))
        return
    rows, columns = shape
    yield from (
        (rows * columns,), (columns,), (1, rows * columns), (1, rows, columns), (1, 1, rows, columns),
        (rows, 2 * columns), (2 * rows, columns), (rows // 2, columns),
    )  # fmt: skip


@pytest.mark.parametrize("kind", by_default(list(BY_NAME), lambda kind: kind in ("Q4_K", "I8")))
def test_a_tensor_of_another_shape_is_refused_before_it_is_read(kind: str, whole: Path, tmp_path: Path) -> None:
    """A matrix that is a vector, a stack, or of other numbers of rows and columns; and a vector that has blocks."""
    path, form, wrong = tmp_path / "model.gguf", BY_NAME[kind], list[str]()
    shapes = {one.name: one.shape for one in read_header(whole).tensors}
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "token_embd.weight", "blk.0.ffn_down.weight",
                 "output_norm.weight", "blk.0.attn_norm.weight"):  # fmt: skip
        own = shapes[name]
        for shape in (*other_shapes(own), *([own] if len(own) == 1 and form.values > 1 else ())):
            if shape[-1] % form.values:
                continue  # what a header is refused for
            with_tensor(whole, path, name, shape, form)
            try:
                checkpoints.described(path, dtype="bfloat16")
                wrong.append(f"{name} {shape}: no error")
            except CheckpointError as error:
                message = str(error)
                named = name in message or (name == "token_embd.weight" and "output.weight" in message)  # its rows
                if not named or not any(fix in message for fix in FIXES):
                    wrong.append(f"{name} {shape}: {message}")
    assert not wrong, "\n".join(wrong)


BLOCKS_OF_ANY_BYTES = """
import faulthandler, resource, sys
from pathlib import Path
faulthandler.enable()
import numpy as np
from helpers import checkpoints
from helpers.gguf_files import of_types
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.loading.gguf.header import read_header
from workshop import reference

from models.loading.gguf.test_wrong_sizes import RAW
for kind in sys.argv[2:]:
    path = of_types(Path(sys.argv[1]) / f"{kind}.gguf", RAW, lambda name: kind)
    content, tensors = bytearray(path.read_bytes()), read_header(path).tensors
    for number, byte in enumerate((None, 0xFF, 0x80)):
        for one in tensors:
            if one.kind.name == kind:
                draw = np.random.default_rng(number).bytes(one.nbytes) if byte is None else bytes([byte]) * one.nbytes
                content[one.offset : one.offset + one.nbytes] = draw
        path.write_bytes(content)
        model = load(path)
        logits, _ = reference.prefill(model, [3, 9, 27, 81], reference.empty_cache(model, 32))
        assert np.asarray(logits, np.float32).shape[-1] == RAW["vocab_size"], kind
        print(kind, number, flush=True)
"""


@pytest.mark.thorough
@pytest.mark.timeout(1_900)  # native kernels of a dozen types are compiled: minutes on a busy machine
@pytest.mark.parametrize("third", range(3))
def test_products_with_blocks_of_any_bytes_end_no_process(third: int, tmp_path: Path) -> None:
    """Random ones and the largest: scales that are NaN or infinite, indices at the ends of their tables."""
    kinds = [kind for kind in PACKINGS if kind in BY_NAME][third::3]
    root = Path(__file__).parents[4]
    paths = [str(root / part) for part in ("toolkit", "kernels", "tests")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", BLOCKS_OF_ANY_BYTES, str(tmp_path), *kinds]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1_800, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"{kind} {number}" for kind in kinds for number in range(3)]
