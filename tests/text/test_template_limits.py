"""Templates that would compute for ever or fill the memory are stopped with a typed error."""

# ruff: noqa: E501 (templates keep their lines)

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from helpers.thorough import by_default
from rekindle._src.text import ChatTemplate, template_limits
from rekindle.errors import CheckpointError, InvalidRequest, RekindleError

USER = {"role": "user", "content": "hi"}

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "loops with a filter": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "recursive loop": ("{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}"),
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(80) }}",
    "growing lists": "{% set n = namespace(a=[]) %}{% for i in range(99999) %}{% set n.a = n.a + [i] %}{% endfor %}",
    "map over a product": "{% for a in range(99999) %}{{ range(99999) | map('string') | join }}{% endfor %}",
}
HUGE = {
    "repeated string": "{{ 'x' * 10**10 }}",
    "repeated list": "{{ [1] * 10**9 }}",
    "repeated in a constant": "{% set a = 10**10 %}{{ a * 'x' }}",
    "doubled by ~": "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "doubled by +": "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "many joined by ~": "{% set a = 'x' * 16000000 %}{{ " + " ~ ".join(["a"] * 400) + " }}",
    "nested lists": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
    "nested tuples": "{% set n = namespace(a=1) %}{% for i in range(60) %}{% set n.a = (n.a, n.a) %}{% endfor %}{{ n.a }}",
    "nested dicts": (
        "{% set n = namespace(a={}) %}{% for i in range(60) %}{% set n.a = {'a': n.a, 'b': n.a} %}{% endfor %}"
        "{{ n.a | tojson }}"
    ),
    "nested by dict()": (
        "{% set n = namespace(a={}) %}{% for i in range(60) %}{% set n.a = dict(a=n.a, b=n.a) %}{% endfor %}{{ n.a }}"
    ),
    "block assignment": (
        "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set b %}{{ n.a }}{{ n.a }}{% endset %}"
        "{% set n.a = b %}{% endfor %}"
    ),
    "macro output": "{% macro f(a) %}{% for i in range(9999) %}{{ a }}{% endfor %}{% endmacro %}{{ f('x' * 9999999) }}",
    "output": "{% set a = 'x' * 9999999 %}{% for i in range(9999) %}{{ a }}{% endfor %}",
    "replace": "{{ ('x' * 9999999).replace('x', 'y' * 9999999) }}",
    "replace nothing": "{{ ('x' * 9999999).replace('', 'y' * 9999999) }}",
    "join": "{{ ('x' * 9999999).join(range(99999) | map('string')) }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "product": "{% set n = namespace(a=10**9999) %}{% for i in range(60) %}{% set n.a = n.a * n.a %}{% endfor %}",
    "filter indent": "{{ ('\\n' * 9999) | indent(10**9) }}",
    "filter indent by text": "{{ ('\\n' * 9999) | indent('x' * 9999999, blank=true) }}",
    "filter replace": "{{ ('x' * 9999999) | replace('x', 'y' * 9999999) }}",
    "filter join": "{{ range(99999) | join('x' * 9999999) }}",
    "filter format": "{{ '%9999999999d' | format(1) }}",
    "filter round": "{{ 7 | round(10**9, 'ceil') }}",
    "tojson indent": "{{ [1] | tojson(indent=10**9) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "deep lists": "{% set n = namespace(a=[]) %}{% for i in range(9999) %}{% set n.a = [n.a] %}{% endfor %}{{ n.a }}",
    "deep JSON": "{% set n = namespace(a=[]) %}{% for i in range(9999) %}{% set n.a = [n.a] %}{% endfor %}{{ n.a | tojson }}",
    "compared lists": (
        "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
        "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}"
    ),
    "found lists": (
        "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
        "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a in [n.b] }}"
    ),
    "numerals": "{{ ('1' * 9999999) | int }}",
    "places": "{{ 1.5 | round(10**9) }}",
    "separators of JSON": "{{ [1, 2] | tojson(separators=('x' * 9999999, ':')) }}",
    "format digits of any script": "{{ '{:>\u0669\u0669\u0669\u0669\u0669\u0669\u0669\u0669\u0669\u0669}'.format(1) }}",
    "length of a path": "{{ [messages] | map(attribute='a.' * 999999) }}",
    "date": "{{ strftime_now('%9999999999Y') }}",
}  # fmt: skip
ESCAPES = {
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "division": "{{ 1 / 0 }}",
    "overflow": "{{ 1e308 ** 2.0 ** 9 }}",
    "index": "{{ ''.join([1]) }}",
    "unhashable": "{% set a = [] %}{{ {a: 1} }}",
    "stop": "{{ raise_exception('x' * 9999999) }}",
    "not callable": "{{ 1() }}",
    "assertion": "{{ range(10**9) }}",
}
REFUSED = {
    "str.center": "{{ 'x'.center(10**10) }}",
    "str.ljust": "{{ 'x'.ljust(10**10) }}",
    "str.zfill": "{{ '1'.zfill(10**10) }}",
    "str.expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "str.translate": "{{ ('x' * 9999999).translate({120: 'y' * 9999999}) }}",
    "a field within a field": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "str.format_map": "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 9999999999}) }}",
    "str.encode": "{{ 'x'.encode().center(10**10) }}",
    "int.to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "the filter 'center'": "{{ 'x' | center(10**10) }}",
    "the filter 'batch'": "{{ [1] | batch(10**9, 0) | list }}",
    "the filter 'slice'": "{{ [1] | slice(10**9) | list }}",
    "the filter 'wordwrap'": "{{ ('x' * 9999999) | wordwrap(1, wrapstring='y' * 9999999) }}",
    "{% include %}": "{% include 'x' %}",
    "{% extends %}": "{% extends 'x' %}",
    "{% import %}": "{% import 'os' as os %}",
    "the format %*": "{{ '%*d' % (9999999999, 1) }}",
    "the filter 'striptags'": "{{ 'x' | striptags }}",
    "the filter 'urlize'": "{{ 'x' | urlize }}",
    "the filter 'pprint'": "{{ [[1]] | pprint }}",
    "the filter 'groupby'": "{{ messages | map('groupby', 'role') }}",
    "the test 'upper'": "{{ messages | select('upper') }}",
    "list.append": "{{ messages.append(1) }}",
    "dict.pop": "{{ messages[0].pop('role') }}",
    "str.__class__": "{{ ''.__class__ }}",
    "list.__class__": "{{ messages['__class__'] }}",
    "'__class__' of a Namespace": "{{ namespace().__class__ }}",
    "'_Namespace__attrs' of a Namespace": "{{ namespace()._Namespace__attrs }}",
    "'__init__' in a namespace": "{{ namespace(__init__=1) }}",
    "'_x' in a namespace": "{% set n = namespace() %}{% set n._x = 1 %}",
    "'__globals__' of a Function": "{{ raise_exception.__globals__ }}",
    "'operation' of a Function": "{{ range.operation }}",
    "'__call__' of a Macro": "{% macro f() %}{% endmacro %}{{ f.__call__ }}",
    "'changed' of a LoopContext": "{% for a in messages %}{{ loop.changed(a) }}{% endfor %}",
    "the text of a LoopContext": "{% for a in messages %}{{ loop }}{% endfor %}",
    "the text of a TemplateReference": "{{ self }}",
    "the field {0.real}": "{{ '{0.real}'.format(1) }}",
    "the field {0[0]}": "{{ '{0[0]}'.format([1]) }}",
    "the conversion !r": "{{ '{0!r}'.format(1) }}",
    "the format %r": "{{ '%r' % 'a' }}",
    "{% block %}": "{% block a %}{% endblock %}",
    "{% autoescape %}": "{% autoescape true %}{% endautoescape %}",
}  # fmt: skip
UNCOMPILABLE = {
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "blocks": "{% if 1 %}" * 2_000 + "{% endif %}" * 2_000,
    "size": "x" * (2 << 20),
    "tokens": "{{ [" + "1," * 9_000 + "] }}",
    "levels": "{{ " + "a" + "[1]" * 200 + " }}",
    "code": "{{" + "a" * 50_000 + "}}",
    "digits": "{{ " + "1" * 9_000 + " }}",
    "filter": "{{ 1 | nothing }}",
}


