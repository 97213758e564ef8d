"""How often a chat runs the calls of tools that its model makes, unless it is told otherwise."""

from __future__ import annotations

MAX_ROUNDS = 8
