"""Models on a cluster of Ray: `rekindle.ray.deployment(model)` for Ray Serve; see also `rekindle.fleet`.

Needs the extras `ray` and `serve`: `pip install "rekindle[ray,serve]"`.
"""

from rekindle._src.replicas.deployment import deployment as deployment

__all__ = ["deployment"]
