"""The fields of OpenAI's responses."""

from __future__ import annotations

from rekindle._src.serve.fields import Endpoint, Field, ignored, refused
from rekindle._src.serve.kinds import Anything, Choice, Either, Flag, Items, Number, Shape, Text, whole
from rekindle._src.serve.openai_fields import MOST, MOST_MESSAGES, OBJECT

TOOL = Shape((("type", Text()), ("name", Text(maximum=256, minimum=1)), ("parameters", OBJECT)), ("type",))
INPUT = Either("a string or a list of items", ((str, Text()), (list, Items(OBJECT, minimum=1, maximum=MOST_MESSAGES))))
REASONING = Shape((("effort", Text(maximum=64)), ("summary", Text(maximum=64))))
FORMAT = Shape((("format", Shape((("type", Choice(("text", "json_object", "json_schema"))),), ("type",))),))

RESPONSES = Endpoint(
    "/v1/responses",
    "Answer a conversation; of the answer, items are kept for a while",
    (
        Field("model", Text(maximum=512), "The name of a served model; may be left out."),
        Field("input", INPUT, "Text, or the items of the conversation so far.", required=True),
        Field("instructions", Text(), "What the model is told before the conversation."),
        Field("max_output_tokens", whole(1, MOST), "New tokens at most.", option="max_tokens"),
        Field("temperature", Number(0, 100), "0 is greedy. Absent: what the checkpoint asks for, else 1."),
        Field("top_p", Number(0, 1), "Draw from the most likely tokens that have this probability together."),
        Field("top_logprobs", whole(0, 20), "Log-probabilities of this many tokens at each position."),
        Field("stream", Flag(), "Send the answer as server-sent events, while it is made."),
        Field("tools", Items(TOOL, maximum=512), "Functions that the model may call."),
        Field(
            "tool_choice",
            Either("a word or a tool", ((str, Text()), (dict, OBJECT))),
            "none, auto, required, a function, or allowed_tools.",
        ),
        Field("parallel_tool_calls", Flag(), "false: at most one call in an answer."),
        Field("reasoning", REASONING, "effort is for the chat template; there are no summaries."),
        Field("text", FORMAT, "The format of the text."),
        Field("include", Items(Text()), "message.output_text.logprobs; others bring nothing here."),
        Field("metadata", Anything(), "Comes back with the answer."),
        ignored("stream_options", "There is nothing to choose."),
        ignored("user", "Not used."),
        ignored("safety_identifier", "Not used."),
        ignored("service_tier", "There is one."),
        ignored("prompt_cache_key", "Prefixes are found by their content."),
        ignored("prompt_cache_options", "Prefixes are found by their content."),
        ignored("prompt_cache_retention", "Pages are kept while there is room."),
        ignored("max_tool_calls", "It is about tools that run at OpenAI."),
        Field("store", Flag(), "false: later requests can't name items of this answer by their ids."),
        refused("previous_response_id", "conversations are not stored: send the whole one each time"),
        refused("conversation", "conversations are not stored: send the whole one each time"),
        refused("background", "an answer belongs to its connection", False),
        refused("background_options", "an answer belongs to its connection", {}),
        refused("prompt", "there are no stored prompts: send instructions and input"),
        refused("truncation", "shorten the conversation before sending it", "disabled", "auto"),
        refused("context_management", "shorten the conversation before sending it", []),
        refused("access_programs", "there are none", []),
        refused("image", "answers are text"),
        refused("moderation", "there is no moderation"),
    ),
)
