"""Nothing that a tokenizer does writes to file descriptors 1 and 2.

In a notebook's kernel both are pipes whose reader is a thread of the same process. The tokenizers library, before 0.23,
wrote hundreds of thousands of characters there while it serialised a vocabulary with holes, and held the GIL: the
kernel stood still for ever.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rekindle
import rekindle_kernels
from helpers import vocabularies
from rekindle._src.text import backends
from rekindle._src.text.encoding_process import EncodingProcess

PACKAGES = [Path(package.__file__).parent for package in (rekindle, rekindle_kernels)]
# The library's ways to write a tokenizer or a model, and those by which pickle does. A file that is saved by another
# method of that name has another receiver.
WRITES = {"to_str", "__getstate__", "__reduce__", "__reduce_ex__"}
SAVED = {"backend", "library", "tokenizer", "_tokenizer", "whole", "pipeline", "model", "original"}


def writing(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value.func if isinstance(node.value, ast.Call) else node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        if node.attr in WRITES or (node.attr == "save" and name in SAVED):
            yield node.lineno, f"{name}.{node.attr}"


def test_nothing_asks_the_library_to_write_a_tokenizer() -> None:
    texts = ((path, path.read_text()) for package in PACKAGES for path in package.rglob("*.py"))
    suspects = [(path, text) for path, text in texts if any(name in text for name in (*WRITES, ".save"))]
    found = [(path, line, what) for path, text in suspects for line, what in writing(ast.parse(text))]
    (section,) = found  # of a step, which has no vocabulary
    assert section[0] == Path(backends.__file__) and section[2] == "step.__getstate__", found


@pytest.mark.parametrize(
    "code", ["self._backend.to_str()", "tokenizer.backend.save(path)", "t.whole().save(path)", "x.model.__getstate__()"]
)
def test_such_calls_are_found(code: str) -> None:
    assert list(writing(ast.parse(code)))


CHILD = """
import logging, sys
from pathlib import Path
from rekindle._src.text import Tokenizer
from rekindle._src.text.gguf.writing import tokenizer_metadata
try:
    import llguidance
    from rekindle._src.structured.grammar import Grammars
    from rekindle._src.structured.spec import Spec
except ImportError:
    Grammars = None

logging.getLogger("rekindle").addHandler(logging.NullHandler())  # its words are for the one who opens
for path in map(Path, sys.argv[1:]):
    tokenizer = Tokenizer.load(path)
    for text in ("x x", "a b " * 3000, "b" * 5000):
        assert tokenizer.decode(tokenizer.encode(text)) == text, (path, text[:9])
    assert tokenizer.characters_per_token >= 1 and tokenizer.decoder_kinds
    if Grammars is not None and path.is_file():
        grammars = Grammars(tokenizer, 31_000)
        grammars.compile(Spec("regex", "[ab]{2}"))  # of a tokenizer.json llguidance takes no ids with holes
        grammars.close()
    assert tokenizer_metadata(tokenizer, 31_000)
"""
HOLES = {"model": {"type": "BPE", "vocab": {"a": 0, "x": 7, "b": 30_000, "Ġ": 30_005, "</s>": 30_007}, "merges": []}}


@pytest.mark.thorough
def test_a_vocabulary_with_holes_is_used_without_a_word_on_descriptors(tmp_path: Path) -> None:
    file = vocabularies.large_file(tmp_path / "large.gguf")
    folder = vocabularies.changed(tmp_path / "holes", HOLES | {"added_tokens": []}, eos_token="</s>")
    unbounded = {"normalizer": {"type": "Replace", "pattern": {"Regex": "(z+)+y"}, "content": "z"}}
    other = vocabularies.changed(tmp_path / "unbounded", HOLES | unbounded | {"added_tokens": []}, eos_token="</s>")
    command = [sys.executable, "-W", "error", "-c", CHILD, *map(str, (file, folder, other))]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "", "REKINDLE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=300, check=False)
    assert (done.returncode, done.stdout[-2000:], done.stderr[-2000:]) == (0, b"", b"")


MERGED = """
import sys
from pathlib import Path
from rekindle._src.text import Tokenizer
from rekindle.errors import CheckpointError

for path in map(Path, sys.argv[1:]):
    try:
        Tokenizer.load(path)
    except CheckpointError as error:
        assert "continuing_subword_prefix" in str(error), error
    else:
        assert path.name == "right", path
"""


def test_a_merge_over_which_the_library_panics_is_refused_without_a_word(tmp_path: Path) -> None:
    """A panic is an error, and a line on descriptor 2."""
    vocabulary = {"a": 0, "b": 1, "##b": 2, "ab": 3, "</s>": 4}
    folders = []
    for name, merge in (("right", ["a", "##b"]), ("short", ["a", "b"]), ("text", "a b")):
        model = {"type": "BPE", "vocab": vocabulary, "merges": [merge], "continuing_subword_prefix": "##"}
        folders.append(vocabularies.changed(tmp_path / name, {"model": model, "added_tokens": []}, eos_token="</s>"))
    content = (folders[1] / "tokenizer.json").read_text()
    assert "continuing_subword_prefix" in content
    (tmp_path / "escaped").mkdir()
    (tmp_path / "escaped" / "tokenizer.json").write_text(
        content.replace("continuing_subword_prefix", "continuing\\u005Fsubword\\u005fprefix")
    )
    command = [sys.executable, "-c", MERGED, *map(str, folders), str(tmp_path / "escaped")]
    environment = {**os.environ, "REKINDLE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=300, check=False)
    assert (done.returncode, done.stdout[-2000:], done.stderr[-2000:]) == (0, b"", b"")


NOISY = """
import array, os
class Tokenizer:
    @classmethod
    def from_buffer(cls, content):
        os.write(1, b"contains holes" * 9999)
        return cls()
    def encode(self, text, add_special_tokens):
        os.write(1, b"x" * 99999)
        os.write(2, b"x" * 99999)
        self.ids = [len(text)]
        return self
"""


def test_the_process_that_encodes_takes_no_prints_for_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizers.py").write_text(NOISY)
    monkeypatch.syspath_prepend(str(tmp_path))
    process = EncodingProcess(lambda: b"{}")
    try:
        assert [process.encode("a" * length, False) for length in (3, 5)] == [[3], [5]]
    finally:
        process.close()
