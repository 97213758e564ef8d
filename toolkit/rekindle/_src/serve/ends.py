"""The ends of sequences in OpenAI's words."""

from __future__ import annotations

from rekindle._src.core.records import FinishReason

FINISHED = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.GRAMMAR: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.FAILED: "error",
}


def finish_of(reason: FinishReason | None) -> str | None:
    """Return the `finish_reason` of a choice."""
    return None if reason is None else FINISHED[reason]
