"""Opens a folder's tokenizer, chat template and defaults with extremes in its JSON files, in a process with little
memory: `python text_extremes.py STRIDE FOLDER` tries each STRIDE-th of them and prints the ones that went wrong.

Every place of generation_config.json, tokenizer_config.json, config.json and tokenizer.json gets numbers beyond all
types, NaN, values of other types, texts and lists of a hundred thousand, and nesting of thousands of levels.
"""

from __future__ import annotations

import collections
import json
import logging
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MEMORY = 2 << 30  # of address space, beyond what the process has at first
SECONDS = 5.0  # of a processor
DEEP = 3_000
EXTREMES = (
    "NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "-1" + "0" * 400, "9" * 5_000, str(1 << 64), str(1 << 63),
    str(1 << 32), "-1", "0", "0.5", "1e308", "5e-324", "true", "false", "null", '""', '"x"', '"\\ud800"', "[]", "{}",
    "[1, 2, 3]", "[[1]]", '["a"]', '{"a": 1}', '{"1": {}}', '{"5": {"content": "\\ud800"}}', "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP, '"' + "a" * 200_000 + '"', "[" + "0," * 100_000 + "0]",
)  # fmt: skip
WHOLE = (b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b"{", b'{"a": 1, "a": 2}', bytes(10), b"[" * 100_000)
HOLE = "a place that an extreme takes"
CONFIG = {"model_type": "llama", "eos_token_id": 1, "bos_token_id": 1, "vocab_size": 257}
GENERATION = {
    "do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
    "eos_token_id": [1, 2], "bos_token_id": 1,
}  # fmt: skip
TOKENIZER_CONFIG = {
    "chat_template": "{{ messages[0].content }}", "bos_token": "</s>", "eos_token": {"content": "</s>"},
    "added_tokens_decoder": {"256": {"content": "</s>", "special": True}}, "add_bos_token": True,
    "model_max_length": 10, "tokenizer_class": "X", "pad_token": None, "additional_special_tokens": ["a"],
}  # fmt: skip


def tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json with every section filled."""
    from helpers.sessions import byte_tokenizer

    base: dict[str, Any] = json.loads(byte_tokenizer().definition())
    normalizers = [
        {"type": "Prepend", "prepend": "a"},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "NFC"},
    ]
    special = {"</s>": {"id": "</s>", "ids": [256], "tokens": ["</s>"]}}
    single = [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return base | {
        "truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "x",
        },
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special},
    }  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all values, of long lists and dictionaries some."""
    yield path
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys if len(keys) < 30 else keys[:3]:
        yield from places(value[key], (*path, key))


def with_hole(value: Any, path: tuple[Any, ...]) -> Any:
    """Return a copy with a hole in one place."""
    if not path:
        return HOLE
    copied = list(value) if isinstance(value, list) else dict(value)
    copied[path[0]] = with_hole(value[path[0]], path[1:])
    return copied


def cases(files: dict[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    """Yield names of files and their contents, with a description of the extreme in each."""
    for name, value in files.items():
        for path in places(value):
            around = json.dumps(with_hole(value, path))
            for extreme in EXTREMES:
                yield f"{path} = {extreme[:40]}", name, around.replace(json.dumps(HOLE), extreme).encode()
        for content in WHOLE:
            yield f"{content[:20]!r}", name, content


def main(stride: int, folder: Path) -> None:
    sys.path[:0] = [str(ROOT / part) for part in ("toolkit", "kernels", "tests")]
    logging.disable(logging.CRITICAL)
    from rekindle._src.text.chat import ChatTemplate
    from rekindle._src.text.generation_config import defaults_of
    from rekindle._src.text.tokenizer import Tokenizer
    from rekindle.errors import RekindleError

    files = {
        "generation_config.json": GENERATION, "tokenizer_config.json": TOKENIZER_CONFIG, "config.json": CONFIG,
        "tokenizer.json": tokenizer(),
    }  # fmt: skip

    def opened() -> str:
        loaded = Tokenizer.load(folder)
        loaded.decode(loaded.encode("Once upon a time, é"))
        template = ChatTemplate.load(folder)
        if template is not None:
            template.render([{"role": "user", "content": "Who are you?"}])
        defaults_of(folder)
        return "opens"

    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    assert opened() == "opens", "the files themselves"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    counts: collections.Counter[str] = collections.Counter()
    for number, (words, name, content) in enumerate(cases(files)):
        if number % stride:
            continue
        (folder / name).write_bytes(content)
        began = time.process_time()
        try:
            result = opened()
        except RekindleError:
            result = "refused"
        except BaseException as error:
            result = "wrong"
            print(f"{name}: {words}: {type(error).__name__}: {error}"[:300], flush=True)
        if time.process_time() - began > SECONDS:
            print(f"{name}: {words}: {time.process_time() - began:.1f} s", flush=True)
        counts[result] += 1
        (folder / name).write_text(json.dumps(files[name]))
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
