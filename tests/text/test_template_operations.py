"""What a chat template may use writes what Jinja's own writes, and no operation runs for long in one go.

While an operation of Python's runs, no other thread does. The meter counts each before it runs, and so the processor
time between two counts is what a neighbour waits for at most. It does not depend on how busy the machine is.
"""

# ruff: noqa: E501 (templates keep their lines)

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from helpers.thorough import by_default
from rekindle._src.text import ChatTemplate
from rekindle._src.text.replies import ReplyFormat
from rekindle._src.text.template_code import MAX_TEMPLATE, parsed
from rekindle._src.text.template_filters import FILTERS, TESTS
from rekindle._src.text.template_limits import Meter
from rekindle._src.text.template_operations import METHODS
from rekindle.errors import CheckpointError, RekindleError

USER = {"role": "user", "content": "hi"}
LONGEST = 0.25  # seconds of a processor; the longest measured is 0.14 on an EPYC (Zen 3)
VALUES: dict[str, Any] = {
    "s": "  Hello big-World (of) 'é' 你好 ǆ ﬃ \n two\r\nlines\x0b ",
    "words": ["pear", "Apple", "fig", "apple", "Fig"],
    "n": [3, 1, 2.5, -7, True],
    "d": {"b": 1, "A": [1, {"x": None}], "c": "z", "items": 5, "copy": 6},
    "people": [{"name": "Bo", "age": 3, "at": {"city": "Rome"}}, {"name": "al", "age": 1, "at": {"city": "Oslo"}}],
    "none": None,
    "numeral": " 42 ",
    "html": "<b>&\"'",
    "empty": "",
}

