"""Grammars of strangers: what would end the process that compiles them, or hold it, ends at most its own request."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.bounds import Within
from helpers.sessions import eventually
from rekindle import tiny
from rekindle._src.core import guard
from rekindle._src.core.sampling import MAX_STRUCTURE
from rekindle._src.structured import compilers
from rekindle._src.structured.grammar import Grammars, Guide
from rekindle._src.structured.spec import Kind, Spec
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import Busy, InvalidRequest

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
TOKENIZER = Tokenizer.load(tiny.folder())


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """Processes have half of their stack, and time where the machine is busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilers, "WORKER_STACK", compilers.WORKER_STACK // 2)
        patch.setattr(compilers, "COMPILE_SECONDS", 20.0)
        made = Grammars(TOKENIZER, TOKENIZER.vocab_size)
        yield made
        made.close()


def references(levels: int, part: Callable[[Any], Any]) -> Spec:
    """A schema that is a chain: `part` makes what refers to the next one."""
    chain = {f"d{index}": part({"$ref": f"#/$defs/d{index + 1}"}) for index in range(levels - 1)}
    return Spec("schema", json.dumps({"$ref": "#/$defs/d0", "$defs": chain | {f"d{levels - 1}": {"type": "object"}}}))


def rules(levels: int, head: str, rule: str, last: str) -> Spec:
    """A grammar that is a chain of rules."""
    chain = [rule.format(index, index + 1) for index in range(levels - 2)]
    return Spec("grammar", "\n".join([head, *chain, last.format(levels - 2)]) + "\n")


