"""`rekindle.fleet`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rekindle._src.core.config import EngineConfig
from rekindle._src.dispatch.host import note_opening
from rekindle._src.replicas.autoscaling import Range
from rekindle._src.replicas.fleet import FleetOpening, absolute
from rekindle._src.replicas.fleet_backend import Parts
from rekindle._src.replicas.roles import Role, roles_of
from rekindle._src.replicas.routing import RouterName
from rekindle._src.session.opening import named_changes
from rekindle._src.session.signatures import takes_options
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from typing import Unpack

    from rekindle._src.core.config import OpenOptions
    from rekindle._src.core.taps import Steer


@takes_options(EngineConfig)
def fleet(
    model: str | Path = "tiny",
    *,
    replicas: int | tuple[int, int] | None = None,
    router: RouterName = "affinity",
    roles: Mapping[Literal["prefill", "decode"], int] | None = None,
    resources: Mapping[str, Any] | None = None,
    steering: Mapping[str, Steer | Sequence[Steer] | str | Path] | None = None,
    **options: Unpack[OpenOptions],
) -> FleetOpening:
    """Open a model in several processes: `fleet = await rekindle.fleet(model, replicas=2)`, or with `async with`.

    Each replica is a session in its own process on Ray. The cluster is the one that this process is connected to, that
    `$RAY_ADDRESS` names, or that `ray start` has begun on this machine. Otherwise Ray is started here, quietly, and
    listens to this machine only. The fleet takes requests as a session does. They survive the death of a replica,
    which Ray replaces. `replicas` is a number, or a pair such as (1, 4): then the number follows the load between
    them, by the live requests and the waiting prompt tokens.

    `router` chooses the replica of a request: "affinity" keeps conversations and system prompts together, so that the
    prefix cache has their beginnings, as long as no replica has a quarter more requests than the mean; "shortest"
    takes the one with the fewest requests; "round-robin" takes each in turn. `roles` divides the work: with
    {"prefill": 1, "decode": 2} one replica computes prompts up to their first token, and two continue with the pages
    that they take from it, so long prompts don't delay streams. `resources` are options of Ray for each process, such
    as {"num_gpus": 1}; on one machine without GPUs the replicas divide its cores. `steering` and the other options are
    those of `open()`. With `mesh` and `processes` each replica is a group of processes that share the model, placed
    near each other; they end together and are replaced together. Needs the extra `ray`.
    """
    note_opening()
    parts_of, size = roles_and_range(roles, replicas)
    if not isinstance(model, str | Path):
        raise ConfigError("model", model, "can't be sent to other processes", "Pass a folder or a hub id")
    check_options(options)
    most = None if size is None else size.most
    named = named_changes(steering)
    sent = _sent(options) | ({"steering": named} if named else {})
    start_parts = functools.partial(_parts, absolute(model), sent, parts_of, resources, most=most)
    return FleetOpening(start_parts, str(model), router, size=size)


def shared_fleet(
    model: str,
    name: str,
    *,
    roles: Sequence[Role],
    router: RouterName,
    resources: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    size: Range | None = None,
) -> FleetOpening:
    """Return a fleet over replicas shared by all fleets of this name in the cluster. They end when unused."""
    most = None if size is None else size.most
    start_parts = functools.partial(_parts, absolute(model), _sent(options), roles, resources, shared=name, most=most)
    return FleetOpening(start_parts, model, router, size=size)


def roles_and_range(
    roles: Mapping[Literal["prefill", "decode"], int] | None, replicas: int | tuple[int, int] | None
) -> tuple[tuple[Role, ...], Range | None]:
    """Return the roles of the first replicas, and the range in which their number follows the load, or None."""
    if replicas is None or isinstance(replicas, int):
        return roles_of(roles, replicas), None
    size = Range.of(replicas)
    if roles is not None:
        problem = "can't follow the load where they have roles"
        raise ConfigError("replicas", replicas, problem, "Leave one of the two out")
    return roles_of(None, size.least), size if size.least < size.most else None


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse invalid options before a process is started."""
    if options.get("processes", 1) == 1:
        EngineConfig.of(options)
        return
    if options.get("coordinator") is not None:
        problem = "is found by each replica of a fleet for itself"
        raise ConfigError("coordinator", options["coordinator"], problem, "Leave it out")
    EngineConfig.of({**options, "coordinator": "127.0.0.1:1"})


def _sent(options: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return {**plain, "quiet": True}


def _parts(
    model: str,
    options: Mapping[str, Any],
    roles: Sequence[Role],
    resources: Mapping[str, Any] | None,
    shared: str | None = None,
    most: int | None = None,
) -> Parts:
    from rekindle._src.replicas import on_ray

    return on_ray.parts(model, options, roles, resources, shared=shared, most=most)