EXPRESSIONS = [
    # methods
    "s.strip()", "s.strip(' H\n')", "s.lstrip()", "s.rstrip('\n ')", "s.split()", "s.split('l')", "s.split('l', 1)",
    "s.rsplit('l', 1)", "s.rsplit()", "s.splitlines()", "s.splitlines(true)", "s.partition('big')", "s.rpartition('i')",
    "s.startswith('  H')", "s.endswith((' ', 'x'))", "s.startswith('H', 2)", "s.find('l')", "s.index('l')",
    "s.rfind('l')", "s.find('l', 5, 20)", "s.count('l')", "s.replace('l', 'LL')", "s.replace('', '-')",
    "s.replace('l', '', 1)", "s.removeprefix('  ')", "s.removesuffix(' ')", "s.upper()", "s.lower()", "s.title()",
    "s.capitalize()", "', '.join(words)", "''.join([])", "'{}-{}'.format(1, 'b')", "'{1}{0}{a}'.format(1, 2, a='c')",
    "'{{{:>5}|{:05.1f}|{!s:^4}}}'.format('a', 2, 3)", "'{:,}'.format(1234567)", "'on 20261122: {}'.format(none)",
    "'ab1'.isalnum()", "'ab'.isalpha()", "'12'.isdigit()", "' '.isspace()", "'AB'.isupper()", "'ab'.islower()",
    "words.index('fig')", "words.count('fig')", "(1, 2).count(2)", "d.get('b')", "d.get('q')", "d.get('q', 7)",
    "d.items() | list", "d.keys() | list", "d.values() | list", "'%s' % s", "'%5d|%-4s|%05.1f|%x|%%' % (3, 'a', 2, 255)",
    "'%(a)s' % {'a': 1}", "'%c' % 65",
    # filters
    "s | trim", "s | trim(' H')", "s | upper", "s | lower", "s | capitalize", "s | title", "'a-b (c [d <e' | title",
    "s | replace('l', 'L')", "s | replace('l', 'L', 2)", "s | indent", "s | indent(2, true)", "s | indent(3, blank=true)",
    "s | indent('> ')", "'%s-%s' | format(1, 2)", "s | length", "d | count", "none | default('x')", "q | default('x')",
    "q | d", "empty | default('x', true)", "12 | string", "d | string", "n | string", "html | safe", "(html | safe) + '<'",
    "('<' ~ (html | safe))", "d | tojson", "d | tojson(indent=2)", "d | tojson(ensure_ascii=true, sort_keys=false)",
    "s | tojson", "{'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':'))", "numeral | int", "'x' | int",
    "'x' | int(5)", "'ff' | int(base=16)", "'1.5' | int", "2.7 | int", "'1.5' | float", "'x' | float", "2.567 | round(2)",
    "2.5 | round", "2.1 | round(method='ceil')", "2.19 | round(1, 'floor')", "-3 | abs", "words | list", "'abc' | list",
    "d | list", "range(3) | list", "d | items | list", "q | items | list", "d | dictsort", "d | dictsort(true)",
    "{'b': 1, 'a': 2} | dictsort(by='value', reverse=true)", "words | first", "words | last", "empty | first",
    "words | reverse | list", "'abc' | reverse", "words | join(', ')", "n | join", "people | join(',', attribute='name')",
    "words | map('upper') | list", "people | map(attribute='at.city') | list",
    "people | map(attribute='zip', default='-') | list", "words | map('replace', 'p', 'q') | list", "none | map('upper') | list",
    "n | select | list", "n | select('odd') | list", "n | select('gt', 1) | list", "words | reject('in', ['fig']) | list",
    "people | selectattr('name', 'equalto', 'Bo') | list", "people | selectattr('at.city') | list",
    "people | rejectattr('age', 'lt', 2) | list", "people | rejectattr('zip') | list", "words | sort",
    "words | sort(true)", "words | sort(case_sensitive=true)", "people | sort(attribute='age')",
    "people | sort(attribute='name,age')", "words | unique | list", "words | unique(true) | list", "n | sum",
    "people | sum(attribute='age')", "people | sum('age', 10)", "words | min", "n | max", "people | max(attribute='age')",
    "empty | min",
    # tests
    "q is defined", "q is undefined", "none is none", "s is string", "d is mapping", "words is sequence", "d is sequence",
    "s is iterable", "none is iterable", "5 is iterable", "true is boolean", "true is true", "false is false",
    "1 is number", "1 is integer", "1.0 is float", "none is sameas none", "3 is odd", "4 is even", "9 is divisibleby 3",
    "1 is in [1, 2]", "1 is eq 1", "1 is equalto 2", "n | select('==', 1) | list", "1 is ne 1", "n | select('!=', 2) | list", "1 is lt 2", "1 is lessthan 2",
    "n | select('<', 2) | list", "1 is gt 2", "1 is greaterthan 2", "n | select('>', 2) | list", "1 is le 1", "n | select('<=', 2) | list", "1 is ge 1", "n | select('>=', 2) | list",
    "range is callable", "s is callable",
    # operators and the rest
    "1 + 2 * 3 - 4 / 5 // 6 % 7 ** 2", "'a' + 'b' * 3", "[1] + [2] * 2", "(1,) + (2,)", "2 ** 10", "2 ** -1", "-n[0]",
    "'a' ~ 1 ~ none ~ [1, 'x'] ~ q", "s[2:7]", "s[::-1]", "words[-2:]", "words[0]", "words[9]", "d['b']", "d.b", "d['q']",
    "d['A'][1].x", "people[0].at.city", "(1, 2)[1]", "range(5)[2]", "'l' in s", "'q' not in words", "'b' in d",
    "2 in range(3)", "[1] in [[1], 2]", "{'a': [1]} == {'a': [1]}", "[1, 2] < [1, 3]", "words == words[:]", "s < html",
    "1 < n[0] < 5", "none == q", "q in d", "dict(a=1, b=2)", "dict({'a': 1}, b=2)", "dict([('a', 1)])",
    "{s: 1, 2: 3}[2]", "namespace(a=1).a", "namespace(a=1).b", "true and 'x' or 'y'", "'x' if n else 'y'", "not s",
]  # fmt: skip
BODIES = [
    "{% for a in words %}{{ loop.index }}{{ loop.first }}{{ loop.previtem }}{{ loop.cycle('x', 'y') }}{{ loop.revindex0 }}{% else %}none{% endfor %}",
    "{% for k, v in d.items() if v is number %}{{ k }}{{ v }}{{ loop.length }}{{ loop.last }}{% endfor %}",
    "{% for p in people recursive %}{{ p.name }}{% if loop.depth < 3 %}{{ loop(people) }}{% endif %}{% endfor %}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{{ f(1, 3, 4, c=5) }}{% call f(0) %}!{% endcall %}",
    "{% set n = namespace(a=1, b=[]) %}{% for a in words %}{% set n.a = n.a + loop.index %}{% set n.b = n.b + [a] %}{% endfor %}{{ n.a }}{{ n.b }}",
    "{% set x %}a{{ s }}{% endset %}{{ x | trim }}{% filter upper %}abc{{ s }}{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}{{ y is defined }}",
    "{% for c in 'añ' %}{{ c }};{% endfor %}{% for x in q %}no{% endfor %}{% for x in words %}{% if loop.index == 2 %}{% continue %}{% endif %}{% if x == 'apple' %}{% break %}{% endif %}{{ x }}{% endfor %}",
]


