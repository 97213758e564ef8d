"""Sessions in TRL: `GRPOTrainer(model, rollout_func=rollout_func(session), …)`.

Needs TRL and its torch, which are not installed with rekindle: `pip install trl`.
"""

from rekindle._src.session.trl_rollout import rollout_func as rollout_func

__all__ = ["rollout_func"]
