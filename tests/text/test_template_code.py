"""What a template reads is found in its code, not in the text that it writes."""

from __future__ import annotations

import pytest

from rekindle._src.text.template_code import parsed


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ tools }}", True),
        ("{%- if tools is not none %}x{% endif %}", True),
        ("{% for t in tools or [] %}{{ t }}{% endfor %}", True),
        ("{{- 'Use <tools></tools>' }}{{ messages }}", False),
        ('{{ "it\'s \\"tools\\"" }}', False),
        ("tools {{ message.tools }}{{ message['tools'] }}", False),
        ("{{ xml_tools }}", False),
        ("{# tools #}", False),
    ],
)
def test_variables(template: str, found: bool) -> None:
    assert parsed(template).reads("tools") is found


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ tools | tojson }}", True),
        ("{% if xml_tools %}{% endif %}", True),
        ("{{ m['tools'] }}", True),
        ("{{ message.tools }}", True),
        ("{% if message.role == 'tools' %}{% endif %}", False),
        ("<tools>", False),
    ],
)
def test_tools_are_taken(template: str, found: bool) -> None:
    assert parsed(template).takes_tools is found


def test_calls_are_read() -> None:
    for template in ("{% if 'tool_calls' in m %}{% endif %}", "{{ m.tool_calls }}", "{{ m.get('tool_calls') }}"):
        assert parsed(template).reads_calls
    assert not parsed("tool_calls {{ m.content }}").reads_calls
