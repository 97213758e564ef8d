"""Tokenizers out of a GGUF file's metadata give the ids that the original of the same vocabulary gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from helpers import checkpoints, gguf_files
from helpers.thorough import by_default
from helpers.vocabularies import over
from rekindle import tiny
from rekindle._src.core.records import mask_words
from rekindle._src.models.loading.checkpoint import inspect
from rekindle._src.models.loading.gguf.export import write_gguf
from rekindle._src.models.loading.gguf.header import read_header
from rekindle._src.structured import compile_worker
from rekindle._src.text import ChatTemplate, Tokenizer
from rekindle._src.text.gguf import reading, token_table
from rekindle._src.text.gguf.reading import PartialTokenizer
from rekindle._src.text.gguf.vocabulary import HUGGINGFACE, TokenizerRecipe
from rekindle._src.text.gguf.writing import pre_tokenizer_name, tokenizer_metadata
from rekindle._src.text.tokenizer import LONG_TEXT
from rekindle._src.text.tokenizer_limits import PRE_TOKENIZERS
from rekindle.errors import CheckpointError, UnsupportedModel

TEXTS = (
    "Once upon a time there were 3 bears, 33 wolves and 12345 owls; they didn't mind.",
    "hällo WÖRLD, you'Ll SEE: 你好世界, こんにちは, नमस्ते ٣٤٥ ½²Ⅷ",
    "  leading,   many    spaces \t tabs\n\n\nlines\r\n  and the end  ",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈, combining é ñ, CamelCaseHTTPServer/path/to\\file_name.py",
    "<|im_start|>user\nhi<|im_end|><s>x</s>", "", " ", "a",
)  # fmt: skip
CORPUS = [text * 3 for text in TEXTS] + ["the cat sat on the mat", "a b c 1 22 333 4444 don't won't"] * 20
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# The pre-tokenizers and normalizers of the published tokenizer.json files.
ORIGINALS: dict[str, tuple[Any, Any, bool]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
    "smollm": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        None,
        False,
    ),
    "llama-bpe": (
        split(
            CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        None,
        True,
    ),
    "qwen2": (
        split(CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        normalizers.NFC(),
        False,
    ),
    "gpt-4o": (
        split(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        None,
        False,
    ),
}


@functools.cache
def byte_level(name: str) -> tokenizers.Tokenizer:
    """A small vocabulary that was trained with one of the published ways to split words."""
    pre, normalizer, whole = ORIGINALS[name]
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=whole))
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(SPECIAL)
    made.add_tokens(["two words", "<think>"])
    return made


@functools.cache
def pieces(prefix: bool = True) -> tokenizers.Tokenizer:
    """A vocabulary like Llama 2's (with `prefix`) or Gemma's."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    ahead = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*ahead, normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only: pieces are words
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        CORPUS[-40:], trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    model = made.model
    bare = tokenizers.Tokenizer(model)
    bare.normalizer = made.normalizer
    ending = [decoders.Strip(" ", 1, 0)] if prefix else []
    bare.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ending])
    bare.add_special_tokens(["<unk>", "<s>", "</s>"])
    bare.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return bare


def unigrams() -> tokenizers.Tokenizer:
    words = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.0), ("▁cat", -1.5), ("▁ca", -3.0), ("t", -2.5), ("s", -2.0)]
    made = tokenizers.Tokenizer(models.Unigram(words, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<unk>"])
    return made


MADE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **{name: functools.partial(byte_level, name) for name in ORIGINALS},
    "SentencePiece": pieces, "SentencePiece without prefix": functools.partial(pieces, False), "unigrams": unigrams,
}  # fmt: skip
UNLIKE = ("gpt-2", "qwen2", "SentencePiece", "unigrams")  # in how they split words


def through_a_file(original: tokenizers.Tokenizer, path: Path, *, json: bool = False, **changes: Any) -> Tokenizer:
    """The tokenizer that is read of the file that it was written to, by llama.cpp's keys or by tokenizer.json."""
    special = {name: text for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))
               if original.token_to_id(text) is not None}  # fmt: skip
    metadata = tokenizer_metadata(over(original, special=special), original.get_vocab_size() + 3) | changes
    if not json:
        metadata.pop(HUGGINGFACE, None)
    write_gguf(path, {"general.architecture": "llama"} | metadata, [], [])
    return Tokenizer.load(path)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("json", [False, True], ids=["llama.cpp's keys", "tokenizer.json"])
