"""Sessions in Tunix: `RekindleRollout(session)` is a rollout worker.

Needs Tunix: `pip install google-tunix`.
"""

from __future__ import annotations

from rekindle._src.integrations.tunix import RekindleRollout

__all__ = ["RekindleRollout"]