CHAINS: dict[str, Callable[[int], Spec]] = {
    "items": lambda levels: references(levels, lambda following: {"type": "array", "items": following}),
    "properties": lambda levels: references(
        levels, lambda following: {"type": "object", "properties": {"a": following}, "additionalProperties": False}
    ),
    "allOf": lambda levels: references(levels, lambda following: {"allOf": [following, {"type": "object"}]}),
    "anyOf": lambda levels: references(levels, lambda following: {"anyOf": [following, {"type": "null"}]}),
    "$ref": lambda levels: references(levels, lambda following: following),
    "rules": lambda levels: rules(levels, "start: r0", 'r{}: "a" r{}', 'r{}: "b"'),
    "terminals": lambda levels: rules(levels, "start: T0", 'T{}: "a" T{}', 'T{}: "b"'),
    "gbnf": lambda levels: rules(levels, "root ::= r0", 'r{} ::= "a" r{}', 'r{} ::= "b"'),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_of_references_or_rules_is_refused_before_it_is_compiled(grammars: Grammars, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=r"has a chain of 1,50. (references|rules).* and 500 are possible"):
        grammars.compile(CHAINS[kind](1_502))


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_within_the_bound_leaves_half_of_the_stack(grammars: Grammars, kind: str) -> None:
    grammar = grammars.compile(CHAINS[kind](compilers.MOST_LEVELS - 1))
    guides: list[Guide] = []

    def follow() -> None:
        guides.append(grammar.guide(TOKENIZER.eos_ids).copy())

    before = threading.stack_size(512 << 10)  # what a thread has where it has least
    try:
        thread = threading.Thread(target=follow)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert guides


def test_a_stack_that_overflows_ends_its_request_alone(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "MOST_LEVELS", 1 << 30)
    with pytest.raises(InvalidRequest, match="nests too deeply: its compiler's stack overflowed"):
        grammars.compile(CHAINS["properties"](4_000))
    assert grammars.compile(Spec("regex", "[ab]{3}")), "another process takes its place"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("schema", json.dumps({"type": "string", "allOf": [{"pattern": f"a{index}.*b"} for index in range(60)]})),
        ("grammar", "root ::= " + " ".join(f"r{index}" for index in range(20_000)) + "\n"
         + "".join(f'r{index} ::= "a"\n' for index in range(20_000))),
    ],
    ids=["patterns", "gbnf"],
)  # fmt: skip
def test_a_grammar_that_takes_too_long_is_ended_and_not_tried_again(
    kind: Kind, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Grammars(TOKENIZER, TOKENIZER.vocab_size)
    monkeypatch.setattr(compilers, "COMPILE_SECONDS", 0.1)
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"took over 0\.1 s to compile, and was ended"):
                made.compile(Spec(kind, text))
            monkeypatch.setattr(compilers, "GuardProcess", None)
        assert made.compile(Spec("schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'))
    finally:
        made.close()


def test_a_process_that_does_not_start_in_time_blames_no_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request may be sent again: nothing is known against its grammar."""
    path = tmp_path / "jobs.py"
    path.write_text("import threading\ndef prepare(settings):\n    threading.Event().wait()\n")
    monkeypatch.setattr(guard, "START_SECONDS", 0.1)
    process = guard.GuardProcess(path, {}, guard.GuardLimits(256 << 20))
    with pytest.raises(Busy, match=r"did not start within 60 s\. Send the request again"):
        compilers.text_of_trial(process, Spec("regex", "[ab]{3}"))


@pytest.mark.parametrize("answer", ["{}", "{'text': 7}", "{'refused': [7]}"])
def test_an_answer_without_a_grammar_ends_its_process(answer: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.py"
    path.write_text(f"def prepare(settings):\n    return lambda job: {answer}\n")
    process = guard.GuardProcess(path, {}, guard.GuardLimits(256 << 20))
    with pytest.raises(Busy, match="the process that tried this one ended with status"):
        compilers.text_of_trial(process, Spec("regex", "[ab]{3}"))
    assert not process.usable


def test_simple_grammars_never_wait_for_others_and_places_are_shared_between_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, goes, taken = Grammars(TOKENIZER, TOKENIZER.vocab_size), threading.Event(), []
    compile_it = made.compilers.compile

    def compile(spec: Spec, text: str) -> Any:
        if spec.kind == "regex":
            assert goes.wait(60)
        return compile_it(spec, text)

    class Waiting(list[Any]):
        def remove(self, job: Any) -> None:
            super().remove(job)
            taken.append(job.spec.text)

    made.compilers.compile = compile
    made.compilers.others.jobs = Waiting()
    monkeypatch.setattr(compilers, "COMPILING", 2)
    monkeypatch.setattr(compilers, "MOST_WAITING", 6)
    try:
        many = [made.begin(Spec("regex", f"a{{{index}}}"), "greedy") for index in range(1, 3)]
        eventually(lambda: all(job.started for job in many))
        many += [made.begin(Spec("regex", f"a{{{index}}}"), "greedy") for index in range(3, 9)]
        with pytest.raises(Busy, match="6 wait already"):
            made.begin(Spec("regex", "a{99}"), "greedy")
        other = made.begin(Spec("regex", "b"), "other")
        with pytest.raises(Busy, match="6 wait already"):
            many[-1].future.result(5)
        same = made.begin(Spec("regex", "b"), "third")
        assert same is other, "equal requests share a job"
        assert made.compile(Spec("choice", '["yes", "no"]')), "while both processes are held"
        dropped = many[-2]
        made.leave(dropped)
        goes.set()
        for job in (*many[:-2], other):
            assert job.future.result(30)
        assert not dropped.started
        assert taken.index("b") < taken.index("a{3}"), taken
        assert made.find(Spec("regex", "b")) is not None
    finally:
        goes.set()
        made.close()


@pytest.mark.parametrize(
    ("schema", "simple"),
    [
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, True),
        ({"$defs": {"b": {"enum": [1]}}, "type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 9}, True),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}], "default": None, "title": "x"}, True),
        ({"type": "array", "minItems": 10_000}, False),
        ({"type": "string", "pattern": "a"}, False),
        ({"anyOf": [{"type": "null"}], "properties": {}}, False),
        ({"enum": ["x" * 9_000]}, False),
    ],
)
def test_which_schemas_are_compiled_without_a_trial(schema: Any, simple: bool) -> None:
    assert compilers.is_simple(Spec("schema", json.dumps(schema))) is simple


def test_levels_are_counted_as_they_are_followed() -> None:
    assert compilers.rule_levels('start: a b\na: "x" b\nb: c\nc: "c c"') == 4
    assert compilers.rule_levels('root ::= [a-z] b # c\nb ::= ("c" |\n d)\nd ::= root') == 3
    tree = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
    assert compilers.schema_levels(tree) == 1


def test_a_compiler_ends_with_its_parent() -> None:
    code = (
        "import sys, os, rekindle; from rekindle import tiny; from rekindle._src.text.tokenizer import Tokenizer;"
        "from rekindle._src.structured.grammar import Grammars; from rekindle._src.structured.spec import Spec;"
        "t = Tokenizer.load(tiny.folder()); g = Grammars(t, t.vocab_size); g.compile(Spec('regex', 'a'));"
        "print(next(iter(g.compilers._guards)).pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)

    def gone() -> bool:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    eventually(gone)


def test_a_schema_that_nests_too_deeply_for_the_stack_is_not_simple() -> None:
    """Callers may be deep in calls themselves, where Python parses fewer levels."""
    text = '{"items":' * 500 + "{}" + "}" * 500

    def deep(levels: int) -> bool:
        return compilers.is_simple(Spec("schema", text)) if levels == 0 else deep(levels - 1)

    assert not deep(sys.getrecursionlimit() - 450 - len(inspect.stack(0)))


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ('start: a "b: c" /d: e/ // f\na: g\ng: "x"', 3),
        ('start: a\na: "b" " b\nb: "c"', 3),  # a string that does not end is left, and what follows it
        (r'start: "\\" a' "\na: b", 2),
        (r'start: "\" a' "\na: b", 2),
        ('start: a / b\nb: c\nc: "x"', 3),
        ("start: /* a\na: b", 2),
        ('root ::= "a" [b"] c # d\nc ::= root', 2),
        ("root ::= [a\na ::= b", 2),
    ],
)
def test_names_within_strings_are_no_rules(text: str, levels: int) -> None:
    assert compilers.rule_levels(text) == levels


@pytest.mark.parametrize("part", ['\\"', "\\/", "[", "a", "/", '"', "#", ":"])
def test_a_long_grammar_is_looked_through_at_once(part: str, within: Within) -> None:
    """Eight kilobytes took two seconds, and others wait while an expression is matched."""
    with within(5):
        for before in ("", "root ::= "):
            compilers.rule_levels(before + part * (MAX_STRUCTURE // 4 // len(part)))


def test_a_refused_expression_does_not_come_back_many_times_over(grammars: Grammars) -> None:
    """The library's message repeats it up to four times, so that a megabyte was an error of several."""
    with pytest.raises(InvalidRequest, match="exceed the maximum number of nested") as refused:
        grammars.compile(Spec("regex", "(" * 2_000 + "a" + ")" * 2_000))
    assert len(str(refused.value)) < 1_500
