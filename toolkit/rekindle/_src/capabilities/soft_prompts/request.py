"""Soft prompts as a capability of requests: their texts are encoded, and their rows get places among the tokens.

Rows are named by their content in the prefix tree, so that a second request with the same rows finds their pages.
"""

from __future__ import annotations

import numpy as np

from rekindle._src.core.extension import Extension
from rekindle._src.core.prompt_rows import PromptRows, RowSpan
from rekindle._src.core.records import IntArray, Request
from rekindle._src.core.soft_prompt import EmbeddedPrompt
from rekindle._src.dispatch.backend import Front, SessionService, Submission
from rekindle._src.dispatch.capability import Capability, Fields, Part, SequenceEnd
from rekindle.errors import InvalidRequest

ROW_WIDTH: SessionService[int] = SessionService("soft prompts")  # the hidden size of models that take rows
PLACEHOLDER = 0  # the token id where a row stands


class SoftPromptIntake(Capability[None]):
    """Rows among the tokens of the prompt."""

    def expand(self, submission: Submission, token_ids: IntArray, front: Front) -> IntArray:
        embedded = submission.extensions.get(EmbeddedPrompt)
        if embedded is None or embedded.starts:  # a fork's tokens have their places already
            return token_ids
        parts: list[IntArray] = []
        special, length = embedded.prompt.add_special_tokens, 0
        for part in embedded.prompt.parts:
            if isinstance(part, str):
                own = np.asarray(front.tokenizer.encode(part, add_special_tokens=special), np.int32)
                special = False
            elif part.ndim == 1:
                own = part
            else:
                embedded.starts.append(length)
                own = np.full(len(part), PLACEHOLDER, np.int32)
            parts.append(own)
            length += len(own)
        return np.concatenate(parts)

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: None) -> Extension | None:
        embedded = submission.extensions.get(EmbeddedPrompt)
        if embedded is None:
            return None
        width, prompt = ROW_WIDTH.of(front), embedded.prompt
        if width is None:
            problem = f"can't be read: {front.model or 'the model'} takes no rows in the place of embeddings here"
            raise InvalidRequest("prompt", prompt, problem, "Open a decoder in this process, and pass text elsewhere")
        if prompt.width != width:
            problem = f"has rows of {prompt.width:,} numbers, and the model's hidden size is {width:,}"
            raise InvalidRequest("prompt", prompt, problem, "Use rows that were made for this model")
        pairs = zip(embedded.starts, prompt.rows, prompt.digests, strict=True)
        spans = tuple(RowSpan(start, start + len(rows), digest) for start, rows, digest in pairs)
        rows = tuple(rows[np.newaxis] for rows in prompt.rows)
        return PromptRows(spans, rows, wordless=True, kind="soft prompt", count=len(spans))

    def part(self, request: Request, submission: Submission, front: Front) -> Part[None] | None:
        embedded = submission.extensions.get(EmbeddedPrompt)
        return None if embedded is None else EmbeddedOutput(embedded)


class EmbeddedOutput(Part[None]):
    """The soft prompt on its completion, which forks go on from."""

    __slots__ = ("_embedded",)

    def __init__(self, embedded: EmbeddedPrompt) -> None:
        self._embedded = embedded

    def completion(self, end: SequenceEnd) -> Fields:
        return {"embedded": self._embedded}
