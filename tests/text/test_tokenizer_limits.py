"""A tokenizer of a stranger costs what its size suggests, while it opens and for each text."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import rekindle
from helpers import vocabularies
from helpers.thorough import by_default, trio_in_ci
from rekindle import tiny
from rekindle._src.models.loading.gguf.export import write_gguf
from rekindle._src.text import Tokenizer, encoding_process, tokenizer_limits
from rekindle._src.text.backends import TokenizerSections
from rekindle._src.text.tokenizer_limits import PRE_TOKENIZERS
from rekindle.errors import CheckpointError, RequestFailed

BACKTRACKS = r"(a+)+b"


def described(**parts: Any) -> dict[str, Any]:
    return json.loads(vocabularies.byte_level().to_str()) | parts


def opened(folder: Path, content: dict[str, Any] | bytes) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return Tokenizer.load(folder)


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def unigram(pieces: list[str]) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": 0,
        "byte_fallback": False,
        "vocab": [["<unk>", 0.0], *([p, -1.0] for p in pieces)],
    }


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"pre_tokenizer": split("|".join(f"x{i}" for i in range(2000)))}, "a string of 10,889 bytes"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("a")] * 100}}, "100 regexes"),
        ({"model": unigram(["a" * 100_000])}, "a string of 100,000 bytes"),  # a million of which end the process
        ({"model": unigram([f"{i:01000}" for i in range(2000)])}, "unigram vocabulary of 2,0"),
        (
            {"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}},
            "decoder has steps that make up to 1,000 characters of one",
        ),
        (
            {"decoder": {"type": "Replace", "pattern": {"Regex": BACKTRACKS}, "content": "a"}},
            "decoder has a Replace that is not known to be bounded",
        ),
    ],
)
def test_what_would_cost_gigabytes_to_open_is_refused(parts: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem):
        opened(tmp_path, described(**parts))


@pytest.mark.parametrize("part", [b'"a",', b'\\"'])
def test_more_strings_than_a_tokenizer_has_are_refused_before_they_are_measured(part: bytes) -> None:
    """A vocabulary of short tokens took 20 times its file's size; of quotes, measuring them alone took as much."""
    content = b'["' + part * (2 * tokenizer_limits.MAX_STRINGS // part.count(b'"')) + b'"]'
    with pytest.raises(CheckpointError, match="has more than 4,194,304 strings"):
        tokenizer_limits.check_file(content, "tokenizer.json")


def test_a_key_can_not_be_hidden_from_the_measure(tmp_path: Path) -> None:
    hidden = json.dumps(described(model=unigram(["a" * 2000]))).replace('"Unigram"', '"\\u0055nigram"')
    with pytest.raises(CheckpointError, match="writes letters as escapes"):
        opened(tmp_path, hidden.encode())
    quotes = described(model=unigram(['"' * 2000]))
    with pytest.raises(CheckpointError, match="a string of 4,000 bytes"):
        opened(tmp_path, quotes)
    vocab = {"\\u0041": 0, '\\"': 1, "\x7f": 2, "Regex": 3, "a": 4}
    plain = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None}
    assert opened(tmp_path, described(model=plain, added_tokens=[])).token(0) == "\\u0041"


def pieces_file(path: Path, tokens: list[str], *, control: int = 0) -> Path:
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32)}  # fmt: skip
    if control:
        kinds = np.repeat(np.int32([1, 3]), [len(tokens) - control, control])
        metadata |= {"tokenizer.ggml.token_type": kinds}
    write_gguf(path, metadata, [], [])
    return path


def test_copies_of_a_piece_are_cut_once_and_pieces_of_pieces_are_refused(tmp_path: Path) -> None:
    few = ["<unk>", *("a" * length for length in range(1, 65))]
    once = Tokenizer.load(pieces_file(tmp_path / "once.gguf", few))
    copies = Tokenizer.load(pieces_file(tmp_path / "copies.gguf", [*few, *["a" * 64] * 10_000]))
    assert (
        json.loads(copies.backend.to_str())["model"]["merges"] == json.loads(once.backend.to_str())["model"]["merges"]
    )
    assert copies.encode("a" * 100) == once.encode("a" * 100)
    all_cuts = ["<unk>", *("a" * length for length in range(1, 513)), "b"]
    with pytest.raises(CheckpointError, match="too many ways: more than 65,536 merges"):
        Tokenizer.load(pieces_file(tmp_path / "cuts.gguf", all_cuts))
    text = "".join(np.random.default_rng(0).choice(["a", "b"], 300))
    parts = dict.fromkeys(text[i:j] for i in range(300) for j in range(i + 1, 301))
    with pytest.raises(CheckpointError, match=r"too many ways: [0-9,]+ characters to cut"):
        Tokenizer.load(pieces_file(tmp_path / "parts.gguf", ["<unk>", *parts]))


