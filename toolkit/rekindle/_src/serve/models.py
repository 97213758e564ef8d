"""The models that a server serves, by name: open, still opening, or failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle._src.serve.contract import SessionLike
from rekindle._src.serve.errors import Refused, unavailable
from rekindle.errors import ConfigError


class Served:
    """One model under its name."""

    def __init__(self, name: str, session: Any) -> None:
        self.name = name
        self.created = int(time.time())
        self.session: SessionLike | None = session if hasattr(session, "submit") else None
        self.opening: Any = None if self.session is not None else session
        self.failure: BaseException | None = None

    def open(self) -> SessionLike:
        """Return its session. Raise `Refused` while there is none."""
        session = self.session
        if session is None:
            state = "is being loaded" if self.failure is None else "could not be opened; the server's log says why"
            raise unavailable(f"the model {self.name!r} {state}")
        if session.closed:
            raise unavailable(f"the session of {self.name!r} is closed", retry_after=None)
        return session

    async def load(self) -> None:
        """Wait until it is open. If that fails, keep the error and raise it."""
        try:
            self.session = await self.opening
        except BaseException as error:
            self.failure = error
            raise

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's model object."""
        fields = {"id": self.name, "object": "model", "created": self.created, "owned_by": "rekindle"}
        if self.session is not None:
            fields |= {"max_model_len": self.session.config.max_model_len, "root": self.session.model}
        return fields


class Models:
    """All models of a server. A request without `model` gets the first."""

    def __init__(self, sessions: Any, name: str | None = None) -> None:
        if isinstance(sessions, Mapping):
            if name is not None:
                raise ConfigError("name", name, "is given beside a mapping of names to sessions", "Leave it out")
            if not sessions or not all(isinstance(key, str) and key for key in sessions):
                raise ConfigError(
                    "sessions", list(sessions), "does not map names to sessions", 'Pass {"name": session}'
                )
            self.by_name = {key: Served(key, session) for key, session in sessions.items()}
        else:
            name = name or Path(str(getattr(sessions, "model", "") or "model")).name
            self.by_name = {name: Served(name, sessions)}

    def get(self, name: str | None) -> Served:
        """Return a model by its name. Raise `Refused` (404) for an unknown one."""
        if name is None:
            return next(iter(self.by_name.values()))
        served = self.by_name.get(name)
        if served is None:
            known = ", ".join(self.by_name)
            raise Refused(
                404, f"the model {name[:200]!r} does not exist here. Use one of: {known}", param="model",
                code="model_not_found",
            )  # fmt: skip
        return served

    @property
    def trouble(self) -> str | None:
        """The reason why a model takes no requests now, or None."""
        for served in self.by_name.values():
            try:
                served.open()
            except Refused as refused:
                return refused.message
        return None
