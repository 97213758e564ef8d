"""Sessions in TRL: `GRPOTrainer(model, rollout_func=rollout_func(session), …)`.

Needs TRL and its torch, which are not installed with rekindle: `pip install trl`.
"""

from __future__ import annotations

from rekindle._src.integrations.trl import rollout_func

__all__ = ["rollout_func"]