def test_the_ids_are_those_of_the_original(kind: str, json: bool, tmp_path: Path) -> None:
    original = MADE[kind]()
    found = through_a_file(original, tmp_path / "model.gguf", json=json)
    for text in TEXTS:
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special) == ids, (text, special)
            for skip in (True, False):
                assert found.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)
    assert found.special_ids == {i for i, t in original.get_added_tokens_decoder().items() if t.special}


@pytest.fixture(scope="module", params=by_default(MADE, lambda kind: kind in UNLIKE))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    original = MADE[request.param]()
    return original, through_a_file(original, tmp_path_factory.mktemp("file") / "model.gguf")


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n'0123456789aAtThHeE▁.")), max_size=40))
def test_any_text_has_the_ids_of_the_original(pair: tuple[tokenizers.Tokenizer, Tokenizer], text: str) -> None:
    original, found = pair
    assert found.encode(text) == original.encode(text).ids


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_way_to_split_words_gets_llama_cpps_name(name: str) -> None:
    assert pre_tokenizer_name(byte_level(name), whole_words=byte_level(name).model.ignore_merges) == name


def test_one_without_a_name_is_written_all_the_same_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = tokenizers.Tokenizer.from_str(byte_level("gpt-2").to_str())
    odd.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = through_a_file(odd, tmp_path / "model.gguf", json=True)
    assert "no name for how this tokenizer splits words" in caplog.text
    assert found.encode(TEXTS[0]) == odd.encode(TEXTS[0]).ids


def test_an_unknown_pre_tokenizer_or_model_is_named(tmp_path: Path) -> None:
    for key, value in (("tokenizer.ggml.pre", "brand-new"), ("tokenizer.ggml.model", "rwkv")):
        with pytest.raises(
            UnsupportedModel, match=rf"{key.replace('.', '[.]')}='{value}' is not implemented"
        ) as caught:
            through_a_file(byte_level("qwen2"), tmp_path / f"{value}.gguf", **{key: value})
        assert ("llama-bpe" in str(caught.value)) == (value == "brand-new")


