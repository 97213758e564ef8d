"""Ray itself: join an existing cluster, or start Ray quietly for this machine only."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rekindle.errors import ConfigError, MissingExtra, RekindleError

try:
    import ray
    import ray._private.ray_constants
    import ray._private.utils
    import ray._private.worker
except ImportError as error:
    raise MissingExtra("ray", "ray") from error

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


def start() -> Callable[[], None]:
    """Join a cluster of Ray, or start Ray for this machine only. Return a function that undoes this."""
    global _users, _started
    with _lock:
        if ray.is_initialized() and not _started:
            return lambda: None
        if not ray.is_initialized():
            with _quietly():
                if not _join():
                    _start_patiently()
            _started = True
        _users += 1
    return _leave


def _join() -> bool:
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
        with _environment(_LOCAL), warnings.catch_warnings():
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


def _say_nothing(*ignored: object, **options: object) -> None: ...


def _leave() -> None:
    global _users, _started
    with _lock:
        _users -= 1
        if _users == 0 and _started:
            _started = False
            with _quietly():
                ray.shutdown()
            ray._private.worker.print_to_stdstream = _PRINT


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Let Ray log errors only."""
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
