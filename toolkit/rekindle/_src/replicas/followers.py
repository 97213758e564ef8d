"""A replica over several processes: a leader with the session, and followers beside it as actors of Ray."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rekindle._src.processes.greeting import SECRET, Place
from rekindle._src.replicas.cores import pin
from rekindle._src.session.following import follow
from rekindle.errors import MissingExtra

try:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingExtra("ray", "ray") from error

LEAST_CPU = 0.001  # of a bundle whose processes request no CPU: Ray takes no empty bundle


class Group(NamedTuple):
    """The processes of one replica, as its leader starts them."""

    processes: int  # processes that share the model, the leader included
    placement: Any  # their placement group, a bundle for each, the leader's first; None: placed one by one
    resources: Mapping[str, Any]  # options of Ray for each of them
    cores: Sequence[Sequence[int]]  # for each of them; empty: the system decides


def bundles(processes: int, resources: Mapping[str, Any]) -> Any:
    """Return a placement group for `processes` processes: on one machine if it has room, else on machines nearby."""
    needs = {"CPU": resources.get("num_cpus") or LEAST_CPU}
    if resources.get("num_gpus"):
        needs["GPU"] = resources["num_gpus"]
    return placement_group([{**needs, **resources.get("resources", {})}] * processes, strategy="PACK")


def in_bundle(placement: Any, index: int) -> dict[str, Any]:
    """Return Ray's options that place an actor in a bundle."""
    if placement is None:
        return {}
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index)}


class Follower:
    """One process that follows a leader. The leader owns it, so it ends with the leader."""

    def __init__(self, secret: str, cores: Sequence[int]) -> None:
        os.environ[SECRET] = secret
        pin(cores)

    def run(self, coordinator: str, process: int, processes: int, cache_dir: str | None) -> None:
        """Follow until the session ends."""
        follow(coordinator, Place(process, processes), cache_dir=cache_dir, lost=lambda error: os._exit(1))


def start_followers(group: Group, host: str, cache_dir: str | None) -> tuple[str, list[Any]]:
    """Start this process's followers. Return their coordinator address and the references that keep them alive."""
    secret = os.environ[SECRET] = secrets.token_hex(32)
    with socket.create_server((host, 0)) as server:
        coordinator = f"{host}:{server.getsockname()[1]}"
    references: list[Any] = []
    for process in range(1, group.processes):
        options = {**group.resources, **in_bundle(group.placement, process), "max_restarts": 0}
        follower: Any = ray.remote(Follower).options(**options).remote(secret, group.cores[process])
        references += [follower, follower.run.remote(coordinator, process, group.processes, cache_dir)]
    return coordinator, references
