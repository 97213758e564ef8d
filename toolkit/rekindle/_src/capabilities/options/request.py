"""Options of requests that are only checked."""

from __future__ import annotations

import numpy as np

from rekindle._src.core.records import IntArray
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability
from rekindle.errors import InvalidRequest


class TokenIdIntake(Capability[None]):
    """The token ids of the prompt and of options are the model's."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: None) -> None:
        sampling, vocab = submission.sampling, front.vocab_size
        if not len(token_ids):
            raise InvalidRequest("prompt", submission.text, "has no tokens", "Pass at least one character or token id")
        for field, ids in (
            ("prompt", token_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", tuple(sampling.logit_bias)),
            ("logprob_token_ids", sampling.logprob_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ):
            if len(ids):
                found = token_ids if ids is token_ids else np.asarray(ids, np.int64)
                if found.min() < 0 or found.max() >= vocab:
                    wrong = found[(found < 0) | (found >= vocab)][0].item()
                    fix = f"Use ids from 0 to {vocab - 1}"
                    raise InvalidRequest(field, wrong, "is not a token id of this model", fix)


class ProcessorIntake(Capability[None]):
    """Logits processors of the session."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: None) -> None:
        for name in submission.sampling.processors:
            if name not in front.processors:
                known = ", ".join(map(repr, front.processors)) or "none"
                fix = f"Give it to open(processors=[…]); known: {known}"
                raise InvalidRequest("processors", name, "is not a processor of this session", fix)


class PriorityIntake(Capability[None]):
    """The order of requests in a session with that policy."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: None) -> None:
        priority, policy = submission.sampling.priority, front.config.policy
        if priority and policy != "priority":
            problem = f"means nothing under policy={policy!r}"
            raise InvalidRequest("priority", priority, problem, 'Open with policy="priority"')
