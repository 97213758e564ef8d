"""Reads the descriptions of a function and its parameters from a docstring in Google, NumPy or Sphinx style."""

from __future__ import annotations

import inspect
import re

_SECTION = re.compile(r"(?:Args|Arguments|Parameters|Params):\s*")
_OTHER = re.compile(r"[A-Z][A-Za-z ]+:\s*")  # another section of the Google style ends that of the parameters
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_FIELD = re.compile(r":param(?:\s+[^:]*?)?\s+(\w+)\s*:\s*(.*)")
_NUMPY = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?")


def read_docstring(documented: object) -> tuple[str, dict[str, str]]:
    """Return the description of the object, and those of its parameters by name."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    description: list[str] = []
    parameters: dict[str, str] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        field = _FIELD.fullmatch(line.strip())
        if _SECTION.fullmatch(line):
            index = _read_entries(lines, index + 1, parameters)
        elif line.strip() == "Parameters" and index + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[index + 1]):
            index = _read_numpy(lines, index + 2, parameters)
        elif field is not None:
            index = _read_more(lines, index + 1, parameters, field[1], field[2], 1)
        elif line.startswith(":") or _begins_section(line, lines[index + 1] if index + 1 < len(lines) else ""):
            break
        else:
            description.append(line)
            index += 1
    return " ".join("\n".join(description).split()), parameters


def _begins_section(line: str, below: str) -> bool:
    return bool(_OTHER.fullmatch(line) and below[:1] == " ") or re.fullmatch(r"-{3,}\s*", below) is not None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _read_more(lines: list[str], index: int, entries: dict[str, str], name: str, text: str, least: int) -> int:
    """Add an entry with the lines that are indented below it. Return the index of the next entry."""
    parts = [text]
    while index < len(lines) and lines[index].strip() and _indent(lines[index]) >= least:
        parts.append(lines[index].strip())
        index += 1
    entries[name] = " ".join(" ".join(parts).split())
    return index


def _read_entries(lines: list[str], index: int, entries: dict[str, str]) -> int:
    base = None
    while index < len(lines) and (not lines[index].strip() or _indent(lines[index]) > 0):
        if not lines[index].strip():
            index += 1
            continue
        base = _indent(lines[index]) if base is None else base
        entry = _ENTRY.fullmatch(lines[index].strip())
        if entry is None or _indent(lines[index]) != base:
            index += 1
            continue
        index = _read_more(lines, index + 1, entries, entry[1], entry[2], base + 1)
    return index


def _read_numpy(lines: list[str], index: int, entries: dict[str, str]) -> int:
    while index < len(lines):
        if not lines[index].strip():
            index += 1
            continue
        if index + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[index + 1]):
            return index  # the next section
        entry = _NUMPY.fullmatch(lines[index])
        if entry is None:
            return index
        names: dict[str, str] = {}
        index = _read_more(lines, index + 1, names, entry[1], "", 1)
        for name in entry[1].split(","):
            entries[name.strip()] = names[entry[1]]
    return index
