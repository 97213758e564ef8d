"""rekindle in 8 bits, beside rekindle with a file: the same weights, and what fewer bits gain."""

from __future__ import annotations

import dataclasses

import with_rekindle
from engine import Setting


def open(setting: Setting) -> with_rekindle.Rekindle:
    return with_rekindle.open(dataclasses.replace(setting, file="", bits=8))
