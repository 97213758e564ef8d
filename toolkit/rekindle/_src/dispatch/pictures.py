"""Pictures as a capability of requests."""

from __future__ import annotations

from rekindle._src.core.pictures import PictureUse
from rekindle._src.core.records import IntArray
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability


class PictureIntake(Capability):
    """Pictures in the prompt."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: object) -> PictureUse | None:
        return submission.extensions.get(PictureUse)
