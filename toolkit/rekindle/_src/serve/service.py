"""The state that all endpoints of a server share."""

from __future__ import annotations

from rekindle._src.core.version import VERSION
from rekindle._src.dispatch.turns import Turns
from rekindle._src.serve.contract import SessionLike
from rekindle._src.serve.fields import UnknownFields
from rekindle._src.serve.hosts import Hosts
from rekindle._src.serve.kept import KeptItems
from rekindle._src.serve.life import Life
from rekindle._src.serve.logprobs import TokenNames
from rekindle._src.serve.metrics import Metrics, Names
from rekindle._src.serve.models import Models
from rekindle._src.serve.tracing import Tracing

FINGERPRINT = f"rekindle-{VERSION}"


class Service:
    """The models, the limits and the state of a server, owned by its loop."""

    def __init__(
        self,
        models: Models,
        life: Life,
        *,
        strict: bool = False,
        body_limit: int = 32 << 20,
        body_seconds: float = 60.0,
        heartbeat: float = 15.0,
        trust_templates: bool = False,
        metrics_names: Names = "rekindle",
        hosts: Hosts | None = None,
    ) -> None:
        self.hosts: Hosts = hosts or Hosts()
        self.models, self.life, self.strict = models, life, strict
        self.body_limit, self.body_seconds, self.trust_templates = body_limit, body_seconds, trust_templates
        self.metrics: Metrics = Metrics(models, life, metrics_names)
        self.heartbeat = heartbeat  # seconds of silence after which a stream gets a comment
        self.tracing: Tracing = Tracing()
        self.item_store: KeptItems = KeptItems()
        self.turns: Turns = Turns(2)  # at parsing large bodies and building requests from them
        self.unknown: UnknownFields = UnknownFields()
        self._names: dict[str, tuple[SessionLike, TokenNames]] = {}

    def token_names(self, name: str, session: SessionLike) -> TokenNames:
        """Return the texts of a model's tokens, kept from request to request."""
        entry = self._names.get(name)
        if entry is None or entry[0] is not session:
            entry = self._names[name] = session, TokenNames(session.tokenizer)
        return entry[1]
