"""The facts that must be equal in all processes of a session: followers report them, and the leader compares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from rekindle._src.channels.channel import as_json, from_json
from rekindle._src.core import words
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.version import VERSION
from rekindle._src.programs import store as program_store
from rekindle.errors import ProcessLost, ProcessRefused

_OF_CPUS = ("cpu", "threads", "machine")  # facts on which programs for a CPU depend
_LONGEST = 60  # characters of a value in a message


class ProcessReport(NamedTuple):
    """The report of one process on itself."""

    same: Mapping[str, object]  # must be equal to the leader's
    pages: int  # that its devices have room for


def facts(config: ResolvedConfig, *, model: str, fingerprint: str) -> ProcessReport:
    """Collect the facts of this process; `config` is resolved, `model` a digest of the model's own config."""
    environment = dict(program_store.environment())
    for name in _OF_CPUS if environment["platform"] != "cpu" else ():
        environment.pop(name)
    options = {name: value for name, value in program_store.config_fields(config).items() if name != "device_pages"}
    same = {
        "rekindle": VERSION,
        **{f"environment.{name}": value for name, value in environment.items()},
        **{f"option {name}": value for name, value in options.items()},
        "the model's config": model,
        "the weights": fingerprint,
    }
    return ProcessReport(json.loads(json.dumps(same, default=str)), config.device_pages)


def compare(leader: ProcessReport, follower: ProcessReport, process: int) -> None:
    """Raise ProcessRefused with the facts that differ in a follower."""
    names = dict.fromkeys((*leader.same, *follower.same))
    reasons = [
        f"{name} is {_shown(follower.same.get(name))} there and {_shown(leader.same.get(name))} here"
        for name in names
        if leader.same.get(name) != follower.same.get(name)
    ]
    if reasons:
        raise ProcessRefused(
            f"process {process} can't share the model, because it would compute other numbers: {'; '.join(reasons)}. "
            "Give all processes the same installation, flags and checkpoint"
        )


def encoded(report: ProcessReport) -> bytes:
    return as_json(report._asdict())


def decoded(content: bytes) -> ProcessReport:
    fields = from_json(content)
    same, pages = fields.get("same"), fields.get("pages")
    if not isinstance(same, dict) or not isinstance(pages, int):
        raise ProcessLost("a process told its facts in another form")
    return ProcessReport(same, pages)


def _shown(value: object) -> str:
    return words.shorten(repr(value), _LONGEST)