def stopped(template: str, **options: Any) -> RekindleError:
    """The typed error with which a template ends, in bounded time."""
    start = time.monotonic()
    with pytest.raises(RekindleError) as caught:
        ChatTemplate(template).render([USER], **options)
    assert time.monotonic() - start < 60, "it hangs"
    assert len(str(caught.value)) < 1200
    return caught.value


@pytest.mark.parametrize("name", by_default(ENDLESS, 3))
def test_a_template_that_does_not_end_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.5)
    assert "was stopped" in str(stopped(ENDLESS[name]))


@pytest.mark.parametrize("name", by_default(HUGE, lambda name: "many joined" not in name))
def test_a_template_can_not_fill_the_memory(name: str) -> None:
    assert isinstance(stopped(HUGE[name]), InvalidRequest)


@pytest.mark.parametrize("name", ESCAPES)
def test_whatever_a_template_raises_is_an_invalid_request(name: str) -> None:
    assert isinstance(stopped(ESCAPES[name]), InvalidRequest)


@pytest.mark.parametrize("name", REFUSED)
def test_whatever_is_not_on_the_list_is_refused_by_its_name(name: str) -> None:
    error = stopped(REFUSED[name])
    assert isinstance(error, CheckpointError) and name in str(error) and "may not use" in str(error)


