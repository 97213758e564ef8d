"""Reasons and errors with which requests end."""

from __future__ import annotations

from rekindle._src.core import words
from rekindle._src.core.own_failure import one_line
from rekindle._src.core.records import FinishReason, RowResult, StepPlan
from rekindle._src.scheduling.sequence import Sequence
from rekindle.errors import CompileError, NoTokenLeft, RekindleError, RequestFailed, StepFailed


def end_with(sequence: Sequence, output: RowResult) -> FinishReason | RekindleError | None:
    """Return why a sequence ends with its latest token, or with which error; None if it continues."""
    request, token = sequence.request, output.token_id
    # No id ends the request within its first min_tokens tokens, where the device masks them.
    if sequence.tokens.generated > request.sampling.min_tokens:
        if token in request.eos_ids:
            return FinishReason.EOS
        if token in request.stop_ids:
            return FinishReason.STOP
    ended = sequence.extensions.ends(output)
    if ended is FinishReason.LENGTH:
        return sequence.limit_reason
    if ended is not None:
        early = ended is not FinishReason.EOS and sequence.tokens.generated < request.sampling.min_tokens
        return too_short(sequence) if early else ended
    return sequence.limit_reason if sequence.tokens.generated >= sequence.limit else None


def step_error(plan: StepPlan, cause: BaseException) -> StepFailed:
    """Return the error for a request in a step that raised."""
    fix = "" if isinstance(cause, CompileError) else " Submit it again."  # it would not compile again
    error = StepFailed(f"Step {plan.step}, which carried this request, raised {cause!r}.{fix}")
    error.__cause__ = cause
    return error


def program_error(sequence: Sequence, cause: Exception) -> StepFailed:
    """Return the error for a request with a program that could not be made."""
    error = StepFailed(f"Request {sequence.id} needs a program that could not be made: {cause!r}.")
    error.__cause__ = cause
    return error


def request_error(sequence: Sequence, cause: Exception) -> RekindleError:
    """Return the error of a request that could not join its step; a typed cause is passed on as it is."""
    if isinstance(cause, RekindleError):
        return cause
    error = RequestFailed(f"Request {sequence.id} could not be made part of a step: {cause!r}. Check its options.")
    error.__cause__ = cause
    return error


def broken_error(sequence: Sequence, cause: BaseException) -> RequestFailed:
    """Return the error for a request that ended because its own pages, slot or claims were inconsistent."""
    error = RequestFailed(
        f"Request {sequence.id} ended because its bookkeeping was broken: {one_line(cause)}. Its pages are not used "
        "again; other requests go on. Please report this defect."
    )
    error.__cause__ = cause
    return error


def not_finite(sequence: Sequence) -> RequestFailed:
    """Return the error for a request with NaN or infinite numbers for its next token or embedding."""
    of, lacks = "", "embedding"
    if sequence.generates:
        of, lacks = f"token {sequence.tokens.generated + 1} of ", "next token"
    return RequestFailed(
        f"The model's numbers for {of}request {sequence.id} are not finite (NaN or infinity), so it has no {lacks}. "
        "Weights are broken, or overflow in this dtype: `rekindle doctor --model MODEL` names the first layer; or open "
        "it with another dtype."
    )


def too_short(sequence: Sequence) -> NoTokenLeft:
    """Return the error for a request with a grammar that allows no more tokens before `min_tokens` are generated."""
    return NoTokenLeft(
        f"The text of request {sequence.id} is complete after {words.count(sequence.tokens.generated, 'token')}: its "
        f"grammar lets nothing follow, and min_tokens={sequence.request.sampling.min_tokens} asks for more. "
        "Lower min_tokens."
    )
