"""How requests end: by a token, or with the error of a failure.

A step that raised fails every request in it. A row that could not be prepared fails its own request, and a page that
could not be restored fails the requests that hold it; the step runs without them.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle._src.core import html
from rekindle._src.core.records import FinishReason, RowResult, StepPlan
from rekindle._src.scheduling.sequence import Sequence
from rekindle.errors import CompileError, NoTokenLeft, RekindleError, RequestFailed, StepFailed


def end_with(sequence: Sequence, output: RowResult) -> FinishReason | RekindleError | None:
    """Return why a sequence ends with its latest token, or with which error; None if it continues."""
    request, token, guided = sequence.request, output.token_id, output.guided
    # No id ends the request within its first min_tokens tokens, where the device masks them.
    if sequence.generated > request.sampling.min_tokens:
        if token in request.eos_ids:
            return FinishReason.EOS
        if token in request.stop_ids:
            return FinishReason.STOP
    if guided is not None and guided.ended:
        if guided.by_eos:
            return FinishReason.EOS
        if guided.steered:
            return sequence.limit_reason
        return too_short(sequence) if sequence.generated < request.sampling.min_tokens else FinishReason.GRAMMAR
    return sequence.limit_reason if sequence.generated >= sequence.limit else None


def step_error(plan: StepPlan, cause: BaseException) -> StepFailed:
    """Return the error of a request whose step raised."""
    fix = "" if isinstance(cause, CompileError) else " Submit it again."  # it would not compile again
    error = StepFailed(f"Step {plan.step}, which carried this request, raised {cause!r}.{fix}")
    error.__cause__ = cause
    return error


def request_error(sequence: Sequence, cause: Exception) -> RekindleError:
    """Return the error of a request that could not join its step; a typed cause is passed on as it is."""
    if isinstance(cause, RekindleError):
        return cause
    error = RequestFailed(f"Request {sequence.id} could not be made part of a step: {cause!r}. Check its options.")
    error.__cause__ = cause
    return error


def holding(sequences: Iterable[Sequence], pages: Iterable[int]) -> list[tuple[Sequence, int]]:
    """Return the sequences that hold one of `pages`, each with the first such page of its table."""
    targets = set(pages)
    holders = []
    for sequence in sequences:
        page = next((page for page in sequence.pages.tolist() if page in targets), None)
        if page is not None:
            holders.append((sequence, page))
    return holders


def not_finite(sequence: Sequence) -> RequestFailed:
    """Return the error of a request whose next token or embedding would come from NaN or infinite numbers."""
    if not sequence.request.generates:
        return RequestFailed(
            f"The model's numbers for request {sequence.id} are not finite (NaN or infinity), so it has no embedding. "
            "Weights are broken, or overflow in this dtype: `rekindle doctor --model MODEL` names the first layer; or "
            "open it with another dtype."
        )
    return RequestFailed(
        f"The model's numbers for token {sequence.generated + 1} of request {sequence.id} are not finite (NaN or "
        "infinity), so it has no next token. Weights are broken, or overflow in this dtype: `rekindle doctor "
        "--model MODEL` names the first layer; or open it with another dtype."
    )


def too_short(sequence: Sequence) -> NoTokenLeft:
    """Return the error of a request whose grammar allows no more tokens before `min_tokens` are generated."""
    return NoTokenLeft(
        f"The text of request {sequence.id} is complete after {html.count(sequence.generated, 'token')}: its grammar "
        f"lets nothing follow, and min_tokens={sequence.request.sampling.min_tokens} asks for more. Lower min_tokens."
    )
