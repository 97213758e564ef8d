"""Cases that only CI runs, and the draw of a fourth of the files for each change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest


def by_default(cases: Iterable[Any], chosen: int | Callable[[Any], bool] = 1) -> list[Any]:
    """All cases, of which all but the first `chosen`, or but those for which it is true, are thorough."""
    result = []
    for place, case in enumerate(cases):
        quick = place < chosen if isinstance(chosen, int) else chosen(case)
        marks = () if quick else (pytest.mark.thorough,)
        if isinstance(case, type(pytest.param())):
            result.append(pytest.param(*case.values, marks=(*case.marks, *marks), id=case.id))
        else:
            result.append(pytest.param(*(case if type(case) is tuple else (case,)), marks=marks))
    return result


def drawn(file: str, change: str) -> bool:
    """True if a file's tests are of the fourth that is run at a change. Each change draws its own."""
    return sha256(f"{change} {file}".encode()).digest()[0] % 4 == 0


def file_of(item: pytest.Item) -> Path:
    """The file that a test is drawn by: the `source` that it is for, such as a tutorial, or its own."""
    source = (
        item.callspec.params.get("source") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    )
    return source if isinstance(source, Path) else item.path


trio_in_ci = pytest.mark.parametrize("anyio_backend", by_default(["asyncio", "trio"]))


@pytest.fixture(params=by_default(["asyncio", "trio"]))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Import this in a module, or in the conftest.py of a folder, whose tests all leave trio to CI."""
    return str(request.param)


@pytest.fixture(name="anyio_backend")
def one_event_loop() -> str:
    """For modules that test arithmetic, in which the event loop has no say: import it."""
    return "asyncio"
