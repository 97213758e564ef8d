"""Headers of GGUF files: what is read of good ones, and hostile ones, refused before anything is allocated."""

from __future__ import annotations

import hashlib
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import gguf_files
from helpers.gguf_files import entry, pair, text
from rekindle._src.models.loading.gguf import header as headers
from rekindle._src.models.loading.gguf.header import GgufHeader, read_header
from rekindle.errors import CheckpointError

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def read(file: Path, content: bytes) -> GgufHeader:
    """The header of a file with this content; reading it may not take much memory."""
    file.write_bytes(content)
    tracemalloc.start()
    try:
        return read_header(file)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (32 << 20) + 4 * len(content), f"{peak:,} bytes were allocated"


def test_values_of_all_types_and_places_of_tensors(file: Path) -> None:
    numbers = struct.pack("<IQ3i", 5, 3, -1, 0, 7)
    texts = struct.pack("<IQ", STRING, 2) + text("é") + text("")
    content = gguf_files.raw(
        pairs=[
            pair("a.count", U32, struct.pack("<I", 7)), pair("a.eps", F32, struct.pack("<f", 1e-5)),
            pair("a.on", BOOL, b"\1"), pair("a.name", STRING, text("naïve")), pair("a.many", U64, struct.pack("<Q", 5)),
            pair("a.numbers", ARRAY, numbers), pair("a.texts", ARRAY, texts),
        ],
        entries=[entry("first", (2, 3), 0, 0), entry("second", (4, 64), 8, 32)],
        data=bytes(32 + 4 * 68),
    )  # fmt: skip
    found = read(file, content)
    meta = found.metadata
    assert (meta.integer("a.count"), meta.number("a.eps"), meta.flag("a.on")) == (7, 1e-5, True)
    assert (meta.text("a.name"), meta.integer("a.many")) == ("naïve", 5)
    assert (meta.numbers("a.numbers").tolist(), list(meta.texts("a.texts"))) == ([-1, 0, 7], ["é", ""])
    assert meta.texts("a.texts")[-2:] == ["é", ""]
    first, second = found.tensors
    assert (first.name, first.kind.name, first.shape, first.nbytes) == ("first", "F32", (2, 3), 24)
    assert (second.kind.name, second.shape, second.nbytes, second.offset - first.offset) == ("Q8_0", (4, 64), 272, 32)
    assert found.digest == hashlib.blake2b(content[: found.nbytes]).digest() and found.size == len(content)


def test_a_key_that_is_absent_or_of_another_type_is_named(file: Path) -> None:
    meta = read(file, gguf_files.raw(pairs=[pair("a.count", STRING, text("7"))])).metadata
    assert meta.integer("b", 3) == 3
    with pytest.raises(CheckpointError, match=r"no b in its metadata \(a whole number\)"):
        meta.integer("b")
    with pytest.raises(CheckpointError, match=r"a\.count is a str, not a whole number"):
        meta.integer("a.count")


