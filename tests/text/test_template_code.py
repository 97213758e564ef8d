"""What a template reads is found in its code, not in the text that it writes."""

from __future__ import annotations

import pytest

from rekindle._src.text.replies.format import reads, reads_calls, takes_tools


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
    assert reads(template, "tools") is found


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
    assert takes_tools(template) is found


def test_calls_are_read() -> None:
    assert reads_calls("{% if 'tool_calls' in m %}{% endif %}") and reads_calls("{{ m.tool_calls }}")
    assert not reads_calls("tool_calls {{ m.content }}")