@pytest.mark.parametrize(("longest", "apart"), [(100, False), (200, True)])
def test_unigram_pieces_that_begin_with_each_other_encode_apart(tmp_path: Path, longest: int, apart: bool) -> None:
    """As many pieces as the longest has characters match at each place of a text: 164 µs a character with 999."""
    pieces = [("<unk>", 0.0), *(("a" * count, -1.0 - count / 1000) for count in range(1, longest + 1))]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    reason = tokenizer_limits.unbounded_part(TokenizerSections.of(made))
    assert (reason is not None) == apart and (not apart or f"pieces of {longest} characters" in str(reason))
    made.save(str(tmp_path / "tokenizer.json"))
    read = Tokenizer.load(tmp_path)
    assert read.encodes_apart == apart
    assert sum(len(made.id_to_token(token)) for token in read.encode("a" * 500)) == 500


def test_tokenizers_in_use_encode_in_this_process(tmp_path: Path) -> None:
    made = vocabularies.byte_level()
    for pre in PRE_TOKENIZERS.values():
        made.pre_tokenizer = pre.pre_tokenizer()
        assert tokenizer_limits.unbounded_part(TokenizerSections.of(made)) is None, pre
    for kind in vocabularies.KINDS.values():
        assert tokenizer_limits.unbounded_part(TokenizerSections.of(kind())) is None
    assert not Tokenizer.load(tiny.folder()).encodes_apart
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(" ", "▁"),
                                            normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])  # fmt: skip
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
            for regex in (r"\p{N}{1,3}", r"[一-龥]+", r"[^\s\w]", r"\d")
        ]
    )
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(single="a $A", pair="a $A $B", special_tokens=[("a", 0)]),
        ]
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert tokenizer_limits.unbounded_part(TokenizerSections.of(made)) is None
    tokenizer_limits.check_decoder(TokenizerSections.of(made), "here")


def test_a_class_of_characters_is_recognized_in_one_pass(tmp_path: Path) -> None:
    """With a pattern for patterns, this one took twice the time for each further letter."""
    classes = (r"[^\s\p{L}]", r"\p{N}{1,3}", "[一-龥]+", r"\d", r"\P{^Lu}?", "a", r"\-*", r"[\]\[]{2,}", "[^^]")
    assert [regex for regex in classes if not tokenizer_limits.is_one_class(regex)] == []
    others = (
        "", "[", "[]", "[^]", "[a", "[a]b", "[a[b]]", "[a&&b]", "(a)", "ab", r"\p{", r"\p{}", r"\q", "a{", "a{}",
        "a{1,2", "a**", "a|b", "^", "$", ".", "a{17}", "a{100000,}", "a{3,2}", f"a{{1,{'9' * 5000}}}"
    )  # fmt: skip
    assert [regex for regex in others if tokenizer_limits.is_one_class(regex)] == []
    for regex in ("a{100000}", r"[^\n]{4000,}"):  # looked at anew from each character: 40,000 took seven seconds
        assert opened(tmp_path, described(pre_tokenizer=split(regex))).encodes_apart, regex
    hostile = "[" + r"\p{L}" * 600 + "]x"
    assert opened(tmp_path, described(pre_tokenizer=split(hostile))).encodes_apart


def test_pieces_of_no_characters_end_no_process_and_print_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = opened(tmp_path, described(pre_tokenizer={"type": "FixedLength", "length": 0}))
    with pytest.raises(RequestFailed, match="chunk size must be non-zero"):
        tokenizer.encode("text")
    assert "panicked" not in capfd.readouterr().err


def long_tokens(count: int) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": 1000 + number, "content": f"{number:04}".ljust(4000, "x"), **flags} for number in range(count)]


