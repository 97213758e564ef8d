"""The ledger of a session's programs: the form and the origin of each, and counts of traces and compilations."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from rekindle._src.core.drawable import Record
from rekindle._src.programs.buckets import Bucket, Key
from rekindle._src.programs.store import CompiledProgram
from rekindle_kernels import kernel_being_compiled


class Form(enum.IntEnum):
    """A form of a program. Higher ones run faster and take longer to make."""

    NONE = 0  # not ready
    PARTS = 1  # calls its parts one after the other: ready in a fraction of the time
    WHOLE = 2


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ProgramRecord(Record):
    """The origin of a ready program, and the seconds that it took."""

    name: str
    origin: Literal["loaded", "compiled"]
    seconds: float  # to load it, or to trace, lower and compile it
    why: str = ""  # the reason why it was compiled and not loaded


@dataclasses.dataclass(slots=True)
class ProgramEntry:
    """The state of one program."""

    key: Key
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    form: Form = Form.NONE
    record: ProgramRecord | None = None
    not_loaded: dict[Form, str] = dataclasses.field(default_factory=dict)  # why the store has none: it is asked once


class Ledger:
    """The programs of a session, by key."""

    def __init__(self, keys: Iterable[Key], has_parts: Callable[[Key], bool]) -> None:
        """Begin without programs. `has_parts` is True of a program that can be made of parts."""
        self.entries = {key: ProgramEntry(key) for key in keys}
        self._has_parts = has_parts
        self.ready: dict[Key, CompiledProgram] = {}
        self.least = Form.WHOLE  # the form that is enough for now
        self._provisional: set[Key] = set()  # needed in parts, and not replaced yet
        self._replaced: list[CompiledProgram | None] = []  # steps in flight may run in them
        self._soon: collections.Counter[Key] = collections.Counter()  # marks of each, from several threads
        self.demanded: frozenset[Key] = frozenset()  # steps want them, and they are made in the background
        self._lock = threading.Lock()

    @property
    def provisional(self) -> bool:
        """True if programs are made or run that whole ones will replace."""
        return self.least is Form.PARTS or bool(self._provisional)

    def enough(self, entry: ProgramEntry) -> Form:
        """Return the form to make a program in now."""
        return Form.PARTS if self.least is Form.PARTS and self._has_parts(entry.key) else Form.WHOLE

    def need(self, key: Key) -> ProgramEntry:
        """Return the entry of a program that the caller loads or makes. Raise KeyError for an unknown one."""
        if key not in self.entries:
            raise KeyError(f"{key.name} is not in the lattice: {', '.join(known.name for known in self.entries)}")
        entry = self.entries[key]
        with self._lock:
            if entry.form is Form.NONE and self.enough(entry) is Form.PARTS:
                self._provisional.add(key)
        return entry

    def offer(self, entry: ProgramEntry, form: Form, program: CompiledProgram, record: ProgramRecord) -> None:
        """Put a program in the place of the one that is ready, if any."""
        with self._lock:
            if entry.form is Form.PARTS:
                self._replaced.append(self.ready.get(entry.key))
            entry.form, entry.record = form, record
            self.ready[entry.key] = program
            if form is Form.PARTS:
                self._provisional.add(entry.key)
            else:
                self._provisional.discard(entry.key)

    def settle(self, entry: ProgramEntry) -> None:
        """Let a program stay as it is: nothing replaces it."""
        with self._lock:
            self._provisional.discard(entry.key)

    def jobs(self) -> list[ProgramEntry]:
        """Return the programs that whole ones will replace, in order of their tokens: small ones make most tokens."""
        with self._lock:
            keys = [key for key in self.entries if key in self._provisional and isinstance(key, Bucket)]
        return [self.entries[key] for key in sorted(keys, key=lambda key: key.tokens)]

    def soon(self, key: Key) -> bool:
        """True if a program is made next. Until it is ready, a step rather takes another one that can do the same."""
        return key in self._soon or key in self.demanded

    @contextlib.contextmanager
    def made_next(self, key: Key) -> Iterator[None]:
        """Mark `key` as made next, or ready, inside the `with` block."""
        with self._lock:
            self._soon[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._soon[key] -= 1
                if not self._soon[key]:
                    del self._soon[key]

    def records(self) -> tuple[ProgramRecord, ...]:
        """Return the records of all programs that are ready, in the order of the ledger."""
        return tuple(entry.record for entry in self.entries.values() if entry.record is not None)

    def close(self) -> None:
        """Let go of all programs, so that their memory is freed."""
        with self._lock:
            self.ready.clear()
            self._provisional.clear()
            self._replaced.clear()
            for entry in self.entries.values():
                entry.form = Form.NONE


class ProgramCounts:
    """Counts of traces and compilations, and the programs that are being compiled. Thread-safe."""

    def __init__(self) -> None:
        self.traces = 0
        self.compilations = 0
        self._compiling: dict[Key, None] = {}  # in the order of their beginning
        self._lock = threading.Lock()

    def traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts each of its traces."""

        def counted(*args: Any) -> Any:
            with self._lock:
                self.traces += 1
            return function(*args)

        return counted

    def compiled(self) -> None:
        """Count a compilation."""
        with self._lock:
            self.compilations += 1

    @contextlib.contextmanager
    def making(self, key: Key) -> Iterator[None]:
        """Name a program as being compiled inside the `with` block."""
        with self._lock:
            self._compiling[key] = None
        try:
            yield
        finally:
            with self._lock:
                del self._compiling[key]

    def describe_compiling(self) -> str:
        """Return the names of the programs and the kernel being compiled, in words; empty if there are none."""
        with self._lock:
            names = [key.name for key in self._compiling]
        kernel = kernel_being_compiled()
        programs = f"compiling program{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        return programs + (f", kernel {kernel}" if kernel else "") if names else ""
