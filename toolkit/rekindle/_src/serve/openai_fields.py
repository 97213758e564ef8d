"""The fields of OpenAI's completions and chat completions, with the extensions that vLLM's clients know."""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.core import options
from rekindle._src.core.options import MAX_BAD_WORDS, MAX_WORD
from rekindle._src.core.samplers import KNOWN, MAX_BREAKER, MAX_BREAKERS
from rekindle._src.core.sampling import MAX_ALLOWED_TOKENS, MAX_REPEATS, Sampling
from rekindle._src.serve.errors import wrong
from rekindle._src.serve.fields import (
    INT64,
    Anything,
    Boolean,
    Either,
    Endpoint,
    Field,
    Items,
    Kind,
    Number,
    OneOf,
    Shape,
    String,
    Table,
    TokenIds,
    ignored,
    refused,
    whole,
)

MOST_PROMPTS = 2_048  # of one request
MOST_MESSAGES = 10_000
MOST_N = 1_024
MOST = 2**31 - 1
MOST_TEMPERATURE = 2  # as OpenAI has it; a session takes more
REQUEST_ID = String(maximum=128, minimum=1)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """One or more prompts, as a list of texts and lists of token ids."""

    def check(self, value: Any, path: str) -> list[str | list[int]]:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise wrong(path, value, "is no prompt", "Pass a string, token ids, or a list of them")
        if type(value[0]) is int:
            return [TokenIds().check(value, path)]
        if len(value) > MOST_PROMPTS:
            raise wrong(path, f"{len(value):,} prompts", f"are over {MOST_PROMPTS:,}", "Send several requests")
        ids = TokenIds()
        return [item if isinstance(item, str) else ids.check(item, f"{path}[{at}]") for at, item in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        ids = TokenIds().schema()
        lists = ({"type": "array", "items": item, "minItems": 1, "maxItems": MOST_PROMPTS} for item in (TEXT, ids))
        return {"anyOf": [TEXT, ids, *lists]}


TEXT = String().schema()
PROMPTS = Prompts()
STOP = Either("a string or a list of strings", ((str, String()), (list, Items(String(), maximum=64))))
OBJECT = Table(Anything())
NAME = String(maximum=256, minimum=1)
STEER = Either(
    "a name, a list of names, or names and factors",
    ((str, NAME), (list, Items(NAME, maximum=64)), (dict, Table(Number(-1e6, 1e6), maximum=64))),
)

CONTENT = Either(
    "a string or a list of parts", ((str, String()), (list, Items(Shape((("type", String()),), ("type",)))))
)
CALL = Shape((("id", String()), ("type", String()), ("function", Shape((("name", String()),), ("name",)))))
MESSAGE = Shape(
    (
        ("role", String(maximum=64, minimum=1)), ("content", CONTENT), ("name", String()), ("reasoning", String()),
        ("reasoning_content", String()), ("tool_call_id", String()), ("tool_calls", Items(CALL)), ("pinned", Boolean()),
    ),
    ("role",),
)  # fmt: skip
FORMAT = Shape((("type", String()), ("json_schema", OBJECT)), ("type",))
FUNCTION = Shape((("name", NAME), ("description", String()), ("parameters", OBJECT)), ("name",))
TOOL = Shape((("type", OneOf(("function",))), ("function", FUNCTION)), ("function",))
TOOL_CHOICE = Either("a word or a function", ((str, OneOf(("none", "auto", "required"))), (dict, OBJECT)))
STREAM_OPTIONS = Shape((("include_usage", Boolean()), ("continuous_usage_stats", Boolean())))

# The fields of options that a request writes or means otherwise than `Sampling`.
_OTHERWISE = {
    field.option or field.name: field
    for field in (
        Field("temperature", Number(0, MOST_TEMPERATURE), "0 is greedy. Absent: what the checkpoint asks for, else 1."),
        Field("top_k", whole(-1, MOST), "Draw from the k most likely tokens; 0 and -1 are off."),
        Field("logit_bias", Table(Number(-100, 100), maximum=300), "Added to the logits of these token ids."),
        Field("allowed_token_ids", Items(whole(0, MOST), maximum=MAX_ALLOWED_TOKENS), "Only these tokens may come."),
        Field("bad_words", Items(String(MAX_WORD, minimum=1), maximum=MAX_BAD_WORDS), "Words that may not come."),
        Field(
            "dry_sequence_breakers",
            Items(String(MAX_BREAKER, minimum=1), maximum=MAX_BREAKERS),
            "Texts that no repetition passes, for DRY.",
        ),
        Field("mirostat", whole(0, 2), "2 keeps the surprise of tokens near mirostat_tau; 0 is off."),
        Field(
            "samplers",
            Items(String(MAX_BREAKER), maximum=len(KNOWN)),
            "The samplers to apply, in this order; those left out are off.",
        ),
        Field("stop_repeats", whole(0, MAX_REPEATS), "End a text that repeats itself this many times; 0 is off."),
        Field("seed", INT64, "Makes the draws repeatable; taken modulo 2^63."),
        Field("n", whole(1, MOST_N), "Choices for each prompt."),
        Field("stop", STOP, "Strings that end the text."),
        Field("stop_token_ids", Items(whole(0, MOST), maximum=16), "Token ids that end the text."),
        Field("include_stop_str_in_output", Boolean(), "Leave the stop string in the text.", option="include_stop"),
        Field("priority", INT64, "Smaller is served first, in a session with policy='priority'."),
        Field("steer", STEER, "Names of steering vectors that the server was started with, or {name: factor}."),
        Field("cache_salt", String(1_024, minimum=1), "Cached pages are shared with this salt only.", option="salt"),
    )
}


def _field(option: options.Option) -> Field:
    """Return the field of an option that requests write as the session takes it."""
    words = options.words_of(Sampling).get(option.name, "")
    match option.check:
        case options.Whole(low, high):
            kind: Kind = whole(low, MOST if high is None else high)
        case options.Real(low, high):
            kind = Number(low, high)
        case options.Flag():
            kind = Boolean()
        case _:
            raise AssertionError(f"requests need a field for {option.name}")
    return Field(option.name, kind, f"{words[:1].upper()}{words[1:]}")


_OFFERED = [option for option in options.options_of(Sampling) if "http" in option.also]
SAMPLING = tuple(_OTHERWISE.get(option.name) or _field(option) for option in _OFFERED)
SAMPLING_BY_NAME = {field.name: field for field in SAMPLING}

SERVING = (
    Field("model", String(maximum=512), "The name of a served model; may be left out."),
    Field("stream", Boolean(), "Send the answer as server-sent events, while it is made."),
    Field("stream_options", STREAM_OPTIONS, "include_usage, continuous_usage_stats; only with stream."),
    Field("request_id", REQUEST_ID, "Names the request in its id, for /abort and in the log; or X-Request-Id."),
    Field("return_token_ids", Boolean(), "Add token_ids and weights_versions to choices, and prompt_token_ids."),
    Field("return_tokens_as_token_ids", Boolean(), "Name tokens in log-probabilities as token_id:123."),
    Field("prompt_logprobs", whole(0, 20), "Log-probabilities of the prompt's tokens, as prompt_logprobs."),
    Field("add_special_tokens", Boolean(), "Let the tokenizer add special tokens to the prompt."),
)

HARMLESS = (
    ignored("user", "Not used; see cache_salt for keeping users' caches apart."),
    ignored("metadata", "Not stored."),
    ignored("store", "Nothing is stored."),
    ignored("service_tier", "There is one."),
    ignored("prompt_cache_key", "Prefixes are found by their content."),
    ignored("prompt_cache_options", "Prefixes are found by their content."),
    ignored("prompt_cache_retention", "Pages are kept while there is room."),
    ignored("safety_identifier", "Not used."),
    ignored("verbosity", "Not a property of these models."),
    ignored("spaces_between_special_tokens", "Byte-level decoding has no such spaces."),
)

NOT_SERVED = (
    refused("use_beam_search", "there is no beam search", False),
    refused("length_penalty", "it belongs to beam search", 1, 1.0),
    refused("early_stopping", "it belongs to beam search", False),
    refused("logits_processors", "processors are given to open()", []),
    refused("capture", "arrays are for callers in the server's own process", {}),
    refused("taps", "taps are given to open()", []),
    refused("until", "functions are for callers in the server's own process"),
    refused("patch", "arrays are for callers in the server's own process", {}),
    refused("truncate_prompt_tokens", "shorten the prompt before sending it"),
    refused("skip_special_tokens", "special tokens have no text here; ask for return_token_ids", True),
    refused("prompt_embeds", "prompts are text or token ids", []),
    refused("kv_transfer_params", "the cache stays in this process"),
    refused("vllm_xargs", "it belongs to vLLM", {}),
    refused("moderation", "there is no moderation"),
    refused("guided_json", "its newer name is structured_outputs.json"),
    refused("guided_regex", "its newer name is structured_outputs.regex"),
    refused("guided_choice", "its newer name is structured_outputs.choice"),
    refused("guided_grammar", "its newer name is structured_outputs.grammar"),
    refused("guided_decoding_backend", "there is one"),
    refused("guided_whitespace_pattern", "there is none"),
)

STRUCTURED = (
    Field("response_format", FORMAT, "text, json_object, or json_schema with a schema."),
    Field("structured_outputs", OBJECT, "One of json (a schema), regex, choice, grammar, json_object."),
)

COMPLETIONS = Endpoint(
    "/v1/completions",
    "Continue prompts",
    (
        Field("prompt", PROMPTS, "A string, token ids, or a list of strings or of lists of token ids.", required=True),
        *SERVING,
        Field("max_tokens", whole(0, MOST), "New tokens at most. Absent: 16. 0 scores a prompt, with echo."),
        Field("echo", Boolean(), "Begin the text with the prompt; with logprobs, its tokens' ones too."),
        Field("logprobs", whole(0, 20), "Log-probabilities of the output, with the k most likely tokens."),
        Field("best_of", whole(1, MOST_N), "Only 1 or the same as n."),
        *SAMPLING,
        *STRUCTURED,
        refused("suffix", "text is continued, not filled in", ""),
        *HARMLESS,
        *NOT_SERVED,
    ),
)

TRUNCATION = Field(
    "truncation",
    OneOf(("auto", "disabled")),
    "auto: leave out the oldest turns of a conversation that is longer than the context; left_out then counts them.",
)
REASONING = Shape((("effort", String(maximum=64)), ("max_tokens", whole(0, MOST)), ("summary", String(maximum=64))))
_BUDGET = "Tokens that the model may reason before the end of reasoning is written for it; -1: any number."
BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget")  # llama.cpp's and vLLM's
_BUDGET_NAME = "a budget of reasoning is reasoning_budget_tokens, next to messages"
REASONING_FIELDS = (
    Field("reasoning", REASONING, "effort, as reasoning_effort; max_tokens, as reasoning_budget_tokens."),
    *(Field(name, whole(-1, MOST), _BUDGET) for name in BUDGETS),
    Field("reasoning_budget_message", String(4_096), "A text that is written before the end of a used up budget."),
    *(refused(name, _BUDGET_NAME) for name in ("reasoning_budget", "thinking_budget", "max_thinking_tokens")),
    *(
        refused(name, f"unpack it; {_BUDGET_NAME}", {})
        for name in ("extra_body", "extra_args", "custom_params", "nvext")
    ),
    refused("reasoning_control", "reasoning can't be ended from outside; give it a budget", False),
)
_EFFORT = (
    "A variable of the chat template, where it has one; 'none' sets enable_thinking=false, and ends reasoning at once."
)
CHAT = Endpoint(
    "/v1/chat/completions",
    "Answer a conversation",
    (
        Field("messages", Items(MESSAGE, minimum=1, maximum=MOST_MESSAGES), "The conversation so far.", required=True),
        *SERVING,
        Field("max_completion_tokens", whole(1, MOST), "New tokens at most. Absent: what the context has room for."),
        Field("max_tokens", whole(1, MOST), "The older name of max_completion_tokens."),
        Field("logprobs", Boolean(), "Log-probabilities of the output's tokens."),
        Field("top_logprobs", whole(0, 20), "With logprobs: of this many most likely tokens at each position, too."),
        *SAMPLING,
        Field("reasoning_effort", String(64), _EFFORT),
        *REASONING_FIELDS,
        Field("chat_template_kwargs", OBJECT, "Variables of the chat template."),
        TRUNCATION,
        Field("documents", Items(OBJECT, maximum=MOST_MESSAGES), "Documents, for templates that read them."),
        Field("add_generation_prompt", Boolean(), "Begin the assistant's turn; true by default."),
        Field("continue_final_message", Boolean(), "Go on with the last message instead of a new one."),
        Field("chat_template", String(), "A template for this request, if the server allows it."),
        Field("echo", Boolean(), "Begin the text with the last message, if that is continued."),
        *STRUCTURED,
        Field("tools", Items(TOOL, maximum=512), "Functions that the model may call."),
        Field("tool_choice", TOOL_CHOICE, "none, auto, required, one function, or allowed_tools."),
        Field("parallel_tool_calls", Boolean(), "false: at most one call in an answer."),
        Field("include_reasoning", Boolean(), "false: leave out what the model thought before its answer."),
        refused("functions", "its newer name is tools"),
        refused("function_call", "its newer name is tool_choice", "none", "auto"),
        refused("audio", "answers are text"),
        refused("modalities", "answers are text", ["text"], []),
        refused("web_search_options", "the server searches nothing"),
        refused("mm_processor_kwargs", "messages are text", {}),
        ignored("prediction", "A hint about speed; see prompt_lookup of open()."),
        *HARMLESS,
        *NOT_SERVED,
    ),
)
