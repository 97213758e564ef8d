"""Joining of processes: the leader listens at the coordinator's address until all followers have come.

Then all of them join JAX's own service, which the leader runs at a port of its own on the same host.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

import jax

from rekindle._src.channels import greeting
from rekindle._src.channels.channel import Channel, MessageKind, as_json, from_json
from rekindle._src.channels.greeting import ProcessPlace
from rekindle._src.core.mesh_shape import address
from rekindle._src.processes.team import PING_SECONDS, Team
from rekindle.errors import ConfigError, ProcessLost, ProcessRefused, RekindleError

log = logging.getLogger("rekindle.processes")
JOIN_SECONDS = 300.0  # how long a leader waits for its followers
# Seconds without a message until the other side counts as gone; a message comes each second. A leader gets
# longer: other work in its process may hold Python's lock for a while.
FOLLOWER_SILENCE, LEADER_SILENCE = 15.0, 60.0
GREETINGS = 32  # connections at once that have not shown yet that they know the secret
_LOOK_SECONDS = 0.2


def lead(
    coordinator: str,
    processes: int,
    session: Mapping[str, object],
    *,
    waiting: Callable[[int], object] = lambda there: None,
    given_up: Callable[[], bool] = lambda: False,
) -> Team:
    """Wait for the followers of a session and join JAX's service with them.

    `session` is sent to each follower. `waiting` is called with the number of followers that have come. Raises
    ProcessLost if some don't come, or if `given_up` returns True because no caller waits for the session any more.
    """
    key = greeting.secret()
    if jax.distributed.is_initialized():
        raise ConfigError(
            "processes",
            processes,
            "JAX's processes have been joined in this one already, by an earlier session or by the program",
            "Open the session in a new process, or restart the kernel",
        )
    _check_unused(processes)
    host, port = address(coordinator)
    try:
        server = socket.create_server((host, port), family=_family(host, port), backlog=GREETINGS)
    except OSError as error:
        raise ConfigError(
            "coordinator",
            coordinator,
            f"can't be listened at: {error}",
            "Pass an address of this machine, and a free port",
        ) from None
    with server:
        channels = _Gathering(key, processes, waiting, given_up).run(server)
    team = Team(channels)
    try:
        service = f"{f'[{host}]' if ':' in host else host}:{_free_port(host)}"
        team.welcome(as_json({**session, "service": service}))
        initialize(service, ProcessPlace(0, processes))
    except BaseException:
        team.close()
        raise
    return team


class _Gathering:
    """Accepts connections and greets each in a thread of its own, so that a silent one delays no other."""

    def __init__(
        self, key: bytes, processes: int, waiting: Callable[[int], object], given_up: Callable[[], bool]
    ) -> None:
        self._key, self._place, self._waiting, self._given_up = key, ProcessPlace(0, processes), waiting, given_up
        self._channels: dict[int, Channel] = {}
        self._pinged = 0.0
        self._lock = threading.Lock()
        self._pending = greeting.PendingConnections(GREETINGS)

    def run(self, server: socket.socket) -> dict[int, Channel]:
        deadline = time.monotonic() + JOIN_SECONDS
        server.settimeout(_LOOK_SECONDS)
        followers, joined = set(range(1, self._place.processes)), set[int]()
        self._waiting(0)
        while missing := followers - joined:
            if self._given_up() or time.monotonic() > deadline:
                with self._lock:
                    self._pending.close()
                    for channel in self._channels.values():
                        channel.close()
                names = ", ".join(map(str, sorted(missing)))
                raise ProcessLost(
                    f"of {self._place.processes} processes these have not come within {JOIN_SECONDS:.0f} s: {names}. "
                    "Start `rekindle follow` for each of them"
                )
            try:
                connection, (host, *_) = server.accept()
            except OSError:
                pass
            else:
                self._pending.enter(connection, host)
                threading.Thread(target=self._greet, args=(connection,), name="rekindle greeting", daemon=True).start()
            connected = self._connected()
            if connected != joined:
                joined = connected
                self._waiting(len(joined))
        return self._channels

    def _connected(self) -> set[int]:
        """Return the connected followers. Pings them now and then, and forgets any that have left."""
        with self._lock:
            if time.monotonic() - self._pinged > PING_SECONDS:
                self._pinged = time.monotonic()
                for process, channel in tuple(self._channels.items()):
                    try:
                        channel.ping()
                    except ProcessLost:
                        self._channels.pop(process).close()
            return set(self._channels)

    def _greet(self, connection: socket.socket) -> None:
        try:
            with self._lock:
                joined = frozenset(self._channels)
            process, channel = greeting.lead(connection, self._key, self._place, joined, silence=FOLLOWER_SILENCE)
            with self._lock:
                present = self._pending.leave(connection)  # False: it was shut down, its place is taken or `run` ended
                joins = present and process not in self._channels
                if joins:
                    self._channels[process] = channel
            if not joins:
                channel.close()
        except RekindleError as error:
            log.warning("a connection of %s was closed: %s", _peer(connection), error)
            connection.close()
        finally:
            self._pending.leave(connection)


def enter(channel: Channel, place: ProcessPlace) -> dict[str, object]:
    """Join JAX's service with the others, once all have come. Return the leader's description of the session."""
    kind, content = channel.receive()
    if kind is not MessageKind.WELCOME:
        raise ProcessLost(f"the leader began with a {kind.name} message")
    session = from_json(content)
    initialize(str(session.get("service")), place)
    return session


def connect(coordinator: str, place: ProcessPlace, *, wait: float) -> Channel:
    """Connect to the leader, which may come later.

    Raises ProcessLost if there is none within `wait` seconds, and ProcessRefused if it refuses this process.
    """
    key = greeting.secret()
    host, port = address(coordinator)
    deadline = time.monotonic() + wait
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=greeting.GREETING_SECONDS)
            try:
                return greeting.follow(connection, key, place, silence=LEADER_SILENCE)
            except BaseException:
                connection.close()
                raise
        except (OSError, ProcessLost) as error:
            if time.monotonic() > deadline:
                raise ProcessLost(
                    f"there is no leader at {coordinator} after {wait:.0f} s: {error}. Open the session with this "
                    "coordinator"
                ) from None
            time.sleep(_LOOK_SECONDS)


def initialize(service: str, place: ProcessPlace) -> None:
    """Join JAX's service. A lost process does not end the others: the session reports the loss."""
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        jax.distributed.initialize(
            service,
            place.processes,
            place.process,
            initialization_timeout=int(JOIN_SECONDS),
            coordinator_bind_address=service,
            cluster_detection_method="deactivate",
        )
    except Exception as error:
        raise ProcessLost(f"the processes could not be joined at {service}: {error}") from error
    if jax.process_count() != place.processes:
        raise ProcessRefused(
            f"JAX sees {jax.process_count()} of {place.processes} processes: this platform's devices can't be shared"
        )


def _check_unused(processes: int) -> None:
    """Raise if JAX has devices already, which can't be joined with others any more."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import xla_bridge

        if xla_bridge.backends_are_initialized():
            raise ConfigError(
                "processes",
                processes,
                "JAX's devices are in use in this process already, so other processes' devices can't join them",
                "Open this session before anything else uses JAX, or restart the kernel",
            )


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=_family(host, 0)) as server:
        return int(server.getsockname()[1])


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "someone"
