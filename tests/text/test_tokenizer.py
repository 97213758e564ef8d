"""A folder's tokenizer files become one object with the ids that begin and end a sequence."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers

from helpers import vocabularies
from rekindle._src.text import Tokenizer
from rekindle._src.text.tokenizer import LONG_TEXT
from rekindle._src.text.tokenizer_limits import is_panic, panics_as
from rekindle.errors import CheckpointError, RequestFailed


def put(folder: Path, name: str, **content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def test_encodes_as_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for kind in ("byte-level", "metaspace"):
        folder = vocabularies.write(tmp_path / kind, vocabularies.KINDS[kind](), bos_token="<s>", eos_token="</s>")
        mine, theirs = Tokenizer.load(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        for text in (*vocabularies.SENTENCES, "<s>a</s>", "", " two words"):
            for special in (True, False):
                ids = mine.encode(text, add_special_tokens=special)
                assert ids == theirs.encode(text, add_special_tokens=special)
                assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
                assert mine.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        assert mine.bos_id == theirs.bos_token_id
        assert mine.eos_ids == (theirs.eos_token_id,)
        assert mine.vocab_size == len(theirs)


def test_several_eos_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    made = vocabularies.byte_level()
    folder = vocabularies.write(tmp_path, made, eos_token="<|im_end|>")
    end, turn = made.token_to_id("</s>"), made.token_to_id("<|im_end|>")
    put(folder, "config.json", eos_token_id=7, bos_token_id=5)
    assert Tokenizer.load(folder).eos_ids == (7, turn)
    assert Tokenizer.load(folder).bos_id == 5
    put(folder, "generation_config.json", eos_token_id=[end, 9])
    assert Tokenizer.load(folder).eos_ids == (end, 9, turn), (
        "config.json only counts where generation_config.json is mute"
    )
    put(folder, "generation_config.json", eos_token_id=turn)
    assert Tokenizer.load(folder).eos_ids == (turn,)


def test_special_tokens_may_be_objects_and_in_either_file(tmp_path: Path) -> None:
    folder = vocabularies.write(tmp_path, vocabularies.byte_level(), bos_token={"content": "<s>", "special": True})
    put(folder, "special_tokens_map.json", eos_token="</s>")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode([tokenizer.bos_id, 64, *tokenizer.eos_ids]) == tokenizer.decode([64])


def test_tokenizer_config_can_add_tokens_and_make_them_special(tmp_path: Path) -> None:
    made = vocabularies.byte_level()
    size, plain = made.get_vocab_size(), made.token_to_id("plain")
    listed = {
        str(plain): {"content": "plain", "special": True},
        str(size): {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False},
    }
    tokenizer = Tokenizer.load(vocabularies.write(tmp_path, made, added_tokens_decoder=listed))
    assert tokenizer.encode("a<extra>b")[1] == size
    assert tokenizer.decode(tokenizer.encode("a<extra>plainb")) == "ab"
    assert {plain, size} <= tokenizer.special_ids


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    made = vocabularies.byte_level()
    made.enable_padding(length=50)
    made.enable_truncation(3)
    tokenizer = Tokenizer.load(vocabularies.write(tmp_path, made))
    assert len(tokenizer.encode("abcdefgh")) == 8


def test_a_folder_without_tokenizer_serves_ids(tmp_path: Path) -> None:
    put(tmp_path, "config.json", eos_token_id=[2, 3], bos_token_id=1)
    tokenizer = Tokenizer.load(tmp_path)
    assert not tokenizer.has_text
    assert (tokenizer.eos_ids, tokenizer.bos_id) == ((2, 3), 1)
    with pytest.raises(CheckpointError, match="Pass token ids"):
        tokenizer.encode("hi")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Convert its tokenizer\.model"):
        tokenizer.decode([1])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    vocabularies.write(tmp_path, vocabularies.byte_level())
    (tmp_path / name).write_text('{"half": ')
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(tmp_path)


def test_a_panic_is_a_typed_error_and_the_next_text_is_encoded() -> None:
    tokenizer = vocabularies.over(vocabularies.llama3_regex())
    with pytest.raises(RequestFailed, match=r"panicked while it encoded a text of 10,500,001 characters.*retry-limit"):
        tokenizer.encode(vocabularies.PANICS)
    assert tokenizer.decode(tokenizer.encode("It's all right.")) == "It's all right."


def test_only_panics_are_translated() -> None:
    for error in (KeyboardInterrupt(), ZeroDivisionError()):
        with pytest.raises(type(error)), panics_as(RequestFailed, "it was tried"):
            raise error
        assert not is_panic(error)


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [("byte level", {"ByteLevel"}), ("bytes", {"ByteFallback", "Fuse"}), ("none", {"None"})],
)
def test_how_ids_are_decoded_is_read_without_the_vocabulary(kind: str, kinds: set[str]) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    if kind == "byte level":
        made.decoder = tokenizers.decoders.ByteLevel()
    elif kind == "bytes":
        parts = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        made.decoder = tokenizers.decoders.Sequence(parts)
    tokenizer = vocabularies.over(made)
    assert (tokenizer.parts.decoder or {}) == (json.loads(made.to_str())["decoder"] or {})
    assert tokenizer.decoder_kinds == kinds


def test_a_decoder_that_panics_is_a_typed_error() -> None:
    class PanicException(BaseException):
        pass

    class Backend:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            raise PanicException("a defect")

    tokenizer = Tokenizer(None)
    tokenizer._backend = Backend()  # type: ignore[assignment]
    with pytest.raises(RequestFailed, match="panicked while it decoded 2 tokens: a defect"):
        tokenizer.decode([1, 2])


@pytest.mark.clock
def test_a_long_text_leaves_other_threads_running() -> None:
    tokenizer = vocabularies.over(vocabularies.llama3_regex())
    text = ("hello wörld, this is a text. " * 42_000)[:1_200_000]
    worst, stop = 0.0, threading.Event()

    def tick() -> None:
        nonlocal worst
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    tokenizer.encode(text)
    took = time.perf_counter() - start
    stop.set()
    thread.join()
    print(f"encoded in {took:.2f} s, the neighbour stood still for {worst:.3f} s")
    assert worst < took / 2


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "unigram", "bytes in a sequence"])
def test_long_and_short_texts_are_encoded_alike(kind: str) -> None:
    tokenizer = vocabularies.of_kind(kind)
    text = " ".join(vocabularies.SENTENCES) + "<s> two words </s>"
    text *= 1 + 2 * LONG_TEXT // len(text)
    assert len(text) > LONG_TEXT
    for special in (True, False):
        assert tokenizer.encode(text, special) == list(tokenizer.backend.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_no_token_stands_for_more_characters_than_said(kind: str) -> None:
    tokenizer = vocabularies.of_kind(kind)
    for text in (*vocabularies.SENTENCES, " " * 500, "héllo" * 30, "two words" * 30, "\u0301" * 300, "世" * 300):
        count = len(tokenizer.encode(text, add_special_tokens=False))
        assert len(text) <= tokenizer.characters_per_token * max(count, 1)


def test_the_bound_is_the_longest_token() -> None:
    assert vocabularies.of_kind("byte-level").characters_per_token == len("<|im_start|>")
    assert vocabularies.of_kind("word pieces").characters_per_token >= 1024  # it drops spaces
