"""Both ends of a connection, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Return the values or exceptions of functions that run at the same time."""
    found: list[Any] = [None] * len(functions)

    def work(index: int) -> None:
        try:
            found[index] = functions[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found
