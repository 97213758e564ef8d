"""Compilation of grammars: in threads of their own, after a trial in processes if it might end this one.

A simple grammar is compiled at once, by a thread that has no others; one that is too deep is refused. Any other one is
first tried by a process, within bounds of time, memory and stack, and may end that process; a grammar that passed is
compiled here, on a larger stack. At most `COMPILING` are tried at a time, `MOST_WAITING` wait, and next comes the
caller who has used the processes least.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rekindle._src.core.guard import START_SECONDS, Cause, GuardEnded, GuardLimits, GuardProcess
from rekindle._src.core.priority import yield_to_others
from rekindle._src.structured import compile_worker
from rekindle.errors import Busy, InvalidRequest, RequestFailed

if TYPE_CHECKING:
    from rekindle._src.structured.spec import Spec

T = TypeVar("T")
COMPILING = 2  # processes
COMPILE_SECONDS = 2.0  # of a processor, after which a process is ended
LONGEST = 60.0  # seconds for the same on a machine that is busy
MOST_WAITING = 64
IDLE_SECONDS = 60.0  # after which a thread ends, and its process
MEMORY = 1 << 30
WORKER_STACK = 16 << 20
STACK = 32 << 20  # of the threads here: twice a process's, so that no grammar overflows that passed there
_REMEMBERED = 1_024  # callers

# References and rules that may follow each other. A level takes up to 21 kB of llguidance's stack (an object's property
# that is a reference), and the process that tries it has 16 MiB.
MOST_LEVELS = 500
SIMPLE_CHARACTERS = 8_192
SIMPLE_COUNT = 1_000  # such as minItems: each is a part of the grammar
# Keywords of a schema; their parts are compiled once each, so that a short schema takes a few milliseconds.
_SCHEMAS = frozenset(("items", "additionalProperties"))
_NAMED = frozenset(("properties", "$defs", "definitions"))
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum"))
_WORDS = frozenset(("title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly"))
_VALUES = frozenset(("type", "required", "enum", "const"))
_ALONE = frozenset(("anyOf", "$ref"))  # keywords next to them would be merged into each part

# Where strings, regexes, classes and comments begin in Lark's and in llama.cpp's notation, and where those end that do.
_LARK, _GBNF = re.compile(r'["/]'), re.compile(r'["\[#]')
_WHOLE = {
    '"': re.compile(r'"(?:\\.|[^"\\])*+"'),
    "/": re.compile(r"/(?!\*)(?:\\.|[^/\\])++/"),
    "[": re.compile(r"\[(?:\\.|[^\]\\])*+\]"),
}
_RULE = re.compile(r"[ \t]*+[?!]*+([A-Za-z_][\w-]*+)[^:=|]*+:(?::=)?(?!:)")
_NAME = re.compile(r"[A-Za-z_][\w-]*")


class Job(Generic[T]):
    """A grammar that is being compiled, for one or more requests."""

    def __init__(self, spec: Spec, caller: str) -> None:
        self.spec: Spec = spec
        self.caller: str = caller
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.waiting: int = 1  # requests

    @property
    def started(self) -> bool:
        return self.future.running() or self.future.done()


class Compilers(Generic[T]):
    """Compiles specs in threads that live while there is work."""

    def __init__(
        self,
        compile: Callable[[Spec, str], T],
        needs: Callable[[Spec], dict[str, Any]],
        prepare: Callable[[Spec], object],
    ) -> None:
        """Set up. `compile` takes a spec and its text for llguidance. `needs` returns the settings of a process that
        tries specs, and `prepare` makes the objects here that compiling needs."""
        self.compile, self._needs, self._prepare = compile, needs, prepare
        self._changed = threading.Condition()
        self.simple, self.others = _Lane(1), _Lane(COMPILING)
        self._used: dict[str, float] = {}  # seconds that each caller has used the processes, lately
        self._closed = False
        self._guards: set[GuardProcess] = set()

    def submit(self, spec: Spec, caller: str = "") -> Job[T]:
        """Begin to compile a spec, or wait for others. Raises `Busy` if too many wait already."""
        lane = self.simple if is_simple(spec) else self.others
        job: Job[T] = Job(spec, caller)
        evicted: Job[T] | None = None
        with self._changed:
            if len(lane.jobs) >= MOST_WAITING:
                evicted = lane.one_too_many(caller)
                if evicted is None:
                    raise busy_error(f"{len(lane.jobs)} wait already")
                lane.jobs.remove(evicted)
            lane.jobs.append(job)
            if lane.idle < len(lane.jobs) and lane.threads < lane.max_threads and not self._closed:
                lane.threads += 1
                _start(lambda: self._run(lane))
            self._changed.notify_all()
        if evicted is not None and evicted.future.set_running_or_notify_cancel():
            evicted.future.set_exception(busy_error(f"{MOST_WAITING} wait already"))
        return job

    def drop(self, job: Job[T]) -> None:
        """Forget a job that has not begun."""
        with self._changed:
            for lane in (self.simple, self.others):
                if job in lane.jobs:
                    lane.jobs.remove(job)

    def close(self) -> None:
        """End the processes; waiting jobs are refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for guard in self._guards:
                guard.kill()
            jobs = [*self.simple.jobs, *self.others.jobs]
            self.simple.jobs.clear()
            self.others.jobs.clear()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(RequestFailed("the session was closed. Open another one"))

    def _run(self, lane: _Lane) -> None:
        """Take one job after the other, in a thread."""
        state = ThreadState()
        if lane is self.others:
            yield_to_others()
        try:
            while (job := self.next_job(lane)) is not None:
                start = time.monotonic()
                try:
                    text = self._text(job.spec) if lane is self.simple else self.text_after_trial(job.spec, state)
                    job.future.set_result(self.compile(job.spec, text))
                except BaseException as error:
                    job.future.set_exception(error)
                if lane is self.others:
                    self._count(job.caller, time.monotonic() - start)
                del job
        finally:
            self._end(state)

    def _text(self, spec: Spec) -> str:
        self._prepare(spec)
        try:
            return compile_worker.grammar_text(**_fields(spec))
        except ValueError as error:
            raise refusal_error(spec, str(error)) from None

    def text_after_trial(self, spec: Spec, state: ThreadState) -> str:
        """Return a grammar's text for llguidance, once a process has compiled it."""
        check_levels(spec)
        if state.guard is None or state.guard.ended:
            self._end(state)
            state.guard = new_guard(self._needs(spec))
            with self._changed:
                self._guards.add(state.guard)
                if self._closed:
                    state.guard.kill()
        self._prepare(spec)  # while the process starts
        return text_of_trial(state.guard, spec)

    def _end(self, state: ThreadState) -> None:
        if state.guard is not None:
            state.guard.end()
            with self._changed:
                self._guards.discard(state.guard)

    def next_job(self, lane: _Lane) -> Job[T] | None:
        """Wait for the next job; None after `IDLE_SECONDS` without one, when the thread is to end."""
        with self._changed:
            lane.idle += 1
            try:
                deadline = time.monotonic() + IDLE_SECONDS
                while not self._closed:
                    while lane.jobs:
                        job = min(lane.jobs, key=lambda one: self._used.get(one.caller, 0.0))
                        lane.jobs.remove(job)
                        if job.future.set_running_or_notify_cancel():
                            return job
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        break
                lane.threads -= 1
                return None
            finally:
                lane.idle -= 1

    def _count(self, caller: str, seconds: float) -> None:
        with self._changed:
            for name in self._used:
                self._used[name] *= 0.9
            self._used[caller] = self._used.get(caller, 0.0) + seconds
            while len(self._used) > _REMEMBERED:
                del self._used[min(self._used, key=self._used.__getitem__)]


