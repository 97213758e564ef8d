"""The drafters of a session: the one place that reads the option `drafts`, and chooses them by it.

It imports what few sessions use where they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rekindle._src.core.config import DraftSource, EngineConfig, ResolvedConfig
from rekindle._src.core.names import nearest
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.drafts.checkpoint import Target
    from rekindle._src.drafts.kind import DraftKind, DraftOpening
    from rekindle._src.execution.drafting import DraftWorker
    from rekindle._src.models.config import Pages
    from rekindle._src.programs.drafting import DraftPrograms
    from rekindle._src.scheduling.drafting.drafter import Drafter
    from rekindle._src.scheduling.sequence import Limits
    from rekindle._src.text.tokenizer import Tokenizer

# The modules of drafters with a checkpoint of their own, by its model_type. That of any other is a small model.
OF_CHECKPOINTS = {
    "dflash": "block", "eagle3": "eagle", "gemma4_assistant": "assistant", "gemma4_unified_assistant": "assistant",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class DraftPlan:
    """The drafters of a session, in their order: the first with a proposal for a row has that row."""

    kinds: tuple[DraftKind, ...] = ()

    def drafters(self, limits: Limits) -> tuple[Drafter, ...]:
        """Return their rules on the host."""
        return tuple(kind.drafter(limits) for kind in self.kinds)

    @property
    def programs(self) -> DraftPrograms:
        """Their part of programs. One of them has a part at most, the last one."""
        from rekindle._src.programs.drafting import NO_DRAFTS

        return self.kinds[-1].programs if self.kinds else NO_DRAFTS

    @property
    def pages(self) -> tuple[Pages, ...]:
        """The pages that they add after the pages of the model's layers."""
        return self.programs.pages

    @property
    def device_bytes(self) -> int:
        """The bytes of their own weights on each device."""
        return sum(kind.device_bytes for kind in self.kinds)

    @property
    def mark(self) -> str:
        """Their part of the identity of pages, which follows the model's fingerprint."""
        return "".join(kind.mark for kind in self.kinds)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of their weights; None if they have none of their own."""
        return next((kind.fingerprint for kind in self.kinds if kind.fingerprint is not None), None)

    def page_bytes(self, config: ResolvedConfig) -> int:
        """Return the bytes of pages of their own, one for each page of the session."""
        return sum(kind.page_bytes(config) for kind in self.kinds)

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError unless their tokens are the model's."""
        for kind in self.kinds:
            kind.check(tokenizer)

    def open(self, opening: DraftOpening) -> DraftWorker:
        """Read their weights, and return the owner of these; one without weights if they have none."""
        from rekindle._src.execution.drafting import NO_WORKER  # plans are made where nothing runs, too

        return next((weights for kind in self.kinds if (weights := kind.open(opening)) is not None), NO_WORKER)


def reads_own_head(config: EngineConfig) -> bool:
    """True if a head that the model may have of its own is read with it."""
    return config.drafts == "mtp"


def draft_plan(config: EngineConfig, target: Callable[[], Target], located: Callable[[str], str | Path]) -> DraftPlan:
    """Return the drafters of a session. The headers of their own checkpoints are read here.

    `target` returns the model that is drafted for, and `located` the place of a checkpoint. Raise ConfigError for what
    can't draft for this model.
    """
    kinds = of_texts(config.drafts, config.prompt_lookup)
    if reads_own_head(config):
        from rekindle._src.drafts.head import own_head

        kinds = (*kinds, own_head(target()))
    elif config.drafts not in get_args(DraftSource):
        kinds = (*kinds, _of_a_checkpoint(config.drafts, target(), located))
    return DraftPlan(kinds)


def of_texts(drafts: str, prompt_lookup: int) -> tuple[DraftKind, ...]:
    """Return the drafters that have no weights."""
    if drafts == "none":
        if prompt_lookup:
            raise ConfigError(
                "prompt_lookup", prompt_lookup, 'asks for drafts, and drafts="none" for none', "Use one of them"
            )
        return ()
    from rekindle._src.drafts.forced import ForcedKind

    if drafts == "suffix":
        from rekindle._src.drafts.suffix import SuffixKind

        return ForcedKind(), SuffixKind(prompt_lookup)
    if not prompt_lookup:
        return (ForcedKind(),)
    from rekindle._src.drafts.lookup import LookupKind

    return ForcedKind(), LookupKind(prompt_lookup)


def _of_a_checkpoint(name: str, target: Target, located: Callable[[str], str | Path]) -> DraftKind:
    """Return the drafter that an option names. Raise ConfigError for one that can't draft for this model."""
    from rekindle._src.drafts.checkpoint import DraftCheckpoint, refuse
    from rekindle._src.models.loading.hub import on_disk

    folder, model, placement = located(name), target.model, target.placement
    if on_disk(folder) is None and "/" not in name and ":" not in name:  # a misspelled word
        words = get_args(DraftSource)
        nearby = nearest(name, words)
        close = f"Did you mean {nearby!r}? " if nearby else ""
        fix = f"{close}Use one of {', '.join(map(repr, words))}, or a model"
        refuse(name, "is neither a known source nor a model on this machine", fix)
    if not placement.one_pool:
        problem = "is another model, which can't draft in several data shards or processes"
        refuse(name, problem, "Use devices of one process, with one data shard")
    if model.is_bidirectional:
        refuse(name, f"drafts tokens, and this {model.model_type} model makes none", 'Use drafts="auto"')
    found = DraftCheckpoint.describe(name, folder, target)
    module = OF_CHECKPOINTS.get(found.config.model_type, "model")
    kind: DraftKind = import_module(f"{__package__}.{module}").kind_of(found, target)
    return kind
