"""The table: all rows, of all sections."""

from __future__ import annotations

from project.bounds import adapters, loading, ours, pages, pictures, requests, serve, text, tools
from project.bounds.records import Bound, Other

_MODULES = {
    "Requests over HTTP": serve,
    "Options and grammars": requests,
    "Templates and tokenizers": text,
    "Checkpoints and stores": loading,
    "Pages and processes": pages,
    "Pictures": pictures,
    "Adapters": adapters,
    "Tool servers": tools,
    "": ours,
}
SECTIONS: dict[str, list[Bound]] = {title: module.BOUNDS for title, module in _MODULES.items()}
BOUNDS: list[Bound] = [row for rows in SECTIONS.values() for row in rows]
OTHERS: dict[str, dict[str, Other]] = {
    file: rows for module in _MODULES.values() for file, rows in module.OTHERS.items()
}
