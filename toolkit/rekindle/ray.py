"""Models on a cluster of Ray: `rekindle.ray.deployment(model)` for Ray Serve; see also `rekindle.fleet`.

Needs the extras `ray` and `serve`: `pip install "rekindle[ray,serve]"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from rekindle._src.core.config import EngineConfig, OpenOptions
from rekindle._src.core.options import takes_options
from rekindle._src.replicas.fleet import check_options, fleet_of, roles_and_range
from rekindle._src.replicas.routing import RouterName
from rekindle._src.replicas.routing import router as router_named
from rekindle.errors import ConfigError, MissingExtra

__all__ = ["deployment"]


_AT_ONCE = 4096  # requests that Ray Serve gives one ingress; the fleet itself refuses those without a place with 429


@takes_options(EngineConfig)
def deployment(
    model: str | Path = "tiny",
    *,
    replicas: int | tuple[int, int] | None = None,
    router: RouterName = "affinity",
    roles: Mapping[Literal["prefill", "decode"], int] | None = None,
    resources: Mapping[str, Any] | None = None,
    ingresses: int = 1,
    name: str | None = None,
    api_key: str | Sequence[str] | None = None,
    **options: Unpack[OpenOptions],
) -> Any:
    """Return an application for `ray.serve.run`: a model in several processes, with OpenAI's API.

    The ingresses take requests in. All route to the same replicas, which survive the death of an ingress and end a
    minute after the last one. `name` is the model's name for clients; requests must send an `api_key`. The other
    options are as in `rekindle.fleet`.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    if isinstance(ingresses, bool) or not isinstance(ingresses, int) or ingresses < 1:
        raise ConfigError("ingresses", ingresses, "is not a whole number above 0", "Leave it out for the default")
    parts_of, size = roles_and_range(roles, replicas)
    if size is not None and ingresses > 1:
        problem = "can't follow a load that several ingresses divide"
        raise ConfigError("replicas", replicas, problem, "Use a number, or one ingress")
    router_named(router)
    check_options(options)
    client_name = name or Path(str(model)).name

    def build_app() -> Any:  # Ray Serve accepts only a plain function
        from rekindle._src.serve.app import app

        opening = fleet_of(str(model), router, parts_of, resources, options, size, shared=client_name)
        return app({client_name: opening}, api_key=api_key)  # it opens its fleet at startup, and answers 503 until then

    @serve.deployment(
        name=f"rekindle-{client_name.replace('/', '-')}",
        num_replicas=ingresses,
        max_ongoing_requests=_AT_ONCE,
        ray_actor_options={"num_cpus": 0},
    )
    @serve.ingress(build_app)
    class Ingress:
        """Takes requests in and returns their text."""

    application: Any = Ingress
    return application.bind()
