"""Replicas as actors of Ray, which places them, starts their processes, and restarts them when they die.

An existing cluster is joined, or Ray is started quietly for this machine only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.channels.greeting import SECRET, ProcessPlace
from rekindle._src.kvcache.sharing import PageAddress
from rekindle._src.opening.following import follow
from rekindle._src.replicas.fleet_backend import FleetParts
from rekindle._src.replicas.replica import Replica
from rekindle._src.replicas.routing import Role
from rekindle._src.replicas.wire import Mail, ReplicaGone, ReplicaInfo, RequestMessage, SessionChange
from rekindle._src.session.opening import open_sync
from rekindle._src.session.session import Session
from rekindle.errors import ConfigError, MissingExtra, RekindleError
from rekindle_kernels import system

try:
    import ray
    import ray._private.ray_constants
    import ray._private.utils
    import ray._private.worker
    import ray.exceptions
    import ray.util
    from ray._raylet import AuthenticationTokenLoader, Config
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingExtra("ray", "ray") from error

_AT_ONCE = 1000  # concurrent calls of an actor
LAST_SECONDS = 0.5  # seconds for an error to reach the fleet
LEASE = 60.0  # seconds that a shared replica waits for another fleet


class Actor(Replica):
    """A replica in a process of Ray, with the processes that follow it."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        group: Group,
        role: Role = "both",
        lease: float | None = None,
        *,
        alone: bool = True,
    ) -> None:
        pin(group.cores[0])
        self._model, self._options, self._group = model, options, group
        self._lease = lease  # seconds without a fleet until it ends
        self._host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
        self._followers: list[Any] = []
        self._running: asyncio.Task[None] | None = None
        super().__init__(self._open_session, role=role, listen=self._host)

    async def open(self) -> ReplicaInfo:
        """Open the session, unless it is open already."""
        if self._running is None:
            self._running = asyncio.create_task(self._run_to_the_end())
        try:
            return await super().open()
        except Exception:
            if self._group.processes > 1:  # a process joins others once in its life, so a new one must try again
                asyncio.get_running_loop().call_later(LAST_SECONDS, os._exit, 1)
            raise

    def _open_session(self) -> Session:
        if self._group.processes == 1:
            return open_sync(self._model, **self._options)
        coordinator, self._followers = start_followers(self._group, self._host, self._options.get("cache_dir"))
        return open_sync(self._model, **self._options, coordinator=coordinator)

    async def _run_to_the_end(self) -> None:
        await self.run(self._lease)
        await self.close()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class RayConnection:
    def __init__(self, name: str, actor: Any, role: Role, *, shared: bool = False, placement: Any = None) -> None:
        self._name, self._actor, self._role, self._shared, self._placement = name, actor, role, shared, placement
        self._info: ReplicaInfo | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def role(self) -> Role:
        return self._role

    async def open(self) -> ReplicaInfo:
        self._info = info = await self._call("open")
        return info

    def opening(self) -> Any:
        return self._actor.open.remote()

    async def warm(self, addresses: tuple[PageAddress, ...]) -> int:
        pages: int = await self._call("warm", addresses)
        return pages

    async def change(self, change: SessionChange) -> None:
        await self._call("change", change)

    async def send(self, sender: str, requests: tuple[RequestMessage, ...], ended: tuple[str, ...]) -> None:
        await self._call("send", sender, requests, ended)

    async def mail(self, sender: str, patience: float) -> Mail:
        mail: Mail = await self._call("mail", sender, patience)
        return mail

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None
        except ray.exceptions.RayError as error:
            raise ReplicaGone(f"is gone ({type(error).__name__})") from error

    def kill(self) -> None:
        """End its process: by a signal if possible, since a process that hangs takes no calls of Ray.

        A process that has ended is left to Ray, which starts another one. That one must not be ended.
        """
        info, self._info = self._info, None
        if info is None:
            return
        with contextlib.suppress(Exception):
            if info.host != socket.gethostname() or not os.path.isdir("/proc"):
                ray.kill(self._actor, no_restart=False)
            elif _is_ours(info.pid):
                system.kill(info.pid)

    def close(self) -> None:
        if self._shared:
            return  # others may use it; it ends when its lease does
        with contextlib.suppress(Exception):  # Ray may have been shut down
            ray.kill(self._actor, no_restart=True)
            if self._placement is not None:
                ray.util.remove_placement_group(self._placement)


def _is_ours(pid: int) -> bool:
    """True if a process is still the actor's, and not another one with its number."""
    with contextlib.suppress(OSError):
        return "ray::" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return False


