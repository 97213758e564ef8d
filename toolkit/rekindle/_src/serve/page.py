"""The page at `/`: what runs here, how to call it, and a small chat.

It is one static document without anything of this server in it, so that it needs no key: its script asks the API, with
the key that is typed. It loads nothing else, which its policy enforces, and whatever it shows is set as text. Its chat
looks as a notebook's does, and samples as that one begins.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path

from rekindle._src.serve.bodies import Receive
from rekindle._src.serve.exchange import Exchange, Scope, Send, Service
from rekindle._src.views import style
from rekindle._src.views.answers import AS_OPENED, PRESETS

_STATIC = Path(__file__).parent / "static"
_PRESETS = {name: dict(preset.settings) for name, preset in PRESETS.items()}
STYLE = style.sheet(":root") + (_STATIC / "page.css").read_text()
SCRIPT = f'"use strict";\nconst PRESETS = {json.dumps(_PRESETS)};\n' + "".join(
    (_STATIC / name).read_text() for name in ("markdown.js", "page.js")
)
BODY = (
    (_STATIC / "page.html")
    .read_text()
    .replace("PRESETS", "".join(f"<option>{name}</option>" for name in (AS_OPENED, *PRESETS)))
)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def document() -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    """Return the page, and the headers that forbid it everything but its own script, style and this server's API."""
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>rekindle</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body>{BODY}<script>{SCRIPT}</script></body></html>\n"
    )
    policy = (
        f"default-src 'none'; script-src {_digest(SCRIPT)}; style-src {_digest(STYLE)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return page.encode(), tuple((name.encode(), value.encode()) for name, value in headers.items())


class WebPage:
    """An ASGI app that answers with the page."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page, headers = document()
        await Exchange(self._service, scope, send).reply_bytes(page, b"text/html; charset=utf-8", headers=headers)
        self._service.metrics.http("/", 200)