@pytest.mark.parametrize("place", ["tokenizer.json", "tokenizer_config.json", "GGUF"])
def test_added_tokens_that_would_take_gigabytes_to_find_are_refused(place: str, tmp_path: Path) -> None:
    """A file of 19 MB took 14 seconds of a processor and 1.6 GB."""
    folder, tokens, own = tmp_path, long_tokens(600), described(added_tokens=[])
    if place == "tokenizer.json":
        own = described(added_tokens=tokens)
    elif place == "tokenizer_config.json":
        size = opened(folder, own).vocab_size
        listed = {str(size + at): {"content": token["content"]} for at, token in enumerate(tokens)}
        (folder / place).write_text(json.dumps({"added_tokens_decoder": listed}))
    else:
        folder = pieces_file(
            folder / "model.gguf", ["<unk>", "a", *(token["content"] for token in tokens)], control=600
        )
    (tmp_path / "tokenizer.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match=r"600 added tokens of 2,400,000 bytes, and at most 2,106,752"):
        Tokenizer.load(folder)


def test_a_table_that_calls_itself_larger_than_it_is_allocates_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library allocated the eight gigabytes, or ended the process."""
    table = base64.b64encode(b"\xff" * 4096).decode()
    with pytest.raises(CheckpointError, match=r"a table of 4,294,967,295 bytes"):
        opened(tmp_path, described(normalizer={"type": "Precompiled", "precompiled_charsmap": table}))
    assert "panicked" not in capfd.readouterr().err


doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
COSTLY = {
    "a regex that backtracks": {"pre_tokenizer": split(BACKTRACKS)},
    "texts doubled thirty times": {"normalizer": {"type": "Sequence", "normalizers": [doubling] * 30}},
    "a text repeated by its template": {
        "post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 20_000,
                           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                           "special_tokens": {}},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", by_default(COSTLY))
def test_a_costly_text_fails_alone_and_others_are_encoded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_process, "SECONDS", 2.0)
    monkeypatch.setattr(encoding_process, "MEMORY", 256 << 20)
    tokenizer = opened(tmp_path, described(added_tokens=[], **COSTLY[case]))
    assert tokenizer.encodes_apart
    if "template" not in case:
        assert tokenizer.encode("xyz") == tokenizer.backend.encode("xyz").ids
    for text in ("a" * 23 + "x" + "a" * 23, "a" * 60):
        with pytest.raises(RequestFailed, match=r"could not be encoded: (it took|the tokenizers library)"):
            tokenizer.encode(text * 40)
    if "template" not in case:
        assert tokenizer.encode("xyz") == tokenizer.backend.encode("xyz").ids


def with_jobs(folder: Path, jobs: str, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Return a tokenizer with a guard that does these jobs instead of encoding."""
    path = folder / "jobs.py"
    path.write_text(jobs)
    monkeypatch.setattr(encoding_process, "encoding_jobs", SimpleNamespace(__file__=str(path)))
    tokenizer = opened(folder / "model", described(pre_tokenizer=split(BACKTRACKS)))
    assert tokenizer.encodes_apart
    return tokenizer


def test_a_process_that_does_not_start_in_time_blames_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle._src.core.guard.START_SECONDS", 0.1)
    jobs = "import threading\ndef prepare(settings):\n    threading.Event().wait()\n"
    tokenizer = with_jobs(tmp_path, jobs, monkeypatch)
    with pytest.raises(RequestFailed, match=r"process for it did not start within 60 s\. .*send the request again"):
        tokenizer.encode("xyz")


NO_IDS = ("{'ids': ['1']}", "{}", "{'ids': 7}", "{'ids': [-1]}", "{'ids': [1 << 31]}", "{'failed': 7}")


@pytest.mark.parametrize("answer", by_default(NO_IDS))
def test_an_answer_without_token_ids_ends_its_process(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may have overrun the process, which then answers as it likes."""
    jobs = f"def prepare(settings):\n    return lambda job: {answer} if job['text'] else {{'ids': [3, 0]}}\n"
    tokenizer = with_jobs(tmp_path, jobs, monkeypatch)
    assert tokenizer.encode("") == [3, 0]
    with pytest.raises(RequestFailed, match=r"it took too much memory, or ended its process"):
        tokenizer.encode("xyz")
    assert tokenizer.encode("") == [3, 0]


@pytest.mark.thorough
@trio_in_ci
@pytest.mark.anyio
async def test_a_neighbours_stream_goes_on_while_a_text_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_process, "SECONDS", 3.0)
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder(), folder)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    steps = [{"type": "Replace", "pattern": {"String": "\x01"}, "content": "\x01\x01"}] * 30
    content["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    failed, before = anyio.Event(), 0
    async with rekindle.open(folder, quiet=True, max_model_len=512) as session:

        async def costly() -> None:
            with pytest.raises(RequestFailed, match="could not be encoded"):
                await session.generate("\x01" * 20, max_tokens=2)
            failed.set()

        async with anyio.create_task_group() as group:
            async for _ in session.stream("Once upon a time", max_tokens=400, ignore_eos=True):
                if not before:
                    group.start_soon(costly)
                if failed.is_set():
                    break
                before += 1
        assert before > 1
        assert (await session.generate("Once upon a time", max_tokens=2)).text
