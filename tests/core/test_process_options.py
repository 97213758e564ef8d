"""The options `processes` and `coordinator`."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle import EngineConfig
from rekindle._src.core.process_options import address
from rekindle.errors import ConfigError

HERE = "127.0.0.1:9000"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"processes": 0}, "processes=0: must be at least 1"),
        ({"processes": 2, "mesh": 4}, "coordinator=None: is missing: 2 processes need a place to meet"),
        ({"processes": 2, "mesh": 4, "coordinator": 9000}, "coordinator=9000: is not text"),
        ({"processes": 2, "mesh": 4, "coordinator": "here"}, "coordinator='here': is no address"),
        ({"processes": 2, "coordinator": HERE}, "mesh=None: has to say how many devices"),
        ({"processes": 2, "mesh": 3, "coordinator": HERE}, "has 3 devices, which 2 processes can't share evenly"),
        (
            {"processes": 2, "mesh": {"data": 2, "model": 2}, "coordinator": HERE},
            "has data shards, which 2 processes can't have together yet",
        ),
        ({"processes": 1 << 20, "mesh": 4, "coordinator": HERE}, "are more than there can be"),
        ({"coordinator": HERE}, "coordinator='127.0.0.1:9000': is for several processes"),
    ],
)
def test_what_several_processes_cannot_be(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**options)
    assert problem in str(refused.value)


def test_processes_that_share_a_mesh() -> None:
    config = EngineConfig(processes=2, mesh={"model": 2, "expert": 2}, coordinator=HERE)
    assert (config.processes, config.coordinator) == (2, HERE)
    assert EngineConfig(processes=None).processes == 1


@pytest.mark.parametrize(
    ("text", "found"), [(HERE, ("127.0.0.1", 9000)), ("[::1]:80", ("::1", 80)), ("n0:1", ("n0", 1))]
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert address(text) == found


@pytest.mark.parametrize("text", ["", "host", "host:", ":9000", "host:0", "host:65536", "host:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        address(text)