@pytest.mark.parametrize("name", UNCOMPILABLE)
def test_whatever_can_not_be_compiled_is_a_checkpoint_error(name: str) -> None:
    assert isinstance(stopped(UNCOMPILABLE[name]), CheckpointError)


def test_messages_nested_too_deeply_are_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        ChatTemplate("x").render([{"role": "user", "content": deep}])


def test_long_conversations_are_within_the_limits() -> None:
    template = (
        "{% set n = namespace(text='') %}{% for m in messages %}{% set n.text = n.text ~ m.content | trim %}{% endfor %}"
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content | replace('a', 'bc') }}{{ loop.length }}{% endfor %}"
        "{{ n.text | length }}"
    )
    chat = [{"role": "user", "content": "word " * 4_000}] * 100
    rendered = ChatTemplate(template).render(chat)
    assert rendered.endswith(str(100 * (len("word ") * 4_000 - 1)))


def test_numbers_in_a_format_are_not_widths() -> None:
    template = (
        "{{ 'on 20261122: {} %d'.format(1234567) }} {{ '20261122 %s' % 1234567 }} {{ '%05.1f|%-3s' | format(2, 'a') }}"
    )
    assert ChatTemplate(template).render([USER]) == "on 20261122: 1234567 %d 20261122 1234567 002.0|a  "


def test_loops_know_their_length_whatever_they_iterate_over() -> None:
    template = (
        "{% for a in items %}{{ loop.index }}/{{ loop.length }}{{ '' if loop.last else ',' }}{% endfor %}|"
        "{% for a in items if a != 'b' %}{{ loop.length }}{{ loop.previtem }}{% endfor %}|"
        "{% for a, b in pairs.items() recursive %}{{ a }}{{ b }}{% else %}none{% endfor %}|"
        "{% for a in [] %}{% else %}none{% endfor %}"
    )
    given = {"items": ["a", "b", "c"], "pairs": {"x": 1, "y": 2}}
    assert ChatTemplate(template).render([USER], **given) == "1/3,2/3,3/3|22a|x1y2|none"


def test_every_thread_has_its_own_count() -> None:
    template, results = ChatTemplate("{% for a in range(9999) %}{{ a ~ 'x' }}{% endfor %}"), []
    threads = [threading.Thread(target=lambda: results.append(len(template.render([USER])))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and len(results) == 8


def test_preparing_copies_the_messages_and_runs_nothing() -> None:
    chat = [dict(USER)]
    later = ChatTemplate("{{ messages[0].content }}").prepare(chat)
    chat[0]["content"] = "changed"
    assert later() == "hi"
    ChatTemplate("{{ 1 / 0 }}").prepare(chat)
