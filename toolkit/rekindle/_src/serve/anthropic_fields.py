"""The fields of Anthropic's messages."""

from __future__ import annotations

from rekindle._src.serve.fields import Endpoint, Field, ignored, refused
from rekindle._src.serve.kinds import Choice, Either, Flag, Items, Number, Shape, Text, whole
from rekindle._src.serve.openai_fields import MOST, MOST_MESSAGES, OBJECT

BLOCKS = Items(Shape((("type", Text()),), ("type",)))
CONTENT = Either("a string or a list of blocks", ((str, Text()), (list, BLOCKS)))
MESSAGE = Shape((("role", Choice(("user", "assistant", "system"))), ("content", CONTENT)), ("role", "content"))
TOOL = Shape(
    (("name", Text(maximum=256, minimum=1)), ("description", Text()), ("input_schema", OBJECT), ("type", Text())),
    ("name",),
)
TOOL_CHOICE = Shape(
    (("type", Choice(("auto", "any", "tool", "none"))), ("name", Text()), ("disable_parallel_tool_use", Flag())),
    ("type",),
)
THINKING = Shape(
    (("type", Choice(("enabled", "disabled", "adaptive", "between_tools"))), ("budget_tokens", whole(0, MOST))),
    ("type",),
)

OUTPUT = Shape((("format", OBJECT), ("effort", Text(maximum=64))))

_SHARED_FIELDS = (
    Field("model", Text(maximum=512), "The name of a served model; may be left out."),
    Field("messages", Items(MESSAGE, minimum=1, maximum=MOST_MESSAGES), "The conversation so far.", required=True),
    Field("system", CONTENT, "What the model is told before the conversation."),
    Field("tools", Items(TOOL, maximum=512), "Functions that the model may call."),
    Field("tool_choice", TOOL_CHOICE, "auto, none, any, or one tool."),
    Field("thinking", THINKING, "Whether the model thinks before it answers, where its template knows that."),
    Field("output_config", OUTPUT, "format: a json_schema that the text has to follow; effort, where it is known."),
    Field("output_format", OBJECT, "The older name of output_config.format."),
    ignored("cache_control", "Prefixes are cached by their content."),
    ignored("speed", "There is one."),
    ignored("diagnostics", "There are none."),
    ignored("user_profile_id", "Not used."),
    ignored("workspace_id", "Not used."),
    refused("mcp_servers", "the server connects to no others", []),
    refused("container", "there are no containers"),
    refused("context_management", "shorten the conversation before sending it"),
)

MESSAGES = Endpoint(
    "/v1/messages",
    "Answer a conversation, as Anthropic's API does",
    (
        *_SHARED_FIELDS,
        Field("max_tokens", whole(1, MOST), "New tokens at most.", required=True),
        Field("stop_sequences", Items(Text(minimum=1), maximum=64), "Strings that end the text.", option="stop"),
        Field("stream", Flag(), "Send the answer as server-sent events, while it is made."),
        Field("temperature", Number(0, 100), "0 is greedy. Absent: what the checkpoint asks for, else 1."),
        Field("top_k", whole(-1, MOST), "Draw from the k most likely tokens."),
        Field("top_p", Number(0, 1), "Draw from the most likely tokens that have this probability together."),
        ignored("metadata", "Not stored."),
        ignored("service_tier", "There is one."),
        ignored("inference_geo", "It runs here."),
    ),
)
COUNT_TOKENS = Endpoint("/v1/messages/count_tokens", "How many tokens a conversation has", _SHARED_FIELDS)