class _Lane:
    """Jobs that wait for the same threads."""

    def __init__(self, max_threads: int) -> None:
        self.max_threads = max_threads
        self.jobs: list[Any] = []
        self.threads = self.idle = 0

    def one_too_many(self, caller: str) -> Job[Any] | None:
        """Return the latest job of the caller with the most jobs, if `caller` has fewer."""
        counts = collections.Counter(job.caller for job in self.jobs)
        name, count = counts.most_common(1)[0]
        if count <= counts[caller] + 1:
            return None
        return next(job for job in reversed(self.jobs) if job.caller == name)


class ThreadState:
    """The state of one thread."""

    guard: GuardProcess | None = None


def new_guard(settings: Mapping[str, Any]) -> GuardProcess:
    """Start a process that tries grammars."""
    limits = GuardLimits(MEMORY, WORKER_STACK, gives_way=True)
    try:
        return GuardProcess(Path(compile_worker.__file__), settings, limits, modules=("llguidance",))
    except OSError as error:
        raise RequestFailed(
            f"no process could be started to compile the grammar: {error}. Check {sys.executable!r}, or "
            "use a schema without patterns and allOf"
        ) from error


def text_of_trial(guard: GuardProcess, spec: Spec) -> str:
    """Try a grammar and return its text for llguidance. Raises `InvalidRequest`, or `Busy`."""
    try:
        match guard.ask(_fields(spec), seconds=LONGEST, processor=COMPILE_SECONDS):
            case {"refused": str(message)}:
                raise refusal_error(spec, message)
            case {"text": str(text)}:
                return text
        raise guard.refuse_answer()
    except GuardEnded as end:
        raise _end_error(spec, end) from None


