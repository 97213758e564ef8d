"""`rekindle.fleet`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rekindle._src.core.config import EngineConfig
from rekindle._src.dispatch import forked
from rekindle._src.replicas.fleet import FleetOpening, Parts
from rekindle._src.replicas.roles import Role, roles_of
from rekindle._src.replicas.routing import RouterName
from rekindle._src.session.signatures import takes_options
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from typing import Unpack

    from rekindle._src.core.options import OpenOptions


@takes_options(EngineConfig)
def fleet(
    model: str | Path = "tiny",
    *,
    replicas: int | None = None,
    router: RouterName = "affinity",
    roles: Mapping[Literal["prefill", "decode"], int] | None = None,
    resources: Mapping[str, Any] | None = None,
    **options: Unpack[OpenOptions],
) -> FleetOpening:
    """Open a model in several processes: `fleet = await rekindle.fleet(model, replicas=2)`, or with `async with`.

    Each replica is a session in a process of its own, on Ray: on the cluster that this process or `$RAY_ADDRESS` is
    connected to, else on this machine, where Ray is started quietly and listens to nobody else. The fleet takes
    requests as a session does, and they survive the death of a replica, which Ray replaces.

    `router` says which replica gets a request: "affinity" keeps conversations and system prompts together, so that
    their beginnings are found in the prefix cache, as long as no replica has a quarter more to do than the others;
    "shortest" takes the one with the fewest requests; "round-robin" takes each in turn. `roles` divides the work:
    {"prefill": 1, "decode": 2} has one replica compute prompts up to their first token, and two go on from there with
    the pages that they take from it, so that long prompts don't make streams wait. `resources` are options of
    Ray for each replica, such as {"num_gpus": 1}; on one machine without GPUs the replicas divide its cores. The other
    options are those of `open()`. Needs the extra `ray`.
    """
    forked.opening()
    parts_of = roles_of(roles, replicas)
    if not isinstance(model, str | Path):
        raise ConfigError("model", model, "can't be sent to other processes", "Pass a folder or a hub id")
    EngineConfig.of(options)  # what is wrong is refused before a process is started
    started = functools.partial(_parts, _path(model), _sent(options), parts_of, resources)
    return FleetOpening(started, str(model), router)


def shared_fleet(
    model: str,
    name: str,
    *,
    roles: Sequence[Role],
    router: RouterName,
    resources: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> FleetOpening:
    """A fleet whose replicas belong to all fleets of this name in the cluster; they end when none uses them."""
    started = functools.partial(_parts, _path(model), _sent(options), roles, resources, shared=name)
    return FleetOpening(started, model, router)


def _sent(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return {**given, "quiet": True}


def _path(model: str | Path) -> str:
    """The model as another process finds it."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else str(model)


def _parts(
    model: str,
    options: Mapping[str, Any],
    roles: Sequence[Role],
    resources: Mapping[str, Any] | None,
    shared: str | None = None,
) -> Parts:
    from rekindle._src.replicas import on_ray

    return on_ray.parts(model, options, roles, resources, shared=shared)