def test_tokens_around_a_text_are_as_the_file_says(tmp_path: Path) -> None:
    original = byte_level("llama-bpe")
    bos, eos = original.token_to_id("<s>"), original.token_to_id("</s>")
    bare = original.encode("a", add_special_tokens=False).ids
    key = "tokenizer.ggml.add_{}_token"
    for number, (first, last) in enumerate([(False, False), (True, False), (False, True), (True, True)]):
        flags = {key.format("bos"): first, key.format("eos"): last}
        found = through_a_file(original, tmp_path / f"{number}.gguf", **flags)
        assert found.encode("a") == [*([bos] if first else []), *bare, *([eos] if last else [])]
        assert found.bos_id == bos and eos in found.eos_ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.merges": ["ab"]}, "merges has 'ab'"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "makes no tokenizer"),
        ({"tokenizer.ggml.token_type": np.ones(3, np.int32)}, r"token_type has 3 entries"),
        ({"tokenizer.ggml.tokens": np.ones(3, np.int32)}, r"tokens is .*not an array of strings"),
    ],
)
def test_vocabularies_that_can_not_be_are_typed_errors(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        through_a_file(byte_level("gpt-2"), tmp_path / "model.gguf", **changes)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.ggml\.scores|scores has 1 entries"):
        through_a_file(pieces(), tmp_path / "other.gguf", **{"tokenizer.ggml.scores": np.ones(1, np.float32)})


def test_the_embedded_model_both_ways(tmp_path: Path) -> None:
    original = Tokenizer.load(tiny.folder())
    metadata = tokenizer_metadata(original, 2048)
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    for json in (True, False):
        kept = metadata if json else {key: value for key, value in metadata.items() if key != HUGGINGFACE}
        write_gguf(tmp_path / f"{json}.gguf", {"general.architecture": "llama"} | kept, [], [])
        found = Tokenizer.load(tmp_path / f"{json}.gguf")
        texts = [text for text in TEXTS if json or "½" not in text]  # digits of other scripts it splits in its own way
        for text in texts:
            assert found.encode(text) == original.encode(text)
            assert found.decode(original.encode(text)) == original.decode(original.encode(text))
        assert found.special["eos_token"] == original.special["eos_token"]
        assert set(found.eos_ids) == set(original.eos_ids) and found.eos_ids[0] == original.backend.token_to_id(
            "<|im_end|>"
        )
        assert found.vocab_size == original.vocab_size


def test_a_file_is_known_by_its_first_bytes_where_its_name_does_not_tell(tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123abcd"  # as in Ollama's store
    metadata = tokenizer_metadata(Tokenizer.load(tiny.folder()), 2048)
    write_gguf(blob, {"general.architecture": "llama", "tokenizer.chat_template": "hi"} | metadata, [], [])
    assert Tokenizer.load(blob).vocab_size == 2048 and ChatTemplate.load(blob) is not None
    folder = checkpoints.write(tmp_path / "folder", checkpoints.CASES["qwen3"])
    gguf_files.convert(folder, tmp_path / "model.gguf").rename(blob)
    assert inspect(blob).config.model_type == "qwen3"
    blob.write_bytes(b"GGU")
    with pytest.raises(CheckpointError, match="0123abcd is a file"):
        inspect(blob)


def test_a_file_without_a_vocabulary_serves_ids(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama", "tokenizer.ggml.eos_token_id": 7}, [], [])
    found = Tokenizer.load(tmp_path / "a.gguf")
    assert not found.has_text and found.eos_ids == (7,)
    with pytest.raises(CheckpointError, match=r"a\.gguf has no"):
        found.encode("a")


def test_templates_and_the_tokens_that_they_write(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama", "tokenizer.ggml.tokens": ["<s>", "</s>"], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "tools: {{ messages[0].content }}",
    }  # fmt: skip
    write_gguf(tmp_path / "a.gguf", metadata, [], [])
    template = ChatTemplate.load(tmp_path / "a.gguf")
    assert template is not None and set(template.templates) == {"default", "tool_use"}
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert template.render([{"role": "user", "content": "hi"}], tools=[]) == "tools: hi"
    write_gguf(tmp_path / "b.gguf", {"general.architecture": "llama"}, [], [])
    assert ChatTemplate.load(tmp_path / "b.gguf") is None


def test_every_name_makes_a_pre_tokenizer() -> None:
    for name, pre in PRE_TOKENIZERS.items():
        words = [word for word, _ in pre.pre_tokenizer().pre_tokenize_str("it's 12 o'clock\n\n")]
        assert "".join(words).replace("Ġ", " ").replace("Ċ", "\n") == "it's 12 o'clock\n\n", name


@pytest.mark.parametrize("name", ["bailingmoe", "bailingmoe2"])
def test_files_of_ling_split_words_as_its_tokenizer(name: str) -> None:
    pieces = PRE_TOKENIZERS[name].pre_tokenizer().pre_tokenize_str("We'Ll pay 12,50 %.\r\n\n  x")
    words = [word.replace("Ġ", " ").replace("Ċ", "\n").replace("č", "\r") for word, _ in pieces]
    assert words == ["We", "'Ll", " pay", " ", "1", "2", ",", "5", "0", " %.\r\n\n", " ", " x"]


def test_a_large_vocabulary_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SMALL", 0)
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))
    file, original = tmp_path / "model.gguf", byte_level("qwen2")
    first = through_a_file(original, file).backend
    made = [*(tmp_path / "cache" / "tokenizers").iterdir()]
    assert len(made) == 2, "the tokenizer, and the table of its tokens"
    with monkeypatch.context() as patched:
        patched.setattr(TokenizerRecipe, "whole", None)
        patched.setattr(token_table, "_hashed", None)
        again = Tokenizer.load(file).backend
    for text in TEXTS:
        assert again.encode(text).ids == first.encode(text).ids == original.encode(text).ids
    for damaged in made:
        damaged.write_bytes(b"{}")
    assert Tokenizer.load(file).backend.encode(TEXTS[0]).ids == original.encode(TEXTS[0]).ids
    other = through_a_file(byte_level("gpt-2"), tmp_path / "other.gguf").backend
    assert other.encode(TEXTS[0]).ids == byte_level("gpt-2").encode(TEXTS[0]).ids


def test_a_flipped_bit_in_a_kept_tokenizer_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stayed JSON, and another text came out of the same tokens."""
    monkeypatch.setattr(reading, "SMALL", 0)
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))
    file, original = tmp_path / "model.gguf", byte_level("qwen2")
    ids = original.encode("two words").ids
    assert through_a_file(original, file).backend.decode(ids) == "two words"
    (kept,) = (one for one in (tmp_path / "cache" / "tokenizers").iterdir() if b"added_tokens" in one.read_bytes())
    whole = kept.read_bytes()
    places = [at for at in range(len(whole)) if whole[at : at + 1].isalpha()]
    for at in places[:: max(1, len(places) // 20)]:
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert Tokenizer.load(file).backend.decode(ids) == "two words"
        assert kept.read_bytes() == whole, "it is made again"
    assert "is damaged" in caplog.text


MERGING = [name for name in MADE if name != "unigrams"]


@pytest.mark.parametrize("kind", MERGING)
def test_text_needs_parts_of_a_vocabulary_alone(kind: str, tmp_path: Path) -> None:
    original = MADE[kind]()
    found = through_a_file(original, tmp_path / "model.gguf")
    for text in (*TEXTS, "<think>two words<s> twotwo words", "x" * LONG_TEXT):
        ids = original.encode(text).ids
        assert found.encode(text) == ids
        assert found.decode(ids) == original.decode(ids)
    tokens = original.get_vocab(with_added_tokens=True)
    assert all(found.token(index) == token for token, index in tokens.items())
    size, characters = found.vocab_size, found.characters_per_token
    assert isinstance(found._backend, PartialTokenizer) and found._backend._whole is None
    assert found.backend.get_vocab_size() == size
    assert over(found.backend).characters_per_token == characters
    assert found.encode(TEXTS[0]) == original.encode(TEXTS[0]).ids


@pytest.mark.parametrize("kind", MERGING)
def test_grammars_read_the_tokens_without_a_tokenizer_of_all(kind: str, tmp_path: Path) -> None:
    """llguidance has the same masks and the same forced tokens as with the JSON of the whole tokenizer."""
    llguidance = pytest.importorskip("llguidance", reason="the extra `structured`")
    assert llguidance
    found = through_a_file(MADE[kind](), tmp_path / "model.gguf")
    spelled, size = found.spelled(), found.vocab_size
    if spelled is None:
        assert kind == "SentencePiece", "whose first word begins with a space"
        return
    assert isinstance(found._backend, PartialTokenizer) and found._backend._whole is None
    described = compile_worker.tokens_message(*spelled)
    own = compile_worker.new_tokenizer(described, size, [1], lambda text: found.encode(text, add_special_tokens=False))
    whole = compile_worker.new_tokenizer(found.backend.to_str(), size, [1])
    assert [own.decode_bytes([one]) for one in range(size)] == [whole.decode_bytes([one]) for one in range(size)]
    for kind_of, text in (("schema", '{"enum": ["two words", "the ümlaut"]}'), ("regex", "[a-z ]{3,9}é")):
        grammar = compile_worker.grammar_text(kind_of, text)
        pair = [compile_worker.new_matcher(one, grammar) for one in (own, whole)]
        for _ in range(12):
            masks = np.zeros((2, mask_words(size)), np.int32)
            for mask, matcher in zip(masks, pair, strict=True):
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            forced, other = (matcher.compute_ff_tokens() for matcher in pair)
            assert (masks[0] == masks[1]).all() and forced == other
            allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
            token = forced[0] if forced else int(allowed[0])
            went_on = [matcher.consume_token(token) for matcher in pair]
            if went_on != [True, True] or pair[0].is_stopped():
                break


@pytest.mark.parametrize("kind", ["qwen2", "SentencePiece"])
def test_parts_that_grow_and_begin_anew_give_the_same_ids(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_SPENT", 0)
    original, few = MADE[kind](), through_a_file(MADE[kind](), tmp_path / "a.gguf")
    monkeypatch.setattr(reading, "MOST", len(few._backend._part.ids) + 30)  # type: ignore[union-attr]
    words = [word for text in TEXTS for word in text.split()]
    for at in range(len(words) * 2):
        text = " ".join(words[at % len(words) : at % len(words) + 5])
        assert few.encode(text) == original.encode(text).ids, text


def test_what_is_composed_with_the_end_of_a_special_token(tmp_path: Path) -> None:
    original = byte_level("qwen2")
    found = through_a_file(original, tmp_path / "model.gguf")
    for text in ("<s>\u0338 e\u0301", "a<|im_end|>\u0338x", "e\u0301 <s>", "x \u0301"):  # ">\u0338" is "≯"
        assert found.encode(text) == original.encode(text).ids


def test_of_tokens_with_one_text_the_first_is_meant(tmp_path: Path) -> None:
    original = byte_level("gpt-2")
    path = tmp_path / "model.gguf"
    through_a_file(original, path)
    tokens = [*read_header(path).metadata.texts("tokenizer.ggml.tokens")]
    again = [tokens.index("the"), tokens.index("a"), tokens.index("the")]
    found = through_a_file(
        original, tmp_path / "again.gguf", **{"tokenizer.ggml.tokens": [*tokens, "the", "a", "the"],
        "tokenizer.ggml.token_type": np.ones(len(tokens) + 3, np.int32)}
    )  # fmt: skip
    assert [found.token(len(tokens) + at) for at in range(3)] == [None] * 3 and again[0] == again[2]
    assert found.vocab_size == len(tokens) == found.backend.get_vocab_size()
    for text in ("the cat sat", "a b"):
        assert found.encode(text) == original.encode(text).ids == found.backend.encode(text).ids


def test_pieces_that_spell_an_unknown_byte_are_merged_as_in_the_whole(tmp_path: Path) -> None:
    tokens = ["<unk>", "a", "<0x41>", "<0x41>a", "a<unk>", "aa"]
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": np.zeros(6, np.float32), "tokenizer.ggml.add_space_prefix": False,
                "tokenizer.ggml.token_type": np.array([2, 1, 6, 1, 1, 1], np.int32)}  # fmt: skip
    write_gguf(tmp_path / "a.gguf", metadata, [], [])
    found = Tokenizer.load(tmp_path / "a.gguf")
    for text in ("Aa", "aab", "AAaab", "<0x41>a"):
        assert found.encode(text) == found.backend.encode(text).ids


def test_a_piece_of_a_million_characters_costs_no_time(tmp_path: Path) -> None:
    tokens = ["<unk>", "a", "aa", "a" * 1_000_000]
    scores = np.array([0, -1, -2, -3], np.float32)
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": False}  # fmt: skip
    write_gguf(tmp_path / "a.gguf", metadata, [], [])
    assert Tokenizer.load(tmp_path / "a.gguf").encode("aaa") == [2, 1]


def test_an_old_file_that_names_no_pre_tokenizer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = tokenizer_metadata(over(byte_level("gpt-2")), 600)
    for key in (HUGGINGFACE, "tokenizer.ggml.pre"):
        del metadata[key]
    write_gguf(tmp_path / "old.gguf", {"general.architecture": "llama"} | metadata, [], [])
    assert Tokenizer.load(tmp_path / "old.gguf").encode("a cat") == byte_level("gpt-2").encode("a cat").ids
    assert "does not say how text is split into words" in caplog.text


@pytest.mark.parametrize("harmony", [True, False])
def test_the_end_of_a_message_is_no_end_in_harmony(harmony: bool, tmp_path: Path) -> None:
    """llama.cpp takes `<|end|>` for the end of a turn, except in vocabularies that also have these two."""
    original = tokenizers.Tokenizer.from_str(byte_level("gpt-4o").to_str())
    ends = ["<|return|>", "<|call|>"] if harmony else ["<|return|>"]
    original.add_special_tokens([*ends, "<|end|>"])
    found = through_a_file(original, tmp_path / "model.gguf")
    ids = {text: original.token_to_id(text) for text in (*ends, "<|end|>")}
    if harmony:
        assert {ids["<|return|>"], ids["<|call|>"]} <= set(found.eos_ids) and ids["<|end|>"] not in found.eos_ids
    else:
        assert ids["<|end|>"] in found.eos_ids and ids["<|return|>"] not in found.eos_ids
