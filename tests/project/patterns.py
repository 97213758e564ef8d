"""Every pattern, and every library call whose time depends on a text: who writes the text, and its bound.

`test_patterns.py` compares this table with the code, so a new pattern needs a row. Its name is the one that it is
assigned to, or the pattern itself where it has none. A bound in capitals is a constant of the code; where it names a
file or another thing that we write, nothing longer reaches the pattern.

Whole numbers have no rows: Python refuses to read or write any of more than 4,300 digits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from rekindle_kernels.deprecated import KNOWN


class Text(NamedTuple):
    """The text that a pattern or a call reads."""

    writer: Literal["us", "the user", "a stranger"]
    what: str
    bound: str
    examples: Callable[[], Sequence[str]] | None = None  # of a pattern that is put together when it is used


US, USER, STRANGER = partial(Text, "us"), partial(Text, "the user"), partial(Text, "a stranger")


def _of(module: str, name: str) -> str:
    """The pattern that a module has made."""
    pattern: str = getattr(importlib.import_module(f"rekindle._src.{module}"), name).pattern
    return pattern


def _ignored() -> list[str]:
    """The patterns of tensors that no family reads."""
    from helpers.families import FAMILY_CASES
    from rekindle._src.models import registry
    from rekindle._src.models.loading import checkpoint, quantized

    ignored = {*checkpoint.HARMLESS, *quantized.NOT_WEIGHTS}
    for family in FAMILY_CASES.values():
        for raw in (*family.cases.values(), *family.embeds.values()):
            ignored.update(registry.manifest(registry.config_from_hf(raw)).ignored)
    return ["|".join(f"(?:{one})" for one in sorted(ignored))]


def _ignored_of_towers() -> list[str]:
    """The patterns of tensors that no encoder of pictures reads."""
    from helpers.towers import MODELS, config_of
    from rekindle._src.models.vision.registry import tower_manifest

    return sorted({pattern for name in MODELS for pattern in tower_manifest(config_of(name)).ignored})


PATTERNS: dict[str, dict[str, Text]] = {
    "kernels/rekindle_kernels/deprecated.py": {
        "_FILTER": US("a warning of a package", "a line", lambda: [KNOWN]),
    },
    "kernels/rekindle_kernels/native/build.py": {
        r"\d+": US("the version of a compiler's package", "a version"),
        "PREFIX.encode() + b'([a-z][a-z0-9_]*)'": US(
            "object code that was compiled here", "a file", lambda: ["rekindle_([a-z][a-z0-9_]*)"]
        ),
    },
    "toolkit/workshop/breakdown.py": {
        r"(?:ENTRY )?%?([\w.-]+) ": US("a program as XLA prints it", "a line"),
        r"\s*(?:ROOT )?%?([\w.-]+) = ": US("a program as XLA prints it", "a line"),
        r"(?:calls|to_apply|body)=%?([\w.-]+)": US("a program as XLA prints it", "a line"),
        r'custom_call_target="rekindle_([a-z0-9]+)': US("a program as XLA prints it", "a line"),
        r'op_name="([^"]*)"': US("a program as XLA prints it", "a computation"),
        r"dot_general| (ragged-)?dot\(": US("a program as XLA prints it", "a line"),
    },
    "toolkit/rekindle/_src/bench/limits.py": {r"layers\.(\d+)\.": US("a parameter's path", "a path")},
    "toolkit/rekindle/_src/calls/tool_functions.py": {
        "_NAME": STRANGER("a tool's name", "64 characters"),
        "_SECTION": USER("a function's docstring", "a line"),
        "_OTHER": USER("a function's docstring", "a line"),
        "_ENTRY": USER("a function's docstring", "a line"),
        "_FIELD": USER("a function's docstring", "a line"),
        "_NUMPY": USER("a function's docstring", "a line"),
        r"-{3,}\s*": USER("a function's docstring", "a line"),
    },
    "toolkit/rekindle/_src/cli/chat.py": {"COMMAND": USER("what is typed", "a message")},
    "toolkit/rekindle/_src/cli/commands/learn.py": {
        "_PICTURE": US("a page of the course", "a cell"),
        "_LINK": US("a page of the course", "a cell"),
        "_DRAWING": US("a page of the course", "a cell"),
        "_FILE": US("a page of the course", "a cell"),
    },
    "toolkit/rekindle/_src/cli/report.py": {
        "_TOKEN": STRANGER("a check's text, with an error of a library's", "512 characters from where it begins"),
        "_LOGIN": STRANGER("a check's text, with an error of a library's", "256 characters from where it begins"),
    },
    "toolkit/rekindle/_src/core/rope_scaling.py": {"_PART": USER("an option of open()", "_LONGEST")},
    "toolkit/rekindle/_src/core/options.py": {"_ENTRY": US("a docstring", "a line")},
    "toolkit/rekindle/_src/integrations/mcp/limits.py": {
        "_ANSWER": STRANGER("the beginning of a tool server's message", "_ID_BYTES"),
        "_FIRST_ID": STRANGER("the beginning of a tool server's message", "_ID_BYTES"),
        "_LAST_ID": STRANGER("the end of a tool server's message", "_ID_BYTES"),
    },
    "toolkit/rekindle/_src/kvcache/persist/snapshot.py": {"_NAME": USER("a snapshot's name", "100 characters")},
    "toolkit/rekindle/_src/models/loading/checkpoint.py": {
        "pattern": STRANGER("a tensor's name", "MAX_NAME", _ignored),
    },
    "toolkit/rekindle/_src/models/loading/fingerprint.py": {"[0-9a-f]{64}": STRANGER("a file's name", "a file's name")},
    "toolkit/rekindle/_src/models/loading/gguf/files.py": {"_PART": STRANGER("a file's name", "a file's name")},
    "toolkit/rekindle/_src/models/loading/gguf/names.py": {
        "_TENSOR": STRANGER("a tensor's name", "MAX_NAME"),
        "_LAYER": STRANGER("a tensor's name", "MAX_NAME"),
        "_EXPERT": STRANGER("a tensor's name", "MAX_NAME"),
    },
    "toolkit/rekindle/_src/models/loading/hub.py": {"_HUB_ID": USER("the name of a model", "an argument")},
    "toolkit/rekindle/_src/models/loading/named_tensors.py": {"_NAME": US("a parameter's path", "a path")},
    "toolkit/rekindle/_src/models/loading/stores/hub_cache.py": {"_COMMIT": STRANGER("a folder's name", "MAX_NAME")},
    "toolkit/rekindle/_src/models/loading/stores/ollama.py": {
        "_DIGEST": STRANGER("a digest in a manifest, or a blob's name", "MAX_MANIFEST"),
        "_PART": STRANGER("a part of a model's name", "MAX_NAME"),
    },
    "toolkit/rekindle/_src/models/loading/tensor_files.py": {
        "_FILE_NAME": STRANGER("a file's name in an index", "_MAX_HEADER"),
    },
    "toolkit/rekindle/_src/models/nn/packing.py": {
        r"int4|(int[68]|fp4|iq4)-\d": US("the name of a packing", "a name"),
        r"(int|fp|iq)([468])(?:-(\d+))?(-min)?(-f32|-k)?": US("the name of a packing", "a name"),
    },
    "toolkit/rekindle/_src/models/registry.py": {"[^a-z0-9]": STRANGER("a config's model_type", "MAX_CONFIG")},
    "toolkit/rekindle/_src/models/vision/mmproj.py": {"_NUMBER": US("a parameter's name", "a name")},
    "toolkit/rekindle/_src/models/vision/weights.py": {
        "pattern": STRANGER("a tensor's name", "MAX_NAME", _ignored_of_towers),
    },
    "toolkit/rekindle/_src/views/markdown.py": {"_NO_TARGET": STRANGER("an answer", "_RUN")},
    "toolkit/rekindle/_src/notebook/static/figures.js": {r"\s+": US("the keywords of a view's page", "a page")},
    "toolkit/rekindle/_src/notebook/transcripts.py": {"_NAME": USER("a conversation's name", "100 characters")},
    "toolkit/rekindle/_src/programs/collectives.py": {"_SIZES": US("a key of kept measurements", "a key")},
    "toolkit/rekindle/_src/serve/errors.py": {
        "_PATTERN": STRANGER(
            "an error, with a value of the request", "an error", lambda: [_of("serve.errors", "_PATTERN")]
        ),
        "pattern": STRANGER(
            "an error, with a value of the request", "an error", lambda: [_of("serve.errors", "_PATTERN")]
        ),
    },
    "toolkit/rekindle/_src/serve/exchange.py": {"_ID": STRANGER("a request's id", "128 characters")},
    "toolkit/rekindle/_src/serve/life.py": {
        "_HOST": STRANGER("a Host header", "MOST_HEADER_BYTES"),
        "_ORIGIN": STRANGER("an Origin header", "MOST_HEADER_BYTES"),
        r"\*|(\*\.)?[^][:/@\s*]{1,253}": USER("an allowed host", "253 characters"),
    },
    "toolkit/rekindle/_src/structured/automata.py": {"_REPORTED": STRANGER("a grammar", "MAX_STRUCTURE")},
    "toolkit/rekindle/_src/structured/compilers.py": {
        "(_LARK, _GBNF)": STRANGER("a grammar", "MAX_STRUCTURE"),
        "_WHOLE": STRANGER("a grammar", "MAX_STRUCTURE"),
        "_RULE": STRANGER("a grammar", "MAX_STRUCTURE"),
        "_NAME": STRANGER("a grammar", "MAX_STRUCTURE"),
    },
    "toolkit/rekindle/_src/structured/endings.py": {
        "_LONG_NUMBER": STRANGER("a schema or a grammar", "MAX_STRUCTURE"),
        "_DIGIT": STRANGER("a token's bytes", "LONGEST_TEXT"),
    },
    "toolkit/rekindle/_src/structured/spec.py": {"_PREFIXES": STRANGER("a grammar", "MAX_STRUCTURE")},
    "toolkit/rekindle/_src/text/detokenizer.py": {"_BYTE_TOKEN": STRANGER("a token", "LONGEST_TEXT")},
    "toolkit/rekindle/_src/text/gguf/reading.py": {"_WORD": STRANGER("a text to encode", "MAX_PROMPT")},
    "toolkit/rekindle/_src/text/gguf/writing.py": {"_BYTE": STRANGER("a token", "LONGEST_TEXT")},
    "toolkit/rekindle/_src/text/replies/blocks.py": {"_PLACES": US("a mark of a family", "a mark")},
    "toolkit/rekindle/_src/text/replies/call_grammar.py": {r"[^\w\s]": US("a mark of a family", "a mark")},
    "toolkit/rekindle/_src/text/replies/gemma_reader.py": {"_WORD": STRANGER("a reply's name", "MAX_NAME")},
    "toolkit/rekindle/_src/text/replies/harmony.py": {
        "_NO_ROLE": STRANGER("a reply", "_LONGEST"),
        "_CHANNEL_OF": STRANGER("a reply's header", "_LONGEST", lambda: [_of("text.replies.harmony", "_CHANNEL_OF")]),
        "_RECIPIENT": STRANGER("a reply's header", "_LONGEST"),
    },
    "toolkit/rekindle/_src/text/replies/json_reader.py": {
        "_STOPS": STRANGER("a reply", "max_model_len"),
        "_PLAIN": STRANGER("a reply", "max_model_len"),
        "_WORD": STRANGER("a reply", "max_model_len"),
        "_VALUE": STRANGER("a reply's number", "MAX_WORD"),
    },
    "toolkit/rekindle/_src/text/replies/python_reader.py": {
        "_NAME": STRANGER("a reply's name", "MAX_NAME"),
        "_INT": STRANGER("a reply's number", "MAX_WORD"),
        "_FLOAT": STRANGER("a reply's number", "MAX_WORD"),
        "plain": STRANGER("a reply", "max_model_len", lambda: [r"[^\"]+"]),
    },
    "toolkit/rekindle/_src/text/replies/readers.py": {
        "_MISTRAL_NAME": STRANGER("a character of a reply", "1 character"),
    },
    "toolkit/rekindle/_src/text/replies/response_template.py": {
        "_TOKEN": STRANGER("a response template", "MAX_LITERAL"),
        "_VARIABLE": STRANGER("a response template", "_MAX_NODES"),
    },
    "toolkit/rekindle/_src/text/replies/scanner.py": {
        "'|'.join(sorted({re.escape(literal[0]) for literal in literals})) or '(?!)'": STRANGER(
            "a reply", "max_model_len", lambda: [r"<|\[|\{", "(?!)"]
        ),
    },
    "toolkit/rekindle/_src/text/replies/tag_reader.py": {"_LINE": STRANGER("a reply's name", "MAX_NAME")},
    "toolkit/rekindle/_src/text/tokenizer_limits.py": {
        "_CONTINUED": STRANGER("a tokenizer", "MAX_FILE"),
        "_LETTER_ESCAPES": STRANGER("a tokenizer", "MAX_FILE"),
    },
    "toolkit/workshop/tiny/stories.py": {r"\w+": US("a story", "a story")},
    "toolkit/workshop/tiny/words.py": {"CHOICE": US("a story", "a story")},
}

# Patterns that may take more than linear time until they are mended. This list may only shrink.
CALLS: dict[str, dict[str, Text]] = {
    "kernels/rekindle_kernels/native/build_library.py": {
        "json.loads": US("what a process of ours prints", "a line"),
        "shlex.split": US("the option --linker", "a line"),
    },
    "kernels/rekindle_kernels/native/library.py": {
        "json.loads": US("the manifest of compiled kernels", "a file"),
        "lzma.decompress": US("compiled kernels in the package", "a file"),
    },
    "toolkit/rekindle/_src/bench/plan.py": {"json.loads": USER("a config.json that is named", "a file")},
    "toolkit/rekindle/_src/bench/simulation.py": {"json.loads": USER("a trace that is named", "a line")},
    "toolkit/rekindle/_src/bench/workloads.py": {"json.loads": US("what a process of ours prints", "a line")},
    "toolkit/rekindle/_src/calls/tool_functions.py": {
        "inspect.getdoc": USER("a function's docstring", "a docstring"),
        "kind.fromisoformat": STRANGER("an argument of a call", "max_model_len"),
    },
    "toolkit/rekindle/_src/channels/bulk.py": {"ipaddress.ip_address": US("an end of a connection", "an address")},
    "toolkit/rekindle/_src/capabilities/tuning/checkpoint.py": {
        "json.loads": US("the steps of a training", "_LARGEST_HISTORY")
    },
    "toolkit/rekindle/_src/channels/channel.py": {"json.loads": STRANGER("a message, signed", "a message")},
    "toolkit/rekindle/_src/cli/cache.py": {
        "json.loads": US("descriptions in the cache folder", "a file"),
    },
    "toolkit/rekindle/_src/cli/commands/completion.py": {"shlex.split": USER("a command line", "an argument")},
    "toolkit/rekindle/_src/cli/commands/learn.py": {
        "json.loads": US("a page of the course", "a file"),
    },
    "toolkit/rekindle/_src/cli/screen.py": {
        "textwrap.fill": STRANGER("an error, with a value of the model's or the user's", "an error"),
    },
    "toolkit/rekindle/_src/capabilities/captures/files.py": {
        "json.loads": USER("the header of a file of vectors", "LONGEST_HEADER")
    },
    "toolkit/rekindle/_src/core/captured.py": {"json.loads": US("the header of captures", "HEADER")},
    "toolkit/rekindle/_src/core/cell_errors.py": {"ast.parse": USER("an expression of a cell", "_EXPRESSION")},
    "toolkit/rekindle/_src/core/guarded.py": {
        "json.loads": STRANGER("a job, or the answer of a process that may have been overrun", "LONGEST_ANSWER")
    },
    "toolkit/rekindle/_src/core/json_values.py": {"json.loads": STRANGER("a saved conversation", "MOST_VALUES")},
    "toolkit/rekindle/_src/core/json_lines.py": {"json.loads": USER("a file of answers that is named", "a line")},
    "toolkit/rekindle/_src/core/names.py": {
        "difflib.get_close_matches": STRANGER("a misspelled name", "MAX_NAME; names of another length are passed over"),
    },
    "toolkit/rekindle/_src/core/options.py": {
        "inspect.cleandoc": US("a docstring", "a docstring"),
    },
    "toolkit/rekindle/_src/core/reply.py": {"json.loads": STRANGER("a call that was read", "max_model_len, MAX_DEPTH")},
    "toolkit/rekindle/_src/core/shared_cache.py": {
        "json.loads": STRANGER("the header of a blob, signed", "_MOST_HEADER"),
        "datetime.datetime.fromisoformat": STRANGER("a store's time", "a time"),
    },
    "toolkit/rekindle/_src/kvcache/persist/segment.py": {
        "json.loads": STRANGER("an index of pages", "_LONGEST_HEADER")
    },
    "toolkit/rekindle/_src/kvcache/sharing.py": {"json.loads": STRANGER("a message, signed", "a message")},
    "toolkit/rekindle/_src/models/adapters/peft.py": {"json.loads": STRANGER("an adapter's config", "_LARGEST_CONFIG")},
    "toolkit/rekindle/_src/models/loading/hub.py": {
        "json.loads": US("descriptions in the cache folder", "MAX_DESCRIPTION")
    },
    "toolkit/rekindle/_src/models/loading/gguf/grids.py": {"zlib.decompress": US("the grids", "a constant")},
    "toolkit/rekindle/_src/models/loading/known_models.py": {"json.loads": US("a kept description", "a file")},
    "toolkit/rekindle/_src/models/loading/prepared.py": {"json.loads": US("checksums of kept weights", "a file")},
    "toolkit/rekindle/_src/models/loading/tensor_files.py": {
        "json.loads": STRANGER("an index, a header or a config", "_MAX_HEADER"),
    },
    "toolkit/rekindle/_src/notebook/transcripts.py": {"json.loads": US("a kept conversation", "a file")},
    "toolkit/rekindle/_src/processes/codec.py": {"reader.decompress": STRANGER("an array of a message", "its shape")},
    "toolkit/rekindle/_src/processes/facts.py": {"json.loads": US("the facts of this process", "a line")},
    "toolkit/rekindle/_src/programs/store.py": {"json.loads": US("the description of a program", "a file")},
    "toolkit/rekindle/_src/replicas/replica.py": {"pickle.loads": US("an error that was pickled there", "an error")},
    "toolkit/rekindle/_src/replicas/wire.py": {"json.loads": US("a request on its way to a replica", "max_prompt")},
    "toolkit/rekindle/_src/serve/anthropic.py": {"json.loads": STRANGER("a call that was read", "MAX_DEPTH")},
    "toolkit/rekindle/_src/serve/batch.py": {"json.loads": US("an answer of ours", "an answer")},
    "toolkit/rekindle/_src/serve/bodies.py": {"json.loads": STRANGER("a body", "check_values")},
    "toolkit/rekindle/_src/serve/fetching.py": {
        "ipaddress.ip_address": STRANGER("a resolver's answer", "a DNS message")
    },
    "toolkit/rekindle/_src/serve/generation.py": {"json.loads": STRANGER("a schema as text", "MAX_STRUCTURE")},
    "toolkit/rekindle/_src/serve/life.py": {
        "ipaddress.ip_address": STRANGER("a Host header, a client's address", "MOST_HEADER_BYTES"),
        "ipaddress.IPv6Address": US("a number", "128 bits"),
    },
    "toolkit/rekindle/_src/serve/server.py": {"ipaddress.ip_address": USER("the host to listen on", "an argument")},
    "toolkit/rekindle/_src/serve/web_urls.py": {
        "ipaddress.ip_address": STRANGER("the host of a URL", "LONGEST_URL"),
        "ipaddress.ip_network": US("networks", "a constant"),
        "ipaddress.IPv6Network": US("a network", "a constant"),
    },
    "toolkit/rekindle/_src/structured/compilers.py": {"json.loads": STRANGER("a schema", "MAX_STRUCTURE")},
    "toolkit/rekindle/_src/structured/endings.py": {"json.loads": STRANGER("a schema", "MAX_STRUCTURE")},
    "toolkit/rekindle/_src/structured/spec.py": {
        "json.loads": STRANGER("a text that follows a schema", "max_model_len"),
        "decimal.Decimal": STRANGER("a number that JSON has read", "4,300 digits"),
    },
    "toolkit/rekindle/_src/text/backends.py": {"json.loads": STRANGER("a tokenizer, or a part of one", "MAX_FILE")},
    "toolkit/rekindle/_src/text/chat.py": {
        "json.loads": STRANGER("a call in a message", "MAX_ARGUMENTS"),
    },
    "toolkit/rekindle/_src/text/gguf/writing.py": {"json.loads": STRANGER("a tokenizer", "MAX_FILE")},
    "toolkit/rekindle/_src/text/replies/arguments.py": {"json.loads": STRANGER("a value of a call", "max_model_len")},
    "toolkit/rekindle/_src/text/replies/call.py": {"json.loads": STRANGER("a call that was read", "MAX_DEPTH")},
    "toolkit/rekindle/_src/text/replies/format.py": {"json.loads": STRANGER("a call in a message", "MAX_ARGUMENTS")},
    "toolkit/rekindle/_src/text/replies/json_reader.py": {"json.loads": STRANGER("a value of a call", "max_model_len")},
    "toolkit/rekindle/_src/text/tokenizer_limits.py": {"json.loads": STRANGER("a tokenizer", "MAX_FILE")},
    "toolkit/workshop/eagle.py": {
        "ast.parse": US("the standard library", "a file"),
        "json.loads": US("what the model said", "a line"),
    },
    "toolkit/workshop/tiny_vision/train.py": {"json.loads": US("the embedded model's config", "a file")},
}
