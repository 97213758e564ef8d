"""What production uses and what stands in for it in tests have everything that their contracts name."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.fakes import ByteTokenizer, FakeInFlight
from helpers.sessions import byte_tokenizer, fake_engine, opened, parts
from rekindle._src.capabilities.guides.remote import RemoteGrammars
from rekindle._src.capabilities.guides.request import GrammarsLike
from rekindle._src.core import contracts
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch import backend
from rekindle._src.execution.runner import Runner, RunnerStatistics
from rekindle._src.notebook import live
from rekindle._src.programs.programs import Programs
from rekindle._src.replicas.fleet_backend import FleetBackend, FleetParts
from rekindle._src.replicas.routing import router
from rekindle._src.scheduling.scheduler import SchedulerStatistics
from rekindle._src.session.cache_view import CacheStats, CacheTree, NodeView, PrefixExplanation
from rekindle._src.structured.grammar import Grammars
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.detokenizers import real_detokenizer
from rekindle._src.text.template_code import TemplateCode


def members(contract: type) -> set[str]:
    named = {name for name in vars(contract) if not name.startswith("_") or name == "_repr_html_"}
    return named | set(inspect.get_annotations(contract))


def missing(contract: type, *implementations: object) -> list[str]:
    return [
        f"{implementation!r} has no {name}, which {contract.__name__} names"
        for implementation in implementations
        for name in sorted(members(contract))
        if not hasattr(implementation, name) and name not in fields_of(implementation)
    ]


def fields_of(implementation: object) -> set[str]:
    """Fields of a slotted record are descriptors, but those of a class without slots are only annotated."""
    return set(getattr(implementation, "__annotations__", {}))


def fleet_backend() -> FleetBackend:
    """The backend of a fleet without replicas."""
    nothing: Any = None
    return FleetBackend(FleetParts((), SimpleNamespace(places=1), nothing, nothing, "test"), router("affinity"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("contract", "implementations"),
    [
        (contracts.SchedulerFigures, (SchedulerStatistics, parts()[0].statistics())),
        (contracts.SchedulerLike, (parts()[0],)),
        (contracts.InFlightLike, (FakeInFlight,)),
        (contracts.RunnerFigures, (RunnerStatistics, parts()[1].statistics())),
        (contracts.ProgramsLike, (Programs,)),
        (contracts.RunnerLike, (parts()[1],)),
        (contracts.TokenizerLike, (byte_tokenizer(), ByteTokenizer())),
        (contracts.DetokenizerLike, (real_detokenizer(byte_tokenizer())(Sampling()),)),
        (contracts.ChatLike, (ChatTemplate,)),
        (contracts.TemplateLike, (TemplateCode,)),
        (backend.Backend, (fake_engine(), fleet_backend())),
        (GrammarsLike, (Grammars, RemoteGrammars())),
        (live.NodeLike, (NodeView,)),
        (live.TreeLike, (CacheTree,)),
        (live.PrefixLike, (PrefixExplanation,)),
        (live.TierSizes, (CacheStats,)),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
def test_an_implementation_has_all_that_its_contract_names(contract: type, implementations: tuple[Any, ...]) -> None:
    assert members(contract), "a contract without members would hold for anything"
    assert missing(contract, *implementations) == []


def test_the_runner_on_a_device_has_all_that_its_contract_names() -> None:
    """`programs` is made by its constructor, everything else is a method."""
    assert missing(contracts.RunnerLike, Runner) == [f"{Runner!r} has no programs, which RunnerLike names"]


def test_a_session_and_its_requests_have_what_views_need() -> None:
    with opened() as session:
        handle = session.submit("x", max_tokens=1)
        handle.result_sync()
        assert missing(live.SessionLike, session) == []
        assert missing(live.RequestLike, handle) == []
        assert missing(live.CacheLike, session.cache) == []
        assert missing(live.FiguresLike, session.stats()) == []


def test_every_contract_is_checked_here() -> None:
    checked = Path(__file__).read_text()
    for module, prefix in ((contracts, "contracts"), (live, "live")):
        for name, value in vars(module).items():
            if getattr(value, "_is_protocol", False) and value.__module__ == module.__name__:
                assert f"{prefix}.{name}" in checked, f"{prefix}.{name} is compared with nothing"
