"""A text of twice the length takes at most 2.5 times as long, in every reader of what somebody else wrote.

The texts are hostile: each character and pair of characters that means something in a format, repeated after what opens
a construct, and what the patterns of the project would repeat (`doubling.attacks`).
"""

from __future__ import annotations

import collections
import functools
import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers import gguf_files, vocabularies
from helpers.families import FAMILY_CASES
from helpers.replies import EXAMPLES, THINK, TOOLS
from helpers.thorough import by_default
from project.doubling import FEW, LONG, MOST, PARTS, SHORT, Hostile, attacks, growth
from project.patterns import PATTERNS
from project.test_patterns import Pattern, patterns
from rekindle._src.calls.rows import RowPrompts
from rekindle._src.calls.tool_functions import read_docstring, tools_of
from rekindle._src.cli.chat import COMMAND
from rekindle._src.core.json_lines import JsonLines
from rekindle._src.models.loading import stored, tensor_files
from rekindle._src.models.registry import config_from_hf
from rekindle._src.notebook import bubbles
from rekindle._src.serve import anthropic, bodies, completions, decisions, errors, info, life, openai_fields, responses
from rekindle._src.serve.errors import ApiError
from rekindle._src.structured import compilers, endings, spec
from rekindle._src.text import Detokenizer, template_code, tokenizer, tokenizer_limits
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.generation_config import checkpoint_sampling
from rekindle._src.text.replies import ReplyFormat
from rekindle._src.text.replies.families import SYNTAXES
from rekindle.errors import InvalidRequest, RekindleError

pytestmark = pytest.mark.clock


class Reader(NamedTuple):
    """A function of a text, and what comes before and after what is repeated."""

    read: Callable[[str], object]
    frames: tuple[tuple[str, str], ...] = (("", ""),)
    examples: tuple[str, ...] = ()


Read = Callable[[str], object]
READERS: dict[str, Callable[[Path], Reader]] = {}  # by name, made from an empty folder


def reader(name: str, *frames: tuple[str, str]) -> Callable[[Callable[[Path], Read]], None]:
    """Enter the reader that a function of an empty folder returns."""

    def enter(make: Callable[[Path], Read]) -> None:
        READERS[name] = lambda folder: Reader(make(folder), frames or (("", ""),))

    return enter


# Replies.

# Beginnings of calls in addition to those of the family's own text of calls.
MORE = {
    "hermes": ("<tool_call>\n<function=write><parameter=text>",),
    "llama3_json": ('{"name": "',),
    "pythonic": ('[write(text="', "[write(text=[", "<|python_start|>[write(path='''"),
    "mistral": ("[TOOL_CALLS]write[ARGS]{",),
    "harmony": ("<|channel|>commentary to=functions.write<|message|>{", "<|start|>assistant"),
}


def replies(name: str, *, piece: int | None, opened: bool = False) -> Callable[[Path], Reader]:
    """Make the reader of a reply in one piece, or in many of a few characters."""
    syntax = SYNTAXES[name]
    form = ReplyFormat(syntax, THINK)
    call = syntax.write([("write", {"text": "§"})])
    begin = {call.partition("§")[0], *(opener.text for opener in syntax.openers), *syntax.markers, *MORE.get(name, ())}

    def read(text: str) -> None:
        scanner = form.scanner(tools=TOOLS, reasoning_open=opened, pieces=piece is not None)
        for at in range(0, len(text), piece or len(text)):
            scanner.feed(text[at : at + (piece or len(text))])
        scanner.finish()

    examples = tuple(example.text for example in EXAMPLES if example.family == name)
    return lambda _: Reader(read, (("", ""), *((one, "") for one in sorted(begin))), examples)


for _name in SYNTAXES:
    READERS[f"reply, {_name}"] = replies(_name, piece=None)
    READERS[f"reply in pieces, {_name}"] = replies(_name, piece=16)
READERS["reasoning"] = replies("hermes", piece=None, opened=True)
READERS["reasoning in pieces"] = replies("hermes", piece=16, opened=True)


@reader("Markdown", ("", ""), ("# ", ""), ("a | b\n", ""), ("```", ""), ("> ", ""), ("- a\n", ""))
def _(_: Path) -> Read:
    return lambda text: bubbles.turn("assistant", bubbles.body("assistant", text))


# Checkpoints.