ONE = [entry("blk.0.attn_q.weight", (4, 32), 8, 0)]
HOSTILE = {
    "tensors": (gguf_files.raw(counts=(1 << 60, 0)), r"1\.15e\+18 tensors"),
    "keys": (gguf_files.raw(counts=(0, 1 << 60)), r"1\.15e\+18 keys"),
    "many tensors": (
        gguf_files.raw(counts=(1 << 17, 0), data=bytes(24 << 17)), "131,072 tensors are there, and at most 65,536 are r"
    ),
    "many keys": (
        gguf_files.raw(counts=(0, 1 << 17), data=bytes(24 << 17)), "131,072 keys are there, and at most 65,536 are read"
    ),
    "key's length": (gguf_files.raw(pairs=[struct.pack("<Q", 1 << 40) + bytes(32)]), r"key 1.*1,099,511,627,776 bytes"),
    "string's length": (
        gguf_files.raw(pairs=[pair("tokenizer.chat_template", STRING, struct.pack("<Q", 1 << 40) + bytes(32))]),
        r"'tokenizer\.chat_template'.*1,099,511,627,776 bytes",
    ),
    "strings": (
        gguf_files.raw(pairs=[pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 1 << 60))]),
        r"'tokenizer\.ggml\.tokens'.*1\.15e\+18 strings",
    ),
    "a string of an array": (
        gguf_files.raw(
            pairs=[pair("t", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + struct.pack("<Q", 1 << 60))]
        ),
        r"'t'.*string 1 needs 1\.15e\+18",
    ),
    "numbers": (
        gguf_files.raw(pairs=[pair("scores", ARRAY, struct.pack("<IQ", F32, 1 << 61))]), r"'scores'.*2\.31e\+18 numbers"
    ),
    "arrays of arrays": (gguf_files.raw(pairs=[pair("deep", ARRAY, struct.pack("<IQ", ARRAY, 9))]), r"'deep'.*arrays"),
    "type of value": (gguf_files.raw(pairs=[pair("odd", 99, b"")]), r"'odd'.*\(99\)"),
    "not UTF-8": (gguf_files.raw(pairs=[pair("name", STRING, text(b"\xff"))]), r"'name'.*UTF-8"),
    "strings not UTF-8": (
        gguf_files.raw(pairs=[pair("names", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))]), r"'names'.*UTF-8"
    ),
    "key twice": (gguf_files.raw(pairs=[pair("a", BOOL, b"\1")] * 2), r"'a'.*twice"),
    "alignment": (
        gguf_files.raw(pairs=[pair("general.alignment", U32, struct.pack("<I", 33))]), r"general\.alignment=33"
    ),
    "dimensions": (gguf_files.raw(entries=[entry("w", (), 0, 0, dimensions=1 << 31)]), r"w: has 2147483648 dimensions"),
    "size": (gguf_files.raw(entries=[entry("w", (1 << 60, 1 << 60), 0, 0)]), r"w: F32 .* ends at byte"),
    "nothing": (gguf_files.raw(entries=[entry("w", (0, 32), 0, 0)]), r"w: its shape \[0, 32\]"),
    "half a block": (gguf_files.raw(entries=[entry("w", (2, 48), 8, 0)]), r"w: its shape \[2, 48\].*\(Q8_0\)"),
    "unknown type": (gguf_files.raw(entries=[entry("w", (2, 256), 77, 0)]), r"w is stored as type 77, which"),
    "a fork's type without its name": (
        gguf_files.raw(entries=[entry("w", (2, 256), 142, 0)]), r"w is stored as type 142, which is unknown"
    ),
    "a fork's type by its keys": (
        gguf_files.raw(
            pairs=[pair("prism.hadamard.block_size", U32, struct.pack("<I", 1024))],
            entries=[entry("w", (2, 256), 143, 0)],
        ),
        r"w is stored as PTQ1_0 \(of Prism ML's llama\.cpp\), which is not read",
    ),
    "a fork's type by the model's name": (
        gguf_files.raw(
            pairs=[pair("general.name", STRING, text("Ternary Bonsai 8B"))], entries=[entry("w", (2, 256), 142, 0)]
        ),
        r"w is stored as PQ2_0 \(of Prism ML's llama\.cpp\), which is not read",
    ),
    "type not read": (gguf_files.raw(entries=[entry("w", (2, 256), 9, 0)]), r"w is stored as Q8_1, which.*IQ2_XXS"),
    "outside": (gguf_files.raw(entries=ONE, data=bytes(100)), r"blk\.0\.attn_q\.weight: Q8_0 \[4, 32\] ends at"),
    "far outside": (gguf_files.raw(entries=[entry("w", (4, 32), 8, 1 << 62)], data=bytes(200)), r"w: Q8_0"),
    "unaligned": (gguf_files.raw(entries=[entry("w", (4, 32), 8, 8)], data=bytes(200)), r"w: begins at 8"),
    "overlapping": (
        gguf_files.raw(entries=[*ONE, entry("other", (4, 32), 8, 32)], data=bytes(400)), r"other: overlaps blk\.0"
    ),
    "tensor twice": (gguf_files.raw(entries=ONE * 2, data=bytes(400)), r"attn_q\.weight: is there twice"),
    "version 1": (gguf_files.raw(version=1), "version 1"),
    "big-endian": (gguf_files.raw(version=3 << 24), "big-endian"),
    "older": (gguf_files.raw(magic=b"tjgg"), "before GGUF"),
    "another": (gguf_files.raw(magic=b"PK\3\4"), "no GGUF file"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull"),
    "empty": (b"", "needs 24 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_refused_and_the_key_or_tensor_is_named(file: Path, what: str) -> None:
    content, message = HOSTILE[what]
    with pytest.raises(CheckpointError, match=message) as caught:
        read(file, content)
    assert len(str(caught.value)) < 500 and "model.gguf" in str(caught.value)


def test_a_sparse_file_does_not_make_long_work_of_its_header(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MAX_HEADER", 1 << 20)
    file.write_bytes(gguf_files.raw(pairs=[pair("t", ARRAY, struct.pack("<IQ", STRING, 1 << 20))]))
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"'t'.*longer than the 1 MiB"):
        read_header(file)


def parts_of(folder: Path, count: int, letters: int, *, tensors: bool = True) -> list[Path]:
    """Parts with a text and, unless they are the names of one file, a tensor each."""
    parts = [folder / f"m-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]
    for number, part in enumerate(parts):
        own = [entry(f"blk.{number}.attn_q.weight", (4, 32), 8, 0)] if tensors else []
        if tensors or not number:
            part.write_bytes(
                gguf_files.raw(pairs=[pair("t", STRING, text("a" * letters))], entries=own, data=bytes(136))
            )
        else:
            part.hardlink_to(parts[0])
    return parts


@pytest.mark.parametrize("tensors", [True, False])
def test_the_parts_of_a_model_share_the_bound_of_one_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: bool
) -> None:
    monkeypatch.setattr(headers, "MAX_HEADER", 1 << 20)
    parts = parts_of(tmp_path, 4, 250_000, tensors=tensors)
    assert len(headers.read_headers(parts[:3])) == 3
    parts = parts_of(tmp_path, 9, 250_000, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"m-00005-of-00009.*the header is longer than"):
        headers.read_headers(parts)


@pytest.mark.parametrize("what", ["MAX_TENSORS", "MAX_KEYS"])
def test_the_parts_of_a_model_share_the_bounds_on_tensors_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(headers, what, 3)
    parts = parts_of(tmp_path, 4, 8)
    assert len(headers.read_headers(parts[:3])) == 3
    with pytest.raises(CheckpointError, match=r"m-00004-of-00004.*4 tensors and 4 keys"):
        headers.read_headers(parts)


def test_a_file_with_the_names_of_many_parts_is_read_twice_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, *others), read, seen = parts_of(tmp_path, 1, 8), headers.read_header, list[Path]()
    for number in range(50):
        others.append(tmp_path / f"link-{number}.gguf")
        others[-1].hardlink_to(first)
    monkeypatch.setattr(
        headers, "read_header", lambda path, *most, **how: seen.append(path) or read(path, *most, **how)
    )
    with pytest.raises(CheckpointError, match=r"link-0.*blk\.0\.attn_q\.weight is in another part"):
        headers.read_headers([first, *others])
    assert len(seen) == 2


GOOD = gguf_files.raw(
    pairs=[
        pair("a", U32, struct.pack("<I", 7)), pair("b", ARRAY, struct.pack("<IQ", STRING, 2) + text("xy") + text("z")),
        pair("c", STRING, text("words")),
    ],
    entries=[entry("first", (2, 32), 0, 0), entry("second", (4, 64), 8, 256)],
    data=bytes(256 + 272),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255), cut=st.integers(0, len(GOOD)))