def _end_error(spec: Spec, end: GuardEnded) -> Exception:
    """Return the error of a grammar that ended its guard."""
    match end.cause:
        case Cause.START:
            return busy_error(f"the process that tries this one did not start within {START_SECONDS:g} s")
        case Cause.LATE if sys.platform != "win32":
            return busy_error(f"this one did not get {COMPILE_SECONDS:g} s of a processor within {LONGEST:g} s")
        case Cause.LATE | Cause.PROCESSOR:
            problem, fix = f"took over {COMPILE_SECONDS:g} s to compile, and was ended", "Use a smaller one"
        case Cause.STACK:
            problem, fix = "nests too deeply: its compiler's stack overflowed", "Use fewer levels"
        case Cause.MEMORY:
            problem, fix = f"takes over {MEMORY >> 20:,} MiB to compile, and was ended", "Use a smaller one"
        case _:
            return busy_error(f"the process that tried this one ended with status {end.status}")
    return InvalidRequest(spec.kind, spec.text, problem, fix)


def busy_error(why: str) -> Busy:
    """Return the error for a request that could not compile its grammar because of other requests."""
    return Busy(f"grammars of other requests are being compiled, and {why}. Send the request again", retry_after=5.0)


_FIXES = {
    "schema": "Change the schema, or pass lenient=True to leave out what can't be checked",
    "regex": "Use the syntax of Rust's regex crate: no look-around, no back-references",
    "grammar": "Use Lark's notation with a rule `start`, or llama.cpp's with a rule `root`",
    "choice": "Use fewer or shorter strings",
    "json": "Report it: this grammar is built in",
}


def refusal_error(spec: Spec, message: str) -> InvalidRequest:
    """Return the error of a grammar that llguidance refuses with this message."""
    if len(spec.text) > _SHOWN:
        message = message.replace(spec.text, f"{spec.text[:_SHOWN]}...")
    return InvalidRequest(spec.kind, spec.text, f"can't be followed: {first_line(message)}", _FIXES[spec.kind])


_MOST_SAID = 800  # characters of a compiler's message
_SHOWN = 80  # of a text that it repeats


def first_line(message: str) -> str:
    """Return the message of an llguidance error, without the state that it lists below.

    Of a long one, return the beginning and the end.
    """
    text = message.strip().partition("\n<")[0].strip() or "it gave no reason"
    return text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID // 2]} ... {text[-_MOST_SAID // 2 :]}"


def _fields(spec: Spec) -> dict[str, Any]:
    return {
        "kind": spec.kind,
        "text": spec.text,
        "lenient": spec.lenient,
        "whitespace_flexible": spec.whitespace_flexible,
    }


_stack_size = threading.Lock()  # it is a setting of the interpreter


def _start(run: Callable[[], object]) -> None:
    with _stack_size:
        before = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="rekindle grammars", daemon=True).start()
        finally:
            threading.stack_size(before)


def is_simple(spec: Spec) -> bool:
    """True if a grammar surely compiles in milliseconds: it is short, and has nothing that multiplies."""
    if spec.kind == "json":
        return True
    if len(spec.text) > SIMPLE_CHARACTERS or spec.kind not in ("schema", "choice"):
        return False
    try:
        return spec.kind == "choice" or _simple(json.loads(spec.text))
    except RecursionError:  # it nests too deeply for this stack, and another one compiles it
        return False


