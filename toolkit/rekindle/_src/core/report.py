"""Reports: facts about a row, other than its token, that the features of a step send to the caller.

`RowResult.reports` and `TokenEvent.reports` have the values of each kind of report by its name. A kind is one `Report`;
the features, followers and outputs that know it read the values through it, and records know none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
Reports = Mapping[str, tuple[Any, ...]]
NewReports = dict[str, tuple[Any, ...]]  # while they are made


class _NoReports(dict[str, tuple[Any, ...]]):
    """An empty mapping that can be the default of a record's field."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return 0


NO_REPORTS: Reports = _NoReports()


class ReportRecord(Protocol):
    """A record with reports."""

    @property
    def reports(self) -> Reports: ...


class Report(Generic[T]):
    """One kind of report, by its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def of(self, record: ReportRecord) -> tuple[T, ...]:
        """Return the values of this kind in a record."""
        return record.reports.get(self.name, ())

    def put(self, reports: NewReports, *values: T) -> None:
        """Set the values of this kind; without any, there is no such report."""
        if values:
            reports[self.name] = values
        else:
            reports.pop(self.name, None)


def joined(earlier: Reports, later: Reports) -> Reports:
    """Join the reports of two records of one request."""
    if not earlier or not later:
        return earlier or later
    return {name: (*earlier.get(name, ()), *later.get(name, ())) for name in dict.fromkeys((*earlier, *later))}