def test_any_changed_byte_or_cut_is_read_or_refused_with_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "changed.gguf"
    for content in (GOOD[:at] + bytes([value]) + GOOD[at + 1 :], GOOD[:cut]):
        file.unlink(missing_ok=True)
        file.write_bytes(content)
        try:
            found = read_header(file)
        except CheckpointError:
            continue
        assert all(tensor.offset + tensor.nbytes <= len(content) for tensor in found.tensors)


def test_headers_are_exchanged_with_the_gguf_package(file: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the oracle: pip install gguf")
    from rekindle._src.models.loading.gguf.blocks import BY_NAME
    from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf

    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "ü", "c"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    writer.add_tensor("w", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(file)
    meta = found.metadata
    assert (meta.text("general.architecture"), meta.integer("llama.context_length")) == ("llama", 77)
    assert list(meta.texts("tokenizer.ggml.tokens")) == ["a", "ü", "c"]
    assert [(t.name, t.shape, t.nbytes) for t in found.tensors] == [("w", (3, 4), 48)]

    ours = tmp_path / "ours.gguf"
    values = {"general.architecture": "llama", "n": 3, "x": 0.25, "on": True, "names": ["a", "ü"], "far": 1 << 40}
    write_gguf(ours, values, [OutgoingTensor("w", BY_NAME["F32"], (3, 4))], [rows[:1], rows[1:]])
    theirs = gguf.GGUFReader(ours)
    assert {key: theirs.get_field(key).contents() for key in values} == values
    np.testing.assert_array_equal(theirs.tensors[0].data, rows)


@settings(max_examples=100, deadline=None)
@given(
    strings=st.lists(
        st.one_of(
            st.text(max_size=9), st.sampled_from(["", "\0", "a\0\0\0\0\0\0\0\0b", "é" * 64, "x" * 127, "y" * 300])
        ),
        max_size=40,
    ),
    window=st.sampled_from([16, 64, 1 << 20]),
    repeated=st.sampled_from([1, 50]),
)
def test_strings_of_any_length_are_found(strings: list[str], window: int, repeated: int) -> None:
    strings = [one.encode("utf-8", "replace").decode() for one in strings] * repeated
    array = struct.pack("<IQ", STRING, len(strings)) + b"".join(map(text, strings))
    content = gguf_files.raw(pairs=[pair("a.texts", ARRAY, array), pair("a.count", U32, struct.pack("<I", 7))])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(headers, "WINDOW", window)
        patched.setattr(headers, "STEP", window)
        found = read_header(written(Path(folder, "a.gguf"), content)).metadata
        passed = read_header(Path(folder, "a.gguf"), outline=True).metadata
    assert len(passed.texts("a.texts")) == len(strings) and passed.integer("a.count") == 7
    texts = found.texts("a.texts")
    assert [*texts] == strings and found.integer("a.count") == 7
    assert [texts[at] for at in range(len(strings))] == strings


@pytest.mark.parametrize("place", range(4))
def test_a_file_that_ends_within_an_array_of_strings_is_refused(place: int, file: Path) -> None:
    """Wherever the array begins, and whatever is left: a part of a word of the search for strings, too."""
    strings = b"".join(text(f"string {at}") for at in range(4))
    for left in range(12):
        array = pair("k" * (place + 1), ARRAY, struct.pack("<IQ", STRING, 5) + strings + b"x" * left)
        with pytest.raises(CheckpointError):
            read(file, gguf_files.raw(pairs=[array]).rstrip(b"\0"))


def test_a_caller_says_how_long_a_header_it_reads(file: Path) -> None:
    content = gguf_files.raw(pairs=[pair("a.name", STRING, text("x" * 4096))])
    assert read(file, content).metadata.text("a.name") == "x" * 4096
    with pytest.raises(CheckpointError, match="the header is longer than the 0 MiB that are read"):
        read_header(file, 1 << 10)


def test_an_outline_has_everything_but_the_strings_of_arrays(file: Path) -> None:
    """Lists of models took 80 ms for each, nearly all of them for vocabularies."""
    array = struct.pack("<IQ", STRING, 5000) + b"".join(text(f"token {number}") for number in range(5000))
    pairs = [pair("a.texts", ARRAY, array), pair("a.last", U32, struct.pack("<I", 7))]
    entries = [entry(name, (3, 32), 0, 384 * number) for number, name in enumerate("xy")]
    written(file, gguf_files.raw(pairs=pairs, entries=entries, data=bytes(768)))
    outline, whole = read_header(file, outline=True), read_header(file)
    assert [*whole.metadata.texts("a.texts")][-1] == "token 4999" and len(outline.metadata.texts("a.texts")) == 5000
    assert outline.metadata.integer("a.last") == 7 and outline.tensors == whole.tensors
    assert (outline.digest, len(whole.digest)) == (b"", 64)