@pytest.fixture(scope="module")
def jinja() -> jinja2.Environment:
    """The environment in which transformers renders, of Jinja's own operations."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    return environment


@pytest.mark.parametrize("body", [*("{{ " + expression + " }}" for expression in EXPRESSIONS), *BODIES])
def test_it_writes_what_jinja_writes(body: str, jinja: jinja2.Environment) -> None:
    assert ChatTemplate(body).render([USER], **VALUES) == jinja.from_string(body).render(**VALUES)


def test_every_operation_is_compared_with_jinjas() -> None:
    """An entry of the tables is on the list above, or it is not there."""
    text = "\n".join(EXPRESSIONS)
    for table in METHODS.values():
        assert all(f".{name}(" in text for name in table)
    assert all(f"| {name}" in text for name in FILTERS)
    assert all(f" is {name}" in text or f"select('{name}'" in text for name in TESTS)


# Texts as long as a template can make them, and of the characters that cost the most.
TEXTS = {"x": "x", "space": " ", "line": "\\n", "control": "\\x01", "two bytes": "好", "four bytes": "\U0001f600",
         "surrogate": "\\ud800", "space of two bytes": "\u3000", "letter that grows": "\ufb03"}  # fmt: skip
OF_TEXTS = (
    "a | upper", "a | lower", "a.title()", "a | title", "a | capitalize", "a.split()", "a.split(a[0])", "a.rsplit(a[0])",
    "a.splitlines()", "a.strip()", "a | trim('q' * 63 ~ a[0])", "a.replace(a[0], '')", "a.replace(a[0], 'yz')",
    "a.replace('', 'y')", "a | tojson", "a | tojson(ensure_ascii=true)", "a | list", "a[1:]", "a[::-1]",
    "(a[:1000] ~ 'y') in a", "(a[:99999] ~ 'y' ~ a[:99999]) in a", "a.rfind('y' ~ a[0] * 7)", "a.rpartition('y' ~ a[:5])",
    "a.count(a[0])", "a.isupper()", "a.isalnum()", "a ~ a[:10]", "[a] | string", "'{}'.format(a)", "'%s' % a",
    "('<' | safe) + a", "[a, a[:5]] | join", "a | indent(1)", "a == a ~ ''", "a < a ~ 'y'", "a.partition(a[:5] ~ 'y')",
    "[a, a ~ 'y'] | max", "[a, a ~ 'y'] | unique",
)  # fmt: skip
OF_LISTS = (
    "'q' in l", "l == l[:]", "l < l[:]", "l | string", "l | tojson", "l | tojson(indent=16)", "l | sort", "l | unique",
    "l | max", "l | map('list')", "l | join", "l + l", "l | reverse", "l | map(attribute='a') | list", "l | sum", "l[::2]",
    "[l, l] | tojson", "l in [l[1:]]", "dict(a=l) | tojson(sort_keys=true)", "l | int",
)  # fmt: skip
OTHERS = [
    "{{ ('{' ~ ':' * 2000000).format(1) }}",  # a field without an end
    "{{ ('{' * 400001).format(1) }}",  # opening braces
    "{{ ('}' * 400001).format(1) }}",  # closing braces
    "{{ ('{a' * 2000000).format(1) }}",  # open fields
    "{{ ('%' * 400001) % 1 }}",  # percent signs
    "{{ ('%(' * 2000000) % {} }}",  # open keys
    "{{ ('%' ~ '0' * 2000000) % 1 }}",  # zeros of a width
    "{% set a = 'x' * 8000000 %}{% set l = [a ~ 'z'] * 200000 %}{{ (a ~ 'y') in l }}",  # a long text in a list of long ones
    "{% set a = 'x' * 8000000 %}{{ ([a ~ 'y', a ~ 'z'] * 50000) | sort }}",  # long texts in order
    "{% set a = 'x' * 8000000 %}{{ (a ~ 'y').startswith((a ~ 'z',) * 200000) }}",  # one of many beginnings
    "{% set n = namespace(a=()) %}{% for i in range(9999) %}{% set n.a = (n.a,) %}{% endfor %}{{ {n.a: 1} }}",  # a tuple in a tuple as a key
    "{{ ('a' * 9999999).strip('b' * 9999999 ~ 'a') }}",  # characters to strip
    "{{ messages['x' * 16777216].y }}",  # a name of an attribute
    "{{ messages | map('x' * 16777216) }}",  # a name of a filter
    "{{ raise_exception('x' * 16777216) }}",  # a message
    "{{ strftime_now('%' * 16777216) }}",  # a format of a date
    "{{ dict(*(range(100000) | list)) }}",  # many arguments
    "{% set a, b = range(100000) | list %}",  # a list to unpack
]  # fmt: skip
SIZES = {"longest": (16 << 20, 8 << 20), "long": (4_000_000, 4_000_000), "shorter": (3_000_000, 800_000)}
HELD: dict[str, list[str]] = {
    **{
        f"{kind}, {size}": [
            f"{{% set a = '{text}' * {characters[kind != 'x']} %}}{{% set b = {operation} %}}" for operation in OF_TEXTS
        ]
        for kind, text in TEXTS.items()
        for size, characters in SIZES.items()
    },
    **{
        f"list of {kind}": [
            f"{{% set l = range(100000) | {made} %}}{{% set b = {operation} %}}" for operation in OF_LISTS
        ]
        for kind, made in {"numbers": "list", "texts": "map('string') | list"}.items()
    },
    "others": OTHERS,
}  # fmt: skip


@pytest.mark.clock
@pytest.mark.parametrize("name", by_default(HELD, lambda name: name in ("four bytes, shorter", "others")))
def test_no_operation_keeps_others_waiting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest, last, step = 0.0, 0.0, Meter.step

    def counted(meter: Meter, units: int = 0) -> None:
        nonlocal longest, last
        longest = max(longest, time.thread_time() - last)
        step(meter, units)
        last = time.thread_time()

    monkeypatch.setattr(Meter, "step", counted)
    for template in HELD[name]:
        code, waits = parsed(template), []
        code.program()
        for _ in range(8):  # the shortest: one takes several times as long while other processes copy memory
            longest, last = 0.0, time.thread_time()
            try:
                code.render({"messages": [USER]})
            except Exception as error:
                longest = max(longest, time.thread_time() - last)
                str(error)  # which is part of what an error costs
            waits.append(max(longest, time.thread_time() - last))
            if waits[-1] < LONGEST:
                break
        assert min(waits) < LONGEST, template


# Beginnings of templates that are read in time in proportion to their length, whether they can be compiled or not.
READ: dict[str, Callable[[int], str]] = {
    "{{": lambda n: "{{" * (n // 2),
    "{%": lambda n: "{%" * (n // 2),
    "{#": lambda n: "{#" * (n // 2),
    "{": lambda n: "{" * n,
    "quotes": lambda n: "{{" + "'" * n,
    "an open string": lambda n: "{{'" + "\\a" * (n // 2),
    "escapes": lambda n: "{{" + "'\\" * (n // 2),
    "spaces": lambda n: "{% " + " " * n,
    "spaces of lines": lambda n: (" " * 50 + "\n") * (n // 51),
    "lines": lambda n: "\n" * n,
    "an open raw": lambda n: "{% raw %}" + "{% " * (n // 3),
    "ends of raw": lambda n: "{% raw %}" + "{% endraw " * (n // 10),
    "digits": lambda n: "{{ " + "1" * n + " }}",
    "digits with lines": lambda n: "{{ " + "1_" * (n // 2) + " }}",
    "a float": lambda n: "{{ 1." + "1" * n + " }}",
    "a name": lambda n: "{{ " + "a" * n + " }}",
    "comments": lambda n: "{# a #}" * (n // 7),
    "data": lambda n: "<tool_call " * (n // 11),
    "prints": lambda n: "{{a}}" * (n // 64),
    "names": lambda n: "{{ f(" + "a, " * (n // 64) + ") }}",
    "if": lambda n: "{% if a %}{% endif %}" * (n // 128),
    "for": lambda n: "{% for a in b %}{{ a.c }}{% endfor %}" * (n // 256),
    "set": lambda n: "".join(f"{{% set a{i} = 1 %}}" for i in range(n // 128)),
    "macro": lambda n: "{% macro f() %}{% endmacro %}" * (n // 128),
    "parentheses": lambda n: "{{ " + "(" * n,
    "not": lambda n: "{{ " + "not " * (n // 4) + "a }}",
    "conditions": lambda n: "{{ " + "a if b else " * (n // 12) + "c }}",
    "strings": lambda n: "{{ " + "'\\n' ~ " * (n // 64) + "a }}",
}


@pytest.mark.clock
@pytest.mark.parametrize("name", READ)
def test_reading_twice_as_much_takes_twice_the_time(name: str) -> None:
    quick = 0.05

    def seconds(length: int, enough: float = 0.0) -> float:
        text, best = READ[name](length), float("inf")
        for attempt in range(3):
            start = time.process_time()
            with contextlib.suppress(CheckpointError):  # another text is read anew
                ReplyFormat.of_template(ChatTemplate(text + " " * attempt).code())
            best = min(best, time.process_time() - start)
            if best < enough:
                break
        return best

    assert len(READ[name](MAX_TEMPLATE - 99)) <= MAX_TEMPLATE
    whole = seconds(MAX_TEMPLATE - 99, quick)
    assert whole < quick or whole < 2.5 * seconds(MAX_TEMPLATE // 2 - 99) + quick


@pytest.mark.thorough
def test_a_recursion_limit_of_the_users_is_no_way_to_the_end_of_the_process() -> None:
    """With a limit of a million, Python's own recursion ends the process; depths are bounded before."""
    program = (
        "import sys; sys.setrecursionlimit(10**6)\n"
        "from rekindle._src.text import ChatTemplate\n"
        "deep = '{% set n = namespace(a=(), b=()) %}{% for i in range(99999) %}{% set n.a = (n.a,) %}{% set n.b = (n.b,) %}{% endfor %}'\n"
        "ends = ['{{ n.a }}', '{{ n.a | tojson }}', '{{ n.a == n.b }}', '{{ {n.a: 1} }}', '{{ n.a in [n.b] }}']\n"
        "rest = ['{{' + c * 8000 for c in ('(', '[', 'not ', '-', 'a if b else ', '{')] + ['{% if a %}' * 2000]\n"
        "rest += ['{{ a' + c * 4000 + ' }}' for c in ('.b', '[1]', '()', '|d', '+a', ' and a')]\n"
        "for template in [*(deep + end for end in ends), *rest]:\n"
        "    try: ChatTemplate(template).render([{'role': 'user', 'content': 'x'}])\n"
        "    except Exception as error: print(type(error).__name__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and len(ran.stdout.split()) == 18, ran.stderr[-500:]


def test_a_field_that_is_called_as_a_method_of_pythons_is_a_field() -> None:
    template = "{{ d.copy }}{{ d['items'] }}{{ d.items() | length }}{{ d.pop is defined }}"
    with pytest.raises(CheckpointError, match=r"dict\.pop"):
        ChatTemplate(template).render([USER], **VALUES)
    assert ChatTemplate(template.replace("{{ d.pop is defined }}", "")).render([USER], **VALUES) == "655"


def test_errors_of_an_operation_are_typed() -> None:
    for template in ("{{ '}'.format() }}", "{{ '%d' % 'x' }}", "{{ '%s' % () }}", "{{ 'a' + 1 }}", "{{ {}[{}] + 1 }}",
                     "{{ 'x' is odd }}", "{{ range(meter=1) }}", "{{ ''.join([1]) }}"):  # fmt: skip
        with pytest.raises(RekindleError):
            ChatTemplate(template).render([USER])