def cause_of(error: Any) -> BaseException:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def actors(
    model: str,
    options: Mapping[str, Any],
    roles: Sequence[Role],
    resources: Mapping[str, Any] | None,
    shared: str | None,
    most: int | None = None,
) -> Callable[[], RayConnection]:
    """Return a function that starts one more replica: first one for each of `roles`, then others like the last one.

    On one machine they divide the cores, among `most` replicas if there may be that many later.
    """
    replicas, processes = len(roles), int(options.get("processes", 1))
    alone = len([node for node in ray.nodes() if node.get("Alive")]) == 1
    wanted: dict[str, Any] = {"num_cpus": 0 if alone else 1}
    if ray.cluster_resources().get("GPU", 0) >= replicas * processes:
        wanted["num_gpus"] = 1
    wanted |= resources or {}
    defaults: dict[str, Any] = {
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": _AT_ONCE,
        "scheduling_strategy": "DEFAULT" if alone else "SPREAD",
        **wanted,
    }
    count = 0

    def another() -> RayConnection:
        nonlocal count
        index, count = count, count + 1
        role = roles[min(index, replicas - 1)]
        name = f"{'replica' if role == 'both' else role}-{index}"
        cores: tuple[tuple[int, ...], ...] = ((),) * processes
        if alone and "num_gpus" not in wanted:
            cores = shares(index, max(replicas, most or 0), processes)
        placement = bundles(processes, wanted) if processes > 1 and shared is None else None
        group = Group(processes, placement, wanted, cores)
        lease: float | None = None
        actor_options = {**defaults, **in_bundle(placement, 0)}
        if shared is not None:  # the actor belongs to all fleets of this name
            lease, actor_options["name"] = LEASE, f"rekindle {shared} {name}"
            actor_options |= {"namespace": "rekindle", "lifetime": "detached", "get_if_exists": True}
        actor = ray.remote(Actor).options(**actor_options).remote(model, dict(options), group, role, lease, alone=alone)
        return RayConnection(name, actor, role, shared=shared is not None, placement=placement)

    return another


def parts(
    model: str,
    options: Mapping[str, Any],
    roles: Sequence[Role],
    resources: Mapping[str, Any] | None,
    *,
    shared: str | None = None,
    most: int | None = None,
) -> FleetParts:
    """Start the replicas of a fleet, and wait until the first one is open."""
    leave = start_ray()
    connections: list[RayConnection] = []

    def close() -> None:
        for connection in connections:
            connection.close()
        leave()

    try:
        another = actors(model, options, roles, resources, shared, most)
        connections += [another() for _ in roles]
        ready, _ = ray.wait([connection.opening() for connection in connections], num_returns=1)
        info: ReplicaInfo = ray.get(ready[0])
    except ray.exceptions.RayTaskError as error:
        close()
        raise cause_of(error) from None
    except ray.exceptions.RayError as error:
        close()
        raise RekindleError(
            f"the processes of the replicas ended before one was open ({type(error).__name__}). Look into their logs "
            "in /tmp/ray/session_latest/logs; memory may be short"
        ) from error
    except BaseException:
        close()
        raise

    def one_more() -> RayConnection:
        connection = another()
        connections.append(connection)
        return connection

    return FleetParts(connections, info, one_more, close, uuid.uuid4().hex[:12])


