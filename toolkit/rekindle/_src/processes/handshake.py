"""The greeting of two processes that share nothing but a secret: both prove that they know it, and derive keys.

    listener  MAGIC  its random number
    caller    MAGIC  its random number  HMAC(secret, "caller" and both)
    listener  1      HMAC(secret, "listener" and both); or 0, and the connection ends

Messages have a fixed length until both have proved themselves. The secret itself is never sent.
"""

from __future__ import annotations

import hmac
import secrets
import socket

from rekindle._src.processes.channel import Keys, exactly, mark
from rekindle._src.processes.greeting import GREETING_SECONDS
from rekindle.errors import ProcessLost, ProcessRefused

MAGIC = b"rekindle pages 1\n"
_RANDOM, _PROOF = 32, 32


def listen(connection: socket.socket, secret: bytes) -> Keys:
    """Greet a process that has connected. Return the keys of this side. Raises ProcessRefused without the secret."""
    connection.settimeout(GREETING_SECONDS)
    listener_random = secrets.token_bytes(_RANDOM)
    _send(connection, MAGIC + listener_random)
    message = bytes(exactly(connection, len(MAGIC) + _RANDOM + _PROOF))
    caller_random, proof = message[len(MAGIC) : -_PROOF], message[-_PROOF:]
    if not (
        message.startswith(MAGIC)
        and hmac.compare_digest(proof, mark(secret, b"caller", listener_random, caller_random))
    ):
        _send(connection, bytes([0]) + bytes(_PROOF))
        raise ProcessRefused("a process was refused that does not know the secret")
    _send(connection, bytes([1]) + mark(secret, b"listener", listener_random, caller_random))
    return Keys(
        mark(secret, b"to the caller", listener_random, caller_random),
        mark(secret, b"to the listener", listener_random, caller_random),
    )


def call(connection: socket.socket, secret: bytes) -> Keys:
    """Greet the listener; returns the keys of this side. Raises ProcessRefused if either does not know the secret."""
    connection.settimeout(GREETING_SECONDS)
    message = bytes(exactly(connection, len(MAGIC) + _RANDOM))
    if not message.startswith(MAGIC):
        raise ProcessRefused(
            "what answers there shares no pages as this version of rekindle does. Check the address, and install one "
            "version"
        )
    listener_random, caller_random = message[len(MAGIC) :], secrets.token_bytes(_RANDOM)
    _send(connection, MAGIC + caller_random + mark(secret, b"caller", listener_random, caller_random))
    answer = bytes(exactly(connection, 1 + _PROOF))
    if answer[0] != 1:
        raise ProcessRefused("it has another secret. Give both sessions the same one")
    if not hmac.compare_digest(answer[1:], mark(secret, b"listener", listener_random, caller_random)):
        raise ProcessRefused("what answers there does not know the secret. Give both sessions the same one")
    return Keys(
        mark(secret, b"to the listener", listener_random, caller_random),
        mark(secret, b"to the caller", listener_random, caller_random),
    )


def _send(connection: socket.socket, content: bytes) -> None:
    try:
        connection.sendall(content)
    except OSError as error:
        raise ProcessLost(f"the connection broke: {error}") from error
