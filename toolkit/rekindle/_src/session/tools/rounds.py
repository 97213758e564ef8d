"""The default bound on a chat's rounds of tool calls."""

from __future__ import annotations

MAX_ROUNDS = 8
