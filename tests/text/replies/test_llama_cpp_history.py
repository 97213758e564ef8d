"""Tool loops of six turns in the chat templates of llama.cpp: each prompt begins with all that was written before."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from helpers import written
from helpers.real_checkpoints import llama_cpp_source
from helpers.written import Turn, Writer
from rekindle._src.calls.tool_functions import tools_of
from rekindle.errors import CheckpointError

pytestmark = pytest.mark.slow
# The tokens that end replies with calls, by the beginning of a template's name.
ENDS = {
    "Apertus": "<|assistant_end|>", "Apriel": "<|end|>", "ByteDance": "<seed:eos>", "Cohere": "<|END_OF_TURN_TOKEN|>",
    "GLM": "<|observation|>", "GigaChat": "<|message_sep|>", "Kimi-K3": "<|end_of_msg|>",
    "MiniMax-M1": "<end_of_sentence>", "MiniMax": "[e~[", "NVIDIA-Nemotron-Nano": "<SPECIAL_12>", "Reka": "<sep>",
    "Spark": "<｜end▁of▁sentence｜>", "deepseek": "<｜end▁of▁sentence｜>", "google-gemma": "<|tool_response>",
    "ibm": "<|end_of_text|>", "inclusionai": "<|role_end|>", "llama-cpp-deepseek": "<｜end▁of▁sentence｜>",
    "meetkai": "<|eot_id|>", "meta": "<|eot_id|>", "mistral": "</s>", "muse": "<|eot|>", "openai": "<|call|>",
    "poolside": "</assistant>", "tencent": "<｜hy_eos:opensource｜>", "unsloth-Apriel": "<|end|>",
    "unsloth-mistral": "</s>", "upstage": "<|calls|>",
}  # fmt: skip
DROPS = "it writes no reasoning of earlier replies"
OPENS = "its prompt begins a reply with marks that it does not write for earlier ones"
LATER = "it writes more before the first reply once there is one, or after the latest message"
APART = "it writes earlier results otherwise once others follow"
REFUSED = "it changes a list, which no template may, or wants arguments as text"
DIFFERENT = {
    "Apertus-8B-Instruct": DROPS, "LFM2.5-Instruct": DROPS, "Reka-Edge": DROPS, "upstage-Solar-Open-100B": DROPS,
    "ibm-granite-granite-3.3-2B-Instruct": DROPS, "Apriel-1.6-15b-Thinker-fixed": OPENS,
    "NVIDIA-Nemotron-Nano-v2": OPENS, "Qwen-QwQ-32B": OPENS, "deepseek-ai-DeepSeek-V3.2": OPENS,
    "google-gemma-4-31B-it-interleaved": OPENS, "google-gemma-4-31B-it": OPENS, "llama-cpp-deepseek-r1": OPENS,
    "CohereForAI-c4ai-command-r-plus-tool_use": LATER, "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": APART,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": APART, "Kimi-K2-Instruct": REFUSED, "Kimi-K2-Thinking": REFUSED,
    "meetkai-functionary-medium-v3.2": REFUSED,
}  # fmt: skip


def weather(city: str, days: int) -> str:
    """The weather.

    Args:
        city: its name
        days: how many
    """
    return f"It will be sunny in {city} for all of the {days} days, with some wind from the sea"


def turns_of(name: str, template: str) -> list[Turn]:
    """Six turns, each of which thinks where its family does, and calls; empty if there are no tools."""
    end = next((end for start, end in ENDS.items() if name.startswith(start)), "<|im_end|>")
    first = Writer(template, end=end)
    format = first.chat.reply_format(tools=True)
    if format.calls is None or not first.chat.code(tools=True).takes_tools:
        return []
    prompt = first.turn([{"role": "user", "content": "How is it?"}], "", tools=tools_of([weather])).prompt
    markers = sorted(text for text in format.markers(tools=True) if text != end and not text[-1].isspace())
    replies = []
    for day in range(1, 7):
        call = format.calls.write([("weather", {"city": "Paris", "days": day})]).removesuffix(end)
        tags, thoughts = format.thoughts, ""
        if tags is not None and format.thinks_after(prompt, None) is not False:
            opening = "" if format.opens_reasoning(prompt) else tags.opening + format.marks.header
            thoughts = f"{opening}\nThey ask for day {day}.\n{tags.closing}{tags.bridge}" + (
                "" if format.in_channels else "\n\n"
            )
        replies.append(thoughts + (call.removeprefix(">>>") if prompt.endswith(">>>") else call))
    return Writer(template, end=end, special=markers).play("How is it?", replies, [weather])


def test_the_next_prompt_begins_with_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "VOCAB", 1 << 12)
    monkeypatch.setattr(Writer, "say", lambda *_: None)  # nothing is computed
    different, whole = set(), 0
    for path in sorted((llama_cpp_source() / "models" / "templates").glob("*.jinja")):
        try:
            turns = turns_of(path.stem, path.read_text())
        except (CheckpointError, ValueError):
            different.add(path.stem)
            continue
        assert all(len(turn.reply.tool_calls) == 1 for turn in turns), path.stem
        pairs = [([*one.prompt_ids, *one.token_ids], after.prompt_ids) for one, after in itertools.pairwise(turns)]
        if all(np.array_equal(before, after[: len(before)]) for before, after in pairs):
            whole += bool(turns)
        else:
            different.add(path.stem)
    assert different == DIFFERENT.keys() and whole == 44
