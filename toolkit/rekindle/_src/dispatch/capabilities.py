"""The capabilities of requests, called together, in the order of their checks at intake."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rekindle._src.core.extension import NONE, Extensions
from rekindle._src.core.records import IntArray, Request
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, KeyedPrompt, Part, PromptFit

Resources = Mapping[Capability, Any]
NO_RESOURCES: Resources = MappingProxyType({})


def _overrides(capability: Capability, method: str) -> bool:
    return getattr(type(capability), method) is not getattr(Capability, method)


class Capabilities:
    """The capabilities of requests, called together."""

    def __init__(self, *entries: Capability) -> None:
        self.entries = entries
        self._fitting = tuple(one.fit for one in entries if _overrides(one, "fit"))
        self._spelling = tuple(one.spell for one in entries if _overrides(one, "spell"))
        self._expanding = tuple(one.expand for one in entries if _overrides(one, "expand"))
        self._waiting = tuple(one.waits for one in entries if _overrides(one, "waits"))
        self._overtaken = tuple(one.overtaken for one in entries if _overrides(one, "overtaken"))
        self._resources = tuple(one for one in entries if _overrides(one, "resource"))
        self._slow = tuple(one.slow for one in entries if _overrides(one, "slow"))
        self._admitting = tuple(one for one in entries if _overrides(one, "admit"))
        self._keying = tuple(one.keying for one in entries if _overrides(one, "keying"))
        self._parts = tuple(one.part for one in entries if _overrides(one, "part"))

    def fit(self, submission: Submission, front: Front) -> PromptFit:
        """Return the choice of the submission's prompt by its length."""
        found = (fit(submission, front) for fit in self._fitting)
        return next((one for one in found if one is not None), None) or PromptFit(submission)

    def spelled(self, submission: Submission, front: Front) -> Submission:
        """Return the submission with its text as it is encoded. Raise the request's error."""
        for spell in self._spelling if submission.text is not None else ():
            submission = submission._replace(text=spell(submission, submission.text or "", front))
        return submission

    def expanded(self, submission: Submission, token_ids: IntArray, front: Front) -> IntArray:
        """Return the token ids of the prompt with placeholder tokens expanded. Raise the request's error."""
        for expand in self._expanding:
            token_ids = expand(submission, token_ids, front)
        return token_ids

    def waits(self, submission: Submission, front: Front) -> bool:
        """True if a submission has to wait before it is admitted."""
        return any(waits(submission, front) for waits in self._waiting)

    def overtaken(self, submission: Submission, front: Front) -> bool:
        """True if controls go on while it waits."""
        return any(overtaken(submission, front) for overtaken in self._overtaken)

    def slow(self, submission: Submission) -> bool:
        """True if `admit` may take long."""
        return any(slow(submission) for slow in self._slow)

    async def resources(self, submission: Submission, front: Front) -> Resources:
        """Wait for the resources that `admit` needs, and return them by capability. Raise the request's error."""
        return {one: await one.resource(submission, front) for one in self._resources}

    def admit(
        self, submission: Submission, token_ids: IntArray, front: Front, resources: Resources = NO_RESOURCES
    ) -> Extensions:
        """Return the extensions of a request with this prompt. Raise `InvalidRequest` if one is unavailable."""
        admitted = [one.admit(submission, token_ids, front, resources.get(one)) for one in self._admitting]
        extensions = [extension for extension in admitted if extension is not None]
        return Extensions(*extensions) if extensions else NONE

    def keyed_request(self, prompt: KeyedPrompt, front: Front) -> Request:
        """Return a prompt as a request that says on what its pages depend, and no more. It is submitted nowhere.

        Raises `InvalidRequest` as its own request would.
        """
        keyed = [keying(prompt, front) for keying in self._keying]
        extensions = Extensions(*[extension for extension in keyed if extension is not None])
        return Request("", prompt.token_ids, prompt.sampling, extensions=extensions)

    def parts(self, request: Request, submission: Submission, front: Front) -> tuple[Part, ...]:
        """Return the parts of a sequence's output."""
        found = [part(request, submission, front) for part in self._parts]
        return tuple([part for part in found if part is not None])
