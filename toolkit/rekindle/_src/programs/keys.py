"""The names of a session's programs: a step is named by its bucket, every other program is a helper."""

from __future__ import annotations

from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.helpers import Helper

Key = Bucket | Helper
