"""Pictures in a session's blueprint. What only models that read pictures need is imported for those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments, Owner, SessionPlan
from rekindle._src.capabilities.soft_prompts.plan import takes_rows
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.plan import ProgramPlan

if TYPE_CHECKING:
    from rekindle._src.capabilities.pictures.reading import EncoderPlan
    from rekindle._src.text.tokenizer import Tokenizer


class PicturesPlan(CapabilityPlan):
    """How a session reads pictures, if it reads them."""

    def __init__(self, encoder: EncoderPlan | None) -> None:
        self._encoder = encoder

    @classmethod
    def of(cls, arguments: OpenArguments) -> PicturesPlan:
        """Return the plan of a checkpoint. Raise typed errors for damage."""
        checkpoint = arguments.checkpoint
        if checkpoint is None or checkpoint.found.stored.others is None:
            return cls(None)
        from rekindle._src.capabilities.pictures.reading import encoder_plan

        return cls(encoder_plan(checkpoint, arguments.config))

    @property
    def ahead(self) -> ProgramVariant:
        return PLAIN_VARIANT if self._encoder is None else ProgramVariant.PICTURES

    @property
    def device_bytes(self) -> int:
        return 0 if self._encoder is None else self._encoder.device_bytes

    def features(self, plan: ProgramPlan) -> Sequence[Feature]:
        if plan.model.pictures is None and not takes_rows(plan.model):  # callers' rows are the same to a step
            return ()
        from rekindle._src.capabilities.pictures.step import PictureOption, Pictures

        stream = plan.graph.precision.stream
        part = Pictures(plan.model, plan.config, stream, ahead=self._encoder is not None)
        return (Feature(PictureOption(plan.model), part),)

    def facts(self, programs: ProgramPlan) -> Mapping[str, object]:
        return {"pictures": None if self._encoder is None else self._encoder.identity.hex()}

    def open(self, session: SessionPlan, tokenizer: Tokenizer | None) -> Owner | None:
        if self._encoder is None:
            return None
        from rekindle._src.capabilities.pictures.owner import SessionPictures

        assert tokenizer is not None, "it is opened late"
        return SessionPictures.open(self._encoder, session, tokenizer)