def _simple(schema: Any) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, Mapping):
        return False
    structural = schema.keys() - _WORDS - {"$defs", "definitions"}
    if structural & _ALONE and len(structural) > 1:
        return False
    for name, value in schema.items():
        if name in _WORDS or name in _VALUES:
            continue
        if name in _SCHEMAS:
            parts = [value]
        elif name in _NAMED and isinstance(value, Mapping):
            parts = [*value.values()]
        elif name == "anyOf" and isinstance(value, list):
            parts = value
        elif (name == "$ref" and isinstance(value, str)) or (name in _COUNTS and _small(value)):
            continue
        else:
            return False
        if not all(map(_simple, parts)):
            return False
    return True


def _small(value: Any) -> bool:
    return isinstance(value, int) and abs(value) <= SIMPLE_COUNT


def check_levels(spec: Spec) -> None:
    """Raise `InvalidRequest` for a chain of references or rules that might overflow a compiler's stack."""
    if spec.kind == "schema":
        try:
            levels = schema_levels(json.loads(spec.text))
        except RecursionError:
            levels = MOST_LEVELS + 1
        except ValueError:  # a number of too many digits, which llguidance reports itself
            return
        words = "references, each in what the one before refers to,"
    elif spec.kind == "grammar":
        levels, words = rule_levels(spec.text), "rules, each named by the one before,"
    else:
        return
    if levels > MOST_LEVELS:
        raise InvalidRequest(
            spec.kind,
            spec.text,
            f"has a chain of {levels:,} {words} and {MOST_LEVELS} are possible",
            "Use fewer levels; one that refers to itself nests without end",
        )


def schema_levels(schema: Any) -> int:
    """Return the longest chain of nested references, when each is followed at its first occurrence."""
    seen: set[int] = set()
    deepest = 0
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        node, level = pending.pop()
        if id(node) in seen or not isinstance(node, Mapping | list):
            continue
        seen.add(id(node))
        deepest = max(deepest, level)
        following: list[tuple[Any, int]] = []
        if isinstance(node, Mapping):
            following = [(part, level) for name, part in node.items() if name not in ("$defs", "definitions")]
            if isinstance(reference := node.get("$ref"), str):
                following.append((_at(schema, reference), level + 1))
        else:
            following = [(part, level) for part in node]
        pending += reversed(following)
    return deepest


def _at(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a pointer names; None for another kind of reference."""
    head, _, pointer = reference.partition("#")
    if head:
        return None
    node = schema
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdigit() and len(name) < 8 and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _without_strings(line: str, beginnings: re.Pattern[str]) -> str:
    """Return a line of a grammar with a space for each string, regex, class and comment.

    One that does not end stays, and so do all of its kind that begin later: an escape leaves each of them the same end.
    """
    parts: list[str] = []
    at, endless = 0, set[str]()
    for beginning in beginnings.finditer(line):
        start, kind = beginning.start(), beginning[0]
        if start < at or kind in endless:
            continue
        if kind == "#" or line.startswith("//", start):
            end = len(line)
        elif (match := _WHOLE[kind].match(line, start)) is not None:
            end = match.end()
        else:
            if not line.startswith("/*", start):
                endless.add(kind)
            continue
        parts += line[at:start], " "
        at = end
    return "".join((*parts, line[at:]))


def rule_levels(text: str) -> int:
    """Return the longest chain of rules that name each other, when each is followed at its first mention."""
    beginnings = _GBNF if "::=" in text else _LARK
    rules: dict[str, list[str]] = {}
    names: list[str] = []
    for line in text.split("\n"):
        line = _without_strings(line, beginnings)
        match = _RULE.match(line)
        if match is not None:
            names = rules.setdefault(match[1], [])
            line = line[match.end() :]
        names += _NAME.findall(line)
    seen: set[str] = set()
    deepest = 0
    for first in ("start", "root", *rules):
        levels: list[Iterator[str]] = []
        rule: str | None = first
        while True:
            if rule is not None and rule in rules and rule not in seen:
                seen.add(rule)
                levels.append(iter(rules[rule]))
                deepest = max(deepest, len(levels))
            if not levels:
                break
            rule = next(levels[-1], None)
            if rule is None:
                levels.pop()
    return deepest
