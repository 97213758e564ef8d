"""The words below an answer, and the settings of the next one: the same in a notebook and in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from rekindle._src.core import words
from rekindle._src.core.records import Completion, FinishReason, describe_end
from rekindle._src.core.sampling import ANSWER_TOKENS

SUGGESTIONS: Final = (
    "Tell me a short story.",
    "Explain in three sentences what a prefix cache is.",
    "Write a haiku about rain.",
)
CHOICES: Final = 5  # tokens that could stand at another one's place, the likeliest


class Setting(NamedTuple):
    """A setting that is a number: its least and most value, a step between two, and its meaning."""

    least: float
    most: float
    step: float
    meaning: str


class Preset(NamedTuple):
    """Settings with a name."""

    settings: Mapping[str, float]
    meaning: str


RANGES: Final = {
    "temperature": Setting(0.0, 2.0, 0.05, "0 is greedy: always the most likely token"),
    "top_p": Setting(0.05, 1.0, 0.05, "only the most likely tokens that make up this share"),
    "max_tokens": Setting(1, 2 * ANSWER_TOKENS, 1, "at most in an answer; one that is cut can be continued"),
}
AS_OPENED: Final = "as opened"  # the preset of the settings that a chat begins with
AS_OPENED_MEANING: Final = "What the session and the checkpoint ask for"
PRESETS: Final = {
    "precise": Preset({"temperature": 0.0, "top_p": 1.0}, "Always the most likely token: the same answer each time"),
    "balanced": Preset({"temperature": 0.7, "top_p": 0.95}, "Some variety, few slips"),
    "lively": Preset({"temperature": 1.1, "top_p": 0.98}, "More variety, more slips"),
}


def stop_of(reason: FinishReason | None, tokens: int, limit: int | None) -> str:
    """Return where an answer was cut or stopped, in words; empty if the model ended it. `limit` is the context's."""
    count = words.count(tokens, "token")
    match reason:
        case FinishReason.ABORTED:
            return f"stopped after {count}"
        case FinishReason.LENGTH:
            return f"cut at {count}"
        case FinishReason.CONTEXT:
            return f"cut at {count}: the context of {limit or 0:,} tokens is full"
    return ""


def facts_of(
    model: str, completion: Completion, reason: FinishReason | None, tokens: int, limit: int | None
) -> tuple[str, str, str, str]:
    """Return the model, the speed, the turns that the prompt leaves out, and the end of an answer with `tokens` tokens.
    `completion` is its last part.

    The speed begins with the time until the first token. `reason` is None if the answer failed.
    """
    times = completion.timings
    rate = times.decode_rate(len(completion.token_ids))
    speed = f"first token after {words.seconds(times.first_token)}, then {rate:,.0f} tokens/s" if rate else ""
    by = "ended by the model" if reason is FinishReason.EOS else "" if reason is None else describe_end(reason)
    end = stop_of(reason, tokens, limit) or ", ".join(filter(None, (words.count(tokens, "token"), by)))
    left_out = "" if completion.left_out is None else completion.left_out.words
    return model, speed, left_out, end
