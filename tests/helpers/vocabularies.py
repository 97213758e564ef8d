"""Tokenizers made on the spot, one per kind of decoder that the model families use."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rekindle._src.models.loading.gguf.export import write_gguf
from rekindle._src.text import Tokenizer
from rekindle._src.text.backends import WholeTokenizer

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
SENTENCES = (
    "Once upon a time there was a fire that would not go out.",
    "hällo wörld, 你好世界, こんにちは, नमस्ते",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and combining é ñ",
)


def byte_level() -> tokenizers.Tokenizer:
    """As in GPT-2, Llama 3, Qwen, SmolLM, OLMo 2: every byte is a token, some pairs are merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ã", "©"), ("ä", "½"), ("l", "l")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    # Not quite text: the decoder takes its é for the byte 0xE9, in tokenizers as here.
    made.add_tokens(["héllo", "two words", "你好", "plain"])
    return made


def llama3_regex() -> tokenizers.Tokenizer:
    """Bytes split by Llama 3's stock regex, which panics on a long run of spaces: it runs out of backtracking."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    split = pre_tokenizers.Split(
        tokenizers.Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        ),
        "isolated",
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    return made


PANICS = " " * 10_500_000 + "a"  # under `llama3_regex`


def _pieces() -> dict[str, int]:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ("▁", "▁Hello", "▁world", "lo", "!", ".", "▁▁", "a", "é", "你", "\u0301", "\ufffd", "▁the", "s"):
        vocab[piece] = len(vocab)
    return vocab


def metaspace(*, strip: bool = True) -> tokenizers.Tokenizer:
    """As in Llama 2, Mistral, Phi-3 (`strip`) and Gemma (not): words begin with ▁, unknown characters become bytes."""
    made = tokenizers.Tokenizer(models.BPE(vocab=_pieces(), merges=[], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    made.add_special_tokens(["<s>", "</s>", "<|user|>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def unigram() -> tokenizers.Tokenizer:
    """A Metaspace decoder by itself, as sentencepiece conversions have."""
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ("▁Hello", "▁", "lo", "a", "▁wor", "ld", "é"))]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    made.decoder = decoders.Metaspace()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(["<s>", "</s>"])
    return made


def word_piece() -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(("[UNK]", "hello", "##lo", "world", ".", "don", "'", "t", "##s", ","))}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[CLS]"])
    return made


def bytes_in_a_sequence() -> tokenizers.Tokenizer:
    made = byte_level()
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return made


KINDS = {
    "byte-level": byte_level,
    "metaspace": metaspace,
    "metaspace without strip": lambda: metaspace(strip=False),
    "unigram": unigram,
    "word pieces": word_piece,
    "bytes in a sequence": bytes_in_a_sequence,
    "none": lambda: tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>")),
}


def write(folder: Path, made: tokenizers.Tokenizer, **config: Any) -> Path:
    """`made` as a folder's tokenizer.json, `config` as its tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def changed(folder: Path, parts: dict[str, Any], **config: Any) -> Path:
    """The folder of a tokenizer of bytes with other sections in its tokenizer.json."""
    write(folder, byte_level(), **config)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


def of_kind(kind: str) -> Tokenizer:
    return over(KINDS[kind]())


def over(made: tokenizers.Tokenizer, **options: Any) -> Tokenizer:
    """A `Tokenizer` that encodes as `made`."""
    return Tokenizer(WholeTokenizer(made.to_str().encode()), **options)


def large_file(path: Path, size: int = 12_000) -> Path:
    """Write a GGUF file with a vocabulary of bytes and pairs; a text needs a few, with holes between their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = itertools.islice(itertools.product("Ġx" + "".join(alphabet), "x" + "".join(alphabet)), size)
    merges = dict.fromkeys(f"{left} {right}" for left, right in pairs)
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), "</s>"]
    metadata = {
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.token_type": np.asarray([1] * (len(tokens) - 1) + [3], np.int32),
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }  # fmt: skip
    write_gguf(path, metadata, [], [])
    return path
