"""Sessions in Tunix: `RekindleRollout(session)` is a rollout worker.

Needs Tunix: `pip install google-tunix`.
"""

from rekindle._src.session.tunix_rollout import RekindleRollout as RekindleRollout

__all__ = ["RekindleRollout"]
