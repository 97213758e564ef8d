"""Async LLM inference for JAX notebooks; a restarted kernel finds its programs and its cache again.

    session = await rekindle.open("tiny")
    done = await session.generate("Once upon a time", max_tokens=64)

Public are the names of this module, `rekindle.errors`, `rekindle.inspect_ai`, `rekindle.lm_eval`, `rekindle.models`,
`rekindle.ray`, `rekindle.serve`, `rekindle.tiny`, `rekindle.trl`, `rekindle.tunix` and the package `rekindle_kernels`.
Names load their modules at first use, so importing rekindle costs little compared with jax.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from rekindle._src.core.cell_errors import explain_cell_errors
from rekindle._src.core.config import EngineConfig, OpenOptions
from rekindle._src.core.drawable import draw_with
from rekindle._src.core.memory import gc_paused
from rekindle._src.core.sampling import Sampling, SamplingOptions
from rekindle._src.core.version import VERSION
from rekindle.errors import (
    Busy,
    CheckpointError,
    CompileError,
    ConfigError,
    InvalidRequest,
    MissingExtra,
    NoTokenLeft,
    NotParsed,
    NotPicklable,
    OutOfMemory,
    OutOfPages,
    ProcessLost,
    ProcessRefused,
    PromptTooLong,
    QueueFull,
    RekindleError,
    ReplicaLost,
    RequestAborted,
    RequestFailed,
    RequestQuarantined,
    SessionClosed,
    SessionForked,
    SnapshotRefused,
    StepFailed,
    StoreError,
    ToolServerError,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from rekindle import errors, models, ray, serve, tiny
    from rekindle._src.calls.call import Call
    from rekindle._src.calls.conversation import Conversation, Turn
    from rekindle._src.calls.embedding import Embeddings
    from rekindle._src.calls.handle import Batch, Handle, Stream, SyncStream
    from rekindle._src.calls.prompts import PromptLike
    from rekindle._src.calls.rows import RowAnswer, RowAnswers, RowMap
    from rekindle._src.calls.tool_functions import ToolLike
    from rekindle._src.calls.tool_loop import ToolChoice, ToolLoop, ToolRun
    from rekindle._src.capabilities.captures.custom import Tap, TapContext
    from rekindle._src.capabilities.gradients.request import Objective, logit_difference, logprob
    from rekindle._src.capabilities.overflow.request import OverfullChat
    from rekindle._src.capabilities.tuning.run import TuningProbe, TuningReport, TuningStep
    from rekindle._src.core.captured import Captured
    from rekindle._src.core.left_out import LeftOut
    from rekindle._src.core.mesh_shape import DeviceMesh, MeshReport
    from rekindle._src.core.records import Completion, FinishReason, Status, TextDelta, Timings, TokenLogprobs, Usage
    from rekindle._src.core.repetition import Repetition
    from rekindle._src.core.reply import (
        ContentDelta,
        ReasoningDelta,
        Reply,
        ReplyEvent,
        ToolCall,
        ToolCallArguments,
        ToolCallDropped,
        ToolCallStarted,
    )
    from rekindle._src.core.soft_prompt import SoftPrompt
    from rekindle._src.core.taps import Capture, Steer
    from rekindle._src.evaluation.attribution import Attribution
    from rekindle._src.evaluation.decisions.calibration import Calibration
    from rekindle._src.evaluation.decisions.deciding import Deciding
    from rekindle._src.evaluation.decisions.ranking import RankedDocument, Ranking
    from rekindle._src.evaluation.decisions.results import Calibrations, Decision, Decisions, DecisionTable
    from rekindle._src.evaluation.rollouts import Rollout, RolloutBatch, RolloutSupport
    from rekindle._src.evaluation.scoring import Score, Scores, ScoreTable, Scoring
    from rekindle._src.integrations.mcp.consent import ToolServerOffer
    from rekindle._src.integrations.mcp.tools import ToolServerTools, mcp_tools
    from rekindle._src.kvcache.persist.snapshot import SnapshotInfo
    from rekindle._src.kvcache.sharing import SharedPages
    from rekindle._src.kvcache.writer import SaveReport
    from rekindle._src.opening.local_models import LocalModel, LocalModels, local_models
    from rekindle._src.programs.user_functions import LogitsContext, LogitsProcessor
    from rekindle._src.replicas.fleet import Fleet, FleetOpening, fleet
    from rekindle._src.replicas.fleet_stats import FleetStats, ReplicaStats
    from rekindle._src.replicas.routes import Placed
    from rekindle._src.scheduling.sequence import Explanation
    from rekindle._src.scheduling.timeline import Phase, PhaseKind
    from rekindle._src.serve.server import Server
    from rekindle._src.session.allowed import AllowedTokens
    from rekindle._src.session.cache_view import CacheStats, CacheTree, CacheView, NodeView, PrefixExplanation
    from rekindle._src.session.gradients import Gradients
    from rekindle._src.session.opening import Opening, open, open_sync
    from rekindle._src.session.pausing import SleepReport
    from rekindle._src.session.session import Session
    from rekindle._src.session.stats import ProgramReport, RowReport, SessionStats, StepReport
    from rekindle._src.session.tuning import Tuning
    from rekindle._src.shelf.shelf import Shelf, ShelfModel, ShelfModelStats, ShelfStats, shelf

_LAZY = {
    name: f"rekindle._src.{module}"
    for module, names in {
        "calls.call": ("Call",),
        "calls.conversation": ("Conversation", "Turn"),
        "calls.embedding": ("Embeddings",),
        "calls.handle": ("Batch", "Handle", "Stream", "SyncStream"),
        "calls.prompts": ("PromptLike",),
        "calls.rows": ("RowAnswer", "RowAnswers", "RowMap"),
        "calls.tool_functions": ("ToolLike",),
        "calls.tool_loop": ("ToolChoice", "ToolLoop", "ToolRun"),
        "capabilities.overflow.request": ("OverfullChat",),
        "capabilities.gradients.request": ("Objective", "logit_difference", "logprob"),
        "capabilities.tuning.run": ("TuningProbe", "TuningReport", "TuningStep"),
        "core.left_out": ("LeftOut",),
        "core.mesh_shape": ("DeviceMesh", "MeshReport"),
        "core.records": ("Completion", "FinishReason", "Status", "TextDelta", "Timings", "TokenLogprobs", "Usage"),
        "core.repetition": ("Repetition",),
        "core.reply": (
            "ContentDelta", "ReasoningDelta", "Reply", "ReplyEvent", "ToolCall", "ToolCallArguments",
            "ToolCallDropped", "ToolCallStarted",
        ),
        "core.captured": ("Captured",),
        "core.soft_prompt": ("SoftPrompt",),
        "core.taps": ("Capture", "Steer"),
        "evaluation.decisions.calibration": ("Calibration",),
        "evaluation.decisions.deciding": ("Deciding",),
        "evaluation.decisions.ranking": ("RankedDocument", "Ranking"),
        "evaluation.decisions.results": ("Calibrations", "Decision", "DecisionTable", "Decisions"),
        "evaluation.attribution": ("Attribution",),
        "evaluation.rollouts": ("Rollout", "RolloutBatch", "RolloutSupport"),
        "evaluation.scoring": ("Score", "ScoreTable", "Scores", "Scoring"),
        "integrations.mcp.consent": ("ToolServerOffer",),
        "integrations.mcp.tools": ("ToolServerTools", "mcp_tools"),
        "kvcache.persist.snapshot": ("SnapshotInfo",),
        "kvcache.sharing": ("SharedPages",),
        "kvcache.writer": ("SaveReport",),
        "opening.local_models": ("LocalModel", "LocalModels", "local_models"),
        "capabilities.captures.custom": ("Tap", "TapContext"),
        "programs.user_functions": ("LogitsContext", "LogitsProcessor"),
        "replicas.fleet": ("Fleet", "FleetOpening", "fleet"),
        "replicas.fleet_stats": ("FleetStats", "ReplicaStats"),
        "replicas.routes": ("Placed",),
        "scheduling.sequence": ("Explanation",),
        "scheduling.timeline": ("Phase", "PhaseKind"),
        "serve.server": ("Server",),
        "session.allowed": ("AllowedTokens",),
        "session.cache_view": ("CacheStats", "CacheTree", "CacheView", "NodeView", "PrefixExplanation"),
        "session.gradients": ("Gradients",),
        "session.opening": ("Opening", "open", "open_sync"),
        "session.pausing": ("SleepReport",),
        "session.session": ("Session",),
        "session.stats": ("ProgramReport", "RowReport", "SessionStats", "StepReport"),
        "session.tuning": ("Tuning",),
        "shelf.shelf": ("Shelf", "ShelfModel", "ShelfModelStats", "ShelfStats", "shelf"),
    }.items()
    for name in names
}  # fmt: skip
_MODULES = ("errors", "models", "ray", "serve", "tiny")

__version__ = VERSION
__all__ = [
    "AllowedTokens", "Attribution", "Batch", "Busy", "CacheStats", "CacheTree", "CacheView", "Calibration",
    "Calibrations", "Call", "Capture", "Captured", "CheckpointError", "CompileError", "Completion", "ConfigError",
    "ContentDelta", "Conversation", "Deciding", "Decision", "DecisionTable", "Decisions", "DeviceMesh", "Embeddings",
    "EngineConfig", "Explanation", "FinishReason", "Fleet", "FleetOpening", "FleetStats", "Gradients", "Handle",
    "InvalidRequest", "LeftOut", "LocalModel", "LocalModels", "LogitsContext", "LogitsProcessor", "MeshReport",
    "MissingExtra", "NoTokenLeft", "NodeView", "NotParsed", "NotPicklable", "Objective", "OpenOptions", "Opening",
    "OutOfMemory", "OutOfPages", "OverfullChat", "Phase", "PhaseKind", "Placed", "PrefixExplanation", "ProcessLost",
    "ProcessRefused", "ProgramReport", "PromptLike", "PromptTooLong", "QueueFull", "RankedDocument", "Ranking",
    "ReasoningDelta", "RekindleError", "Repetition", "ReplicaLost", "ReplicaStats", "Reply", "ReplyEvent",
    "RequestAborted", "RequestFailed", "RequestQuarantined", "Rollout", "RolloutBatch", "RolloutSupport", "RowAnswer",
    "RowAnswers", "RowMap", "RowReport", "Sampling", "SamplingOptions", "SaveReport", "Score", "ScoreTable", "Scores",
    "Scoring", "Server", "Session", "SessionClosed", "SessionForked", "SessionStats", "SharedPages", "Shelf",
    "ShelfModel", "ShelfModelStats", "ShelfStats", "SleepReport", "SnapshotInfo", "SnapshotRefused", "SoftPrompt",
    "Status", "Steer", "StepFailed", "StepReport", "StoreError", "Stream", "SyncStream", "Tap", "TapContext",
    "TextDelta", "Timings", "TokenLogprobs", "ToolCall", "ToolCallArguments", "ToolCallDropped", "ToolCallStarted",
    "ToolChoice", "ToolLike", "ToolLoop", "ToolRun", "ToolServerError", "ToolServerOffer", "ToolServerTools", "Tuning",
    "TuningProbe", "TuningReport", "TuningStep", "Turn", "UnsupportedModel", "Usage", "__version__", "errors", "fleet",
    "local_models", "logit_difference", "logprob", "mcp_tools", "models", "open", "open_sync", "ray", "serve", "shelf",
    "tiny",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _LAZY:
        # Imported in any case: a module that is in sys.modules may still be executed by another thread.
        with contextlib.nullcontext() if _LAZY[name] in sys.modules else gc_paused(stays=True):
            return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"rekindle.{name}")
    if name.startswith("_") or importlib.util.find_spec(f"rekindle.{name}"):  # tools, and imports, read no hints
        raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
    from rekindle._src.core.foreign_calls import unknown

    raise unknown("rekindle", name, _hint(name))


def _hint(name: str) -> str:
    """Suggest a replacement for an unknown name, as the end of a sentence."""
    from rekindle._src.core.foreign_calls import MODULE, of_module
    from rekindle._src.session.session import Session

    if name not in MODULE and hasattr(Session, name):
        return f": it is a session's. Write session = await rekindle.open(…), then session.{name}"
    return of_module(name, __all__)


def _drawn(value: object) -> str:
    from rekindle._src.views.drawing import html_of

    return html_of(value)


draw_with(_drawn)
explain_cell_errors()  # of the cell that imports this module, too


def __dir__() -> list[str]:
    return [*__all__]