@reader("chat template", ("", ""), ("{{ ", " }}"), ("{% set a = '", ""), ("{# ", ""), ("{{ '", "' }}"))
def _(_: Path) -> Read:
    def read(text: str) -> None:
        template_code.parsed.cache_clear()
        ReplyFormat.of_template(ChatTemplate(text).code())
        ChatTemplate(text).render([{"role": "user", "content": "a"}])

    return read


@reader("message in a chat template")
def _(_: Path) -> Read:
    template = ChatTemplate("{% for m in messages %}{{ m.role + m.content | trim }}{% endfor %}")

    def read(text: str) -> None:
        template.render([{"role": "user", "content": text}])
        template.render([{"role": text, "content": "a"}])

    return read


_LLAMA = next(iter(FAMILY_CASES["llama"].cases.values()))


@reader("config.json")
def _(folder: Path) -> Read:
    def read(text: str) -> None:
        (folder / "config.json").write_text(text, errors="replace")
        with suppress(RekindleError):
            stored.read_config(folder)
        quantized = {"quant_method": text, "format": text, "ignore": [text], "modules_to_not_convert": [text]}
        for changed in (
            *({name: text} for name in _LLAMA),
            {"rope_scaling": {"rope_type": text}}, {"quantization_config": quantized},
            *({"quantization_config": {**quantized, "quant_method": kind, "format": "int-quantized",
               "config_groups": {"a": {"targets": [text], "weights": {"num_bits": 8}}}}}
              for kind in ("compressed-tensors", "gptq", "awq", "fp8", "mxfp4")),
            {text: 1}, {"architectures": [text]}, {"layer_types": [text] * 2},
        ):  # fmt: skip
            with suppress(RekindleError):
                config_from_hf({**_LLAMA, **changed})

    return read


@reader("safetensors header", ("", ""), ('{"a": {"dtype": "F32", "data_offsets": [0, 4], "shape": [', "1]}}"),
        ('{"', '": {"dtype": "F32", "data_offsets": [0, 4], "shape": [1]}}'),
        ('{"__metadata__": {"', '": "a"}}'))  # fmt: skip
def _(folder: Path) -> Read:
    file = folder / "model.safetensors"

    def read(text: str) -> None:
        raw = text.encode(errors="replace")
        file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
        tensor_files.read_header(file)

    return read


@reader("names of tensors", ("", ""), ("model.layers.0.", ""), ("model.layers.0.mlp.experts.", ".weight"))
def _(folder: Path) -> Read:
    """A name is bounded, so there are as many as fit into the text."""
    file = folder / "model.safetensors"

    def read(text: str) -> None:
        header: dict[str, Any] = {
            f"{number}{text[at : at + 900]}": {"dtype": "F32", "data_offsets": [0, 4], "shape": [1]}
            for number, at in enumerate(range(0, len(text), 900))
        }
        raw = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
        (folder / "config.json").write_text(json.dumps({**_LLAMA, "text_config": _LLAMA}))
        stored.look(folder)

    return read


