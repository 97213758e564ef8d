"""A griffe extension: a docstring's table `Options:` is a section of the API reference, with types and defaults.

Entries of classes have the form `name (default): words`, which `rekindle._src.core.options` reads too; entries of
functions have the form `name: words`. Types are the annotations of the class's fields or the function's parameters.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import griffe

ENTRY = re.compile(r"(\w+)(?: \(((?:[^:']|'[^']*')*)\))?: (.*)")


class WithOptions(griffe.Docstring):
    """A docstring with such a table."""

    @functools.cached_property
    def parsed(self) -> list[griffe.DocstringSection]:
        return [self._section(section) for section in self.parse()]

    def _section(self, section: griffe.DocstringSection) -> griffe.DocstringSection:
        if section.kind is not griffe.DocstringSectionKind.admonition or section.value.annotation != "options":
            return section
        entries: list[list[str]] = []
        for line in section.value.description.splitlines():
            if line.startswith(" "):  # an entry goes on
                entries[-1][2] += f"\n{line.strip()}"
            elif line:
                match = ENTRY.fullmatch(line)
                assert match, f"{self.parent} has an option that is no `name (default): words`: {line}"
                entries.append([match[1], match[2] or "", match[3]])
        options = [self._option(*entry) for entry in entries]
        return griffe.DocstringSectionParameters(options, title="Options:")

    def _option(self, name: str, default: str, words: str) -> griffe.DocstringParameter:
        declared: Any = None
        if isinstance(self.parent, griffe.Function):
            declared = {one.name: one for one in self.parent.parameters}.get(name)
            default = default or str(declared.default if declared is not None and declared.default else "")
        elif self.parent is not None:
            declared = self.parent.members.get(name)
        annotation, words = getattr(declared, "annotation", None), words.replace("*", r"\*")
        return griffe.DocstringParameter(name, annotation=annotation, description=words, value=default or None)


class OptionSections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        old = obj.docstring
        if old is not None and re.search(r"^Options:$", old.value, re.MULTILINE):
            obj.docstring = WithOptions(
                old.value, lineno=old.lineno, endlineno=old.endlineno, parent=obj, parser=old.parser
            )