def pin(cores: Sequence[int]) -> None:
    """Keep all threads of this process, and any threads that they start, on these cores."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["0"]:
        with contextlib.suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


def cores_of(index: int, replicas: int) -> tuple[int, ...]:
    """Return a replica's share of this machine's cores; empty if the system does not report them."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = sorted(os.sched_getaffinity(0))
    if replicas >= len(cores):
        return (cores[index % len(cores)],)
    return tuple(cores[index * len(cores) // replicas : (index + 1) * len(cores) // replicas])


def shares(index: int, replicas: int, processes: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each process of a replica: the same number, since the processes run in step."""
    total = replicas * processes
    parts = [cores_of(index * processes + process, total) for process in range(processes)]
    size = min(len(part) for part in parts)
    return tuple(part[:size] for part in parts)


LEAST_CPU = 0.001  # of a bundle without a request for CPUs: Ray takes no empty bundle


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


class FollowerActor:
    """One process that follows a leader. The leader owns it, so it ends with the leader."""

    def __init__(self, secret: str, cores: Sequence[int]) -> None:
        os.environ[SECRET] = secret
        pin(cores)

    def run(self, coordinator: str, process: int, processes: int, cache_dir: str | None) -> None:
        """Follow until the session ends."""
        follow(coordinator, ProcessPlace(process, processes), cache_dir=cache_dir, lost=lambda error: os._exit(1))


def start_followers(group: Group, host: str, cache_dir: str | None) -> tuple[str, list[Any]]:
    """Start this process's followers. Return their coordinator address and the references that keep them alive."""
    secret = os.environ[SECRET] = secrets.token_hex(32)
    with socket.create_server((host, 0)) as server:
        coordinator = f"{host}:{server.getsockname()[1]}"
    references: list[Any] = []
    for process in range(1, group.processes):
        options = {**group.resources, **in_bundle(group.placement, process), "max_restarts": 0}
        follower: Any = ray.remote(FollowerActor).options(**options).remote(secret, group.cores[process])
        references += [follower, follower.run.remote(coordinator, process, group.processes, cache_dir)]
    return coordinator, references


# Ray's variables if it is started here: no usage report, unchanged visible devices for actors without any, and
# loopback addresses, which Ray uses on Windows and macOS, where it runs on one machine only.
_LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
ADDRESS = "RAY_ADDRESS"  # environment variable of Ray's: the cluster to join
ATTEMPTS = 3  # to start Ray

_PRINT: Any = getattr(ray._private.worker, "print_to_stdstream", None)

_lock = threading.Lock()
_users = 0  # fleets on the Ray that was started here
_started = False


def start_ray() -> Callable[[], None]:
    """Join a cluster of Ray, or start Ray for this machine only. Return a function that undoes this."""
    global _users, _started
    with _lock:
        if ray.is_initialized() and not _started:
            return lambda: None
        if not ray.is_initialized():
            with _quietly():
                if not join_cluster():
                    _start_patiently()
            _started = True
        _users += 1
    return _leave


def join_cluster() -> bool:
    """Join the cluster of `$RAY_ADDRESS`, or of `ray start` on this machine. Return False if there is none.

    A Ray that another program has started for itself is not joined: it ends with that program.
    """
    named = os.environ.get(ADDRESS, "")
    if named == "local":
        return False
    address = named or _started_here_before()
    if not address:
        return False
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        if not named:
            return False
        fix = "Start the cluster, or unset it, so that Ray is started on this machine"
        raise ConfigError(ADDRESS, named, "is no cluster of Ray that answers", fix) from error
    return True


def _started_here_before() -> str:
    """Return the address that `ray start` has noted on this machine if a server answers there, else an empty string."""
    address = ray._private.utils.read_ray_address() or ""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return ""
    return address


def _start_patiently() -> None:
    """Start Ray here, in several attempts: on a busy machine its processes wait too briefly for each other."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _start_here()
            return
        except Exception as error:
            ray.shutdown()
            if attempt == ATTEMPTS:
                reason = str(error).strip()[:300]
                raise RekindleError(
                    f"Ray could not be started here, in {ATTEMPTS} attempts: {reason} Its logs are in "
                    "/tmp/ray/session_latest/logs. Or start it yourself (ray start --head) and open the fleet again"
                ) from error


def _start_here() -> None:
    """Start Ray on this machine, without a dashboard and for this machine only."""
    constants = ray._private.ray_constants
    previous = getattr(constants, "ENABLE_RAY_CLUSTER", True)
    constants.ENABLE_RAY_CLUSTER = False  # Ray has read it from the environment at its import
    try:
        # JAX warns of every forked process; Ray's processes run another program at once.
        with _environment(_LOCAL | _own_token()), warnings.catch_warnings():
            _read_authentication()
            warnings.simplefilter("ignore", RuntimeWarning)
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
            )
    finally:
        constants.ENABLE_RAY_CLUSTER = previous
    # Ray prints a page about each dead process, which no option turns off; the fleet logs a line about it.
    ray._private.worker.print_to_stdstream = _say_nothing


def _own_token() -> dict[str, str]:
    """Return Ray's variables for a token that its processes alone know: other users of this machine run nothing on it.

    Ray would write one to a file that all users may read, or ask for none before 2.59. `$RAY_AUTH_MODE` has its way.
    """
    named = "RAY_AUTH_TOKEN_PATH" in os.environ
    return {"RAY_AUTH_MODE": "token"} | ({} if named else {"RAY_AUTH_TOKEN": secrets.token_hex(32)})


def _read_authentication() -> None:
    """Have this process's Ray read its variables of authentication again, which it does at its import alone."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _say_nothing(*ignored: object, **options: object) -> None: ...


def _leave() -> None:
    global _users, _started
    with _lock:
        _users -= 1
        if _users == 0 and _started:
            _started = False
            with _quietly():
                ray.shutdown()
            _read_authentication()  # the next cluster may have another token, or none
            ray._private.worker.print_to_stdstream = _PRINT


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, and remove them at the end."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