@reader("index of a checkpoint")
def _(folder: Path) -> Read:
    def read(text: str) -> None:
        index = {"weight_map": {"a": text, text: "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        tensor_files.weight_files(folder)

    return read


@reader("GGUF header")
def _(folder: Path) -> Read:
    file = folder / "a.gguf"

    def read(text: str) -> None:
        data = text.encode(errors="replace")
        many = struct.pack("<IQ", 8, len(data) // 8) + gguf_files.text("a") * (len(data) // 8)
        pairs = [
            gguf_files.pair("general.architecture", 8, gguf_files.text(data)),
            gguf_files.pair("general.name", 9, many),
            gguf_files.pair(text[:60_000], 8, gguf_files.text(data)),
        ]
        file.write_bytes(
            gguf_files.raw(pairs=pairs, entries=[gguf_files.entry(text[:300], [32], 0, 0)], data=bytes(128))
        )
        stored.look(file)

    return read


@reader("tokenizer.json", ("", ""), ('{"a": "', '"}'), ('{"Regex": "', '"}'))
def _(folder: Path) -> Read:
    return lambda text: tokenizer_limits.check_file(text.encode(errors="replace"), folder)


@reader("regex of a tokenizer", ("", ""), ("[", ""), ("[a", "]"), ("\\p{", ""))
def _(_: Path) -> Read:
    return lambda text: tokenizer_limits.is_one_class(text)


@reader("tokenizer_config.json", ("", ""), ('{"bos_token": "', '"}'), ('{"chat_template": "', '"}'))
def _(folder: Path) -> Read:
    def read(text: str) -> None:
        (folder / "tokenizer_config.json").write_text(text, errors="replace")
        tokenizer.special_tokens(folder)
        ChatTemplate.load(folder)

    return read


@reader("tokens")
def _(_: Path) -> Read:
    def read(text: str) -> None:
        endings.Spelling([text.encode(errors="replace"), b"1" + text.encode(errors="replace")], [0], 2)

    return read


@reader("generation_config.json", ("", ""), ('{"do_sample": true, "temperature": "', '"}'),
        ('{"do_sample": true, "temperature": ', "}"), ('{"do_sample": true, "top_k": [', "]}"))  # fmt: skip
def _(folder: Path) -> Read:
    def read(text: str) -> None:
        (folder / "generation_config.json").write_text(text, errors="replace")
        checkpoint_sampling(folder)

    return read


# Requests.

_ENDPOINTS = (
    completions.EMBEDDINGS, openai_fields.COMPLETIONS, openai_fields.CHAT, responses.RESPONSES, anthropic.MESSAGES,
    info.TOKENIZE, info.DETOKENIZE, info.ABORT, decisions.DECISIONS, decisions.RERANK,
)  # fmt: skip


@reader("body", ("", ""), ('{"model": "', '"}'), ('{"a": [', "]}"))
def _(_: Path) -> Read:
    def read(text: str) -> None:
        data = text.encode(errors="replace")
        bodies.check_values(data, 1 << 15, 1 << 12)
        bodies.parse(data)

    return read


@reader("fields of a body")
def _(_: Path) -> Read:
    def read(text: str) -> None:
        for endpoint in _ENDPOINTS:
            for field in endpoint.fields:
                for value in (text, {"type": text}, [{"role": text, "content": text}]):
                    with suppress(ApiError):
                        endpoint.read({field.name: value}, strict=True, unknown=lambda *_: None)

    return read


@reader("errors for clients", ("", ""), ("model='", ""), ("model='/", "': has no chat"), ("Pass ", ""))
def _(_: Path) -> Read:
    def read(text: str) -> None:
        errors.for_clients(text)
        errors.refusal(InvalidRequest(text, text, text, text), {})

    return read


@reader("Host and Origin", ("", ""), ("[", "]"), ("http://", ""), ("a:", ""))
def _(_: Path) -> Read:
    hosts = life.Hosts("*.example.org")

    def read(text: str) -> None:
        scope = {"type": "http", "headers": [(b"host", text.encode("latin-1", "replace"))], "server": ("127.0.0.1", 1)}
        with suppress(ApiError):
            hosts.check(scope, keyed=False)
        life._ORIGIN.fullmatch(text)

    return read


@reader("tools")
def _(_: Path) -> Read:
    def read(text: str) -> None:
        for name, description in (("f", text), (text, "f")):
            function = {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": {text: {"type": text}}},
            }
            with suppress(RekindleError):
                tools_of([{"type": "function", "function": function}])

    return read


@reader("grammar", ("", ""), ("start: ", ""), ("root ::= ", ""), ('start: "', ""), ("root ::= [", ""), ("start: /", ""))
def _(_: Path) -> Read:
    def read(text: str) -> None:
        plain = spec._PREFIXES.sub("", text)
        compilers.check_levels(spec.Spec("grammar", plain))
        endings._LONG_NUMBER.search(plain)

    return read


@reader("schema", ('{"type": "', '"}'), ('{"pattern": "', '"}'), ('{"$ref": "#/', '"}'), ('{"enum": [', "]}"),
        ('{"properties": {"', '": {"$ref": "#"}}}'), ('{"anyOf": [', "]}"))  # fmt: skip
def _(_: Path) -> Read:
    def read(text: str) -> None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        schema = spec.Spec("schema", json.dumps(value))
        compilers.is_simple(schema)
        compilers.check_levels(schema)
        endings.Bounds(endings.Spelling([], [], 1), "schema", schema.text)
        spec.closed(value)

    return read


@reader("stop strings")
def _(_: Path) -> Read:
    words = vocabularies.of_kind("byte-level")

    def read(text: str) -> None:
        text = text.encode(errors="replace").decode()
        stops = (text[:1024], text[:7] + "!", text[1:512] + "?")
        detokenizer = Detokenizer(words, stops)
        for token in words.encode(text[1:8193]):
            detokenizer.push([token])
        detokenizer.flush()

    return read


# Files of the user with texts of others.


@reader("lines of a file", ("", ""), ('{"id": "', '"}\n'), ('{"id":', "\n"))
def _(folder: Path) -> Read:
    file = folder / "a.jsonl"

    def read(text: str) -> None:
        file.write_text(text, errors="replace")
        with JsonLines(file, start='{"id":', writer="it", on_entry=lambda entry, at: True):
            pass

    return read


@reader("cells of a table")
def _(_: Path) -> Read:
    prompts = RowPrompts("Summarise: {text}", chat=False, system=None)

    def read(text: str) -> None:
        prompts.fill(0, {"text": text, text: 1})
        with suppress(RekindleError):
            prompts.fill(0, {text: 1})

    return read


@reader("what is typed", ("", ""), ("/a", ""), ("/", ""))
def _(_: Path) -> Read:
    return COMMAND.fullmatch


@reader("docstring", ("", ""), ("Args:\n    a", ""), (":param ", ""), ("Parameters\n---\n", ""))
def _(_: Path) -> Read:
    def read(text: str) -> None:
        def documented() -> None: ...

        documented.__doc__ = text
        read_docstring(documented)

    return read


@pytest.fixture(params=list(READERS))
def one(request: pytest.FixtureRequest, tmp_path: Path) -> Reader:
    made = READERS[request.param](tmp_path)

    def read(text: str) -> None:
        with suppress(RekindleError, ApiError):
            made.read(text)

    return made._replace(read=read)


@pytest.mark.parametrize(("parts", "length"), by_default([(FEW, SHORT), (PARTS, LONG)]), ids=["few", "all"])
def test_twice_the_text_takes_twice_the_time(one: Reader, parts: Sequence[str], length: int) -> None:
    texts = [Hostile(before, part, after) for before, after in one.frames for part in parts]
    slow = [f"{text}: {times:.1f}" for text in texts if (times := growth(one.read, text, length)) > MOST]
    assert not slow, "\n".join(slow)


@pytest.mark.thorough
def test_nothing_that_stops_in_the_middle_takes_longer(one: Reader) -> None:
    """A beginning of an example or of a frame, and a part of any of them, or of what patterns repeat."""
    draw = random.Random(0)
    examples = [*(before + after for before, after in one.frames), *one.examples]
    repeated = [text for pattern in patterns() for regex in pattern.texts for text in attacks(regex, pattern.flags)]
    slow = []
    for _ in range(120):
        example = draw.choice(examples)
        cut, start = draw.randint(0, len(example)), draw.randint(0, len(example))
        attack = draw.choice(repeated)
        part = draw.choice((draw.choice(PARTS), example[start : start + draw.randint(1, 30)] or "a", attack.part))
        before = draw.choice((example[:cut], attack.before, example[:cut] + attack.before))
        text = Hostile(before, part, draw.choice(("", example[cut:], attack.after)))
        if (times := growth(one.read, text, LONG)) > MOST:
            slow.append(f"{text}: {times:.1f}")
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize("file", sorted(file for file, rows in PATTERNS.items() if rows))
def test_patterns_take_twice_the_time(file: str) -> None:
    """As the lint of `test_patterns.py` says, but measured."""
    found = [pattern for pattern in patterns() if pattern.file == file]
    assert found, "a row without a pattern"
    for pattern in found:
        check_pattern(pattern)


def check_pattern(pattern: Pattern) -> None:
    row = PATTERNS.get(pattern.file, {}).get(pattern.name)
    for regex in (*pattern.texts, *(row.examples() if row is not None and row.examples is not None else ())):
        compiled = re.compile(regex, pattern.flags)
        for use in pattern.uses:
            for text in attacks(regex, pattern.flags):
                times = growth(functools.partial(used, compiled, use), text, SHORT)
                assert times <= MOST, f"{pattern}: {use}: {text}: {times:.1f}"


def used(pattern: re.Pattern[Any], use: str, text: str) -> None:
    """Use a pattern by one of its methods."""
    subject: Any = text.encode("latin-1", "replace") if isinstance(pattern.pattern, bytes) else text
    if use.startswith("sub"):
        getattr(pattern, use)(subject[:0], subject)
    elif use == "finditer":
        collections.deque(pattern.finditer(subject), maxlen=0)
    else:
        getattr(pattern, use)(subject)
