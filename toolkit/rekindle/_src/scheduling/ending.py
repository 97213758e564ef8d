"""The reasons for which a sequence ends with a token."""

from __future__ import annotations

from rekindle._src.core.guides import Guided
from rekindle._src.core.records import FinishReason
from rekindle._src.scheduling.sequence import Sequence


def reason_to_end(sequence: Sequence, token: int | None, guided: Guided | None) -> FinishReason | None:
    """Return why a sequence ends with its latest token; None if it continues."""
    request = sequence.request
    # No id ends the request within its first min_tokens tokens, where the device masks them.
    if sequence.generated > request.sampling.min_tokens:
        if token in request.eos_ids:
            return FinishReason.EOS
        if token in request.stop_ids:
            return FinishReason.STOP
    if guided is not None and guided.ended:
        if guided.by_eos:
            return FinishReason.EOS
        return sequence.limit_reason if guided.steered else FinishReason.GRAMMAR
    return sequence.limit_reason if sequence.generated >= sequence.limit else None
