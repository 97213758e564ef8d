"""Bounds on what other processes send: pages of other sessions, and the processes of one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from project.bounds.records import OURS, PACE, PEER, SHOWN, SMALL, STRANGER, TIME, Bound, Other, within
from rekindle._src.channels import greeting
from rekindle._src.channels.channel import MessageKind
from rekindle._src.kvcache import sharing


def greetings(count: int) -> Callable[[], object]:
    """Connections that know no secret and say nothing, each with the thread that waits for it."""

    def work() -> object:
        pending = greeting.PendingConnections(sharing.GREETINGS)
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                near, far = (stack.enter_context(end) for end in socket.socketpair())

                def listen(connection: socket.socket = near) -> None:
                    with contextlib.suppress(Exception):
                        greeting.listen(connection, b"a secret of this test")

                pending.enter(near, "host")
                threading.Thread(target=listen, daemon=True).start()
                far.recv(1 << 10)
        return None

    return work


def introductions(count: int) -> Callable[[], object]:
    from rekindle.errors import StoreError

    text = b'{"leaves":[' + b"[]," * ((MessageKind.IDENTITY.limit - 20) // 3) + b"[]]}"
    identity: Any = None  # it does not come so far

    def work() -> object:
        for _ in range(count):
            with contextlib.suppress(StoreError):
                sharing.read_introduction(identity, text)
        return None

    return work


BOUNDS: list[Bound] = [
    STRANGER(
        "kvcache/sharing.py: GREETINGS",
        counts="connections that have not greeted",
        most=sharing.GREETINGS,
        unit="a silent one",
        feed=greetings,
        count=sharing.GREETINGS,
        seconds=0.5,
        mib=8,
    ),
    PEER(
        "channels/channel.py: MessageKind",
        counts="introductions",
        most=sharing.CONNECTIONS,
        unit="empty lists",
        feed=introductions,
        count=sharing.CONNECTIONS,
        seconds=2,
        mib=16,
    ),
]

OTHERS: dict[str, dict[str, Other]] = {
    "kvcache/persist/prefix_file.py": {
        "MOST_INDEX": Other("bytes of a sender's index, which are read once; payloads follow once it is verified"),
    },
    "kvcache/persist/segment.py": {
        "MAX_PAGE_SIZE": OURS, "MAX_VISITS": OURS, "_LONGEST_NAME": SMALL, "_LARGEST_NUMBER": SMALL,
        "_LONGEST_HEADER": within("values of a checkpoint's JSON"),
    },
    "kvcache/sharing.py": {
        "MOST_WANTED": Other("of those that know the secret: 24 bytes each"),
        "MOST_LISTED": Other("of those that know the secret: a record of a page each"),
    },
    "kvcache/tiers/disk.py": {"MOST_PAGES": PACE, "_MOST_FAILURES": TIME},
    "kvcache/tiers/restoring.py": {"MAX_BYTES": PACE},
    "kvcache/tiers/tiers.py": {"_MOST_DECODE": PACE},
    "kvcache/tree.py": {"MAX_ASIDE": OURS},
    "kvcache/writer.py": {"LONGEST_RETRY": TIME},
    "processes/facts.py": {"_LONGEST": SHOWN},
    "processes/replay.py": {"LONGEST_ERROR": SHOWN},
    "processes/team.py": {"LONGEST_LOOK": TIME, "MOST_NAMES": PACE, "MOST_STORED": PACE},
}  # fmt: skip
