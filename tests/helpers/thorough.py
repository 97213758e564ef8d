"""Cases that the default tests leave to the thorough sections of `.ci/deep`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def by_default(cases: Iterable[Any], chosen: int | Callable[[Any], bool] = 1) -> list[Any]:
    """Return all cases, marked thorough except the first `chosen`, or except the ones that `chosen` is true for."""
    result = []
    for place, case in enumerate(cases):
        quick = place < chosen if isinstance(chosen, int) else chosen(case)
        marks = () if quick else (pytest.mark.thorough,)
        if isinstance(case, type(pytest.param())):
            result.append(pytest.param(*case.values, marks=(*case.marks, *marks), id=case.id))
        else:
            result.append(pytest.param(*(case if type(case) is tuple else (case,)), marks=marks))
    return result


trio_in_ci = pytest.mark.parametrize("anyio_backend", by_default(["asyncio", "trio"]))


@pytest.fixture(params=by_default(["asyncio", "trio"]))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Import this in a module, or in the conftest.py of a folder, to leave trio to CI in all of its tests."""
    return str(request.param)


@pytest.fixture(name="anyio_backend")
def one_event_loop() -> str:
    """Import this in modules that test arithmetic, which the event loop can't affect."""
    return "asyncio"
