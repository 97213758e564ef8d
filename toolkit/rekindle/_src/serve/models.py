"""The models that a server serves, by name: open, still opening, failed, or loaded when a request needs them.

`ServedSession` and `HandleLike` name the methods of a session that the server uses; it is a caller like any other.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.left_out import LeftOut
from rekindle._src.core.names import checked_name, name_of_model
from rekindle._src.core.pictures import PictureCost
from rekindle._src.core.records import Status, TextDelta
from rekindle._src.core.sampling import Sampling
from rekindle._src.serve.errors import ApiError, unavailable
from rekindle.errors import Busy, ConfigError, OutOfMemory, QueueFull, RequestAborted, SessionClosed


class HandleLike(Protocol):
    """A request of one prompt, as a session's `submit` returns it."""

    caller: str

    @property
    def sampling(self) -> Sampling: ...
    @property
    def status(self) -> Status: ...
    @property
    def id(self) -> str: ...
    @property
    def done(self) -> bool: ...
    @property
    def prompt(self) -> str | None: ...
    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...
    @property
    def left_out(self) -> LeftOut | None: ...
    def submit(self) -> None: ...
    def cancel(self) -> None: ...
    def completion(self) -> Any: ...
    def __aiter__(self) -> AsyncIterator[TextDelta]: ...
    def __await__(self) -> Any: ...


class ServedSession(Protocol):
    """A session, or a fleet, that a server passes requests to."""

    @property
    def config(self) -> ResolvedConfig: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def model(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def chat_sampling(self) -> Sampling: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def reads_pictures(self) -> bool: ...
    def picture_cost(self, width: int, height: int, *, field: str = ...) -> PictureCost: ...
    def stats(self) -> Any: ...
    def submit(self, prompt: Any, /, **options: Any) -> Any: ...
    def generate(self, prompt: Any, /, **options: Any) -> Any: ...
    def embed(self, texts: Any, /, **options: Any) -> Any: ...
    def decide(self, state: Any, questions: Any, /, **options: Any) -> Any: ...
    def rerank(self, query: Any, documents: Any, /, **options: Any) -> Any: ...
    def chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> Any: ...
    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str: ...
    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]: ...


class LentModel(Protocol):
    """The use of a model that is loaded on demand."""

    @property
    def session(self) -> Any: ...
    def release(self) -> None:
        """End the use. Harmless a second time."""
        ...


class InLine(Awaitable[LentModel], Protocol):
    """A request's place in the line of a model that is not loaded."""

    @property
    def done(self) -> bool: ...
    def cancel(self) -> None: ...


class OnDemand(Protocol):
    """A model that is loaded when a request needs it, such as one of a shelf."""

    @property
    def open_session(self) -> Any:
        """Its session, awake or asleep; None while it is unloaded."""
        ...

    @property
    def model(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def progress(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def adapters(self) -> tuple[str, ...]: ...
    def lease_now(self) -> LentModel | None: ...
    def wait(self) -> InLine: ...
    async def unload_in_turn(self) -> None: ...


class Caller(Protocol):
    """A request that needs a model: what the model's wait has to do with it."""

    def holds(self, lent: LentModel) -> None:
        """Release it at the end of the request, unless it was released before."""
        ...

    def waits(self, place: InLine, progress: Callable[[], str]) -> AbstractContextManager[object]:
        """Let the end of the server, an abort of the request and its stream know of the wait."""
        ...


class ServedModel:
    """One model under its name."""

    def __init__(self, name: str, session: Any) -> None:
        self.name = name
        self.created = int(time.time())
        self.session: ServedSession | None = session if hasattr(session, "submit") else None
        self.opening: Any = None if self.session is not None else session
        self.failure: BaseException | None = None

    @property
    def figures(self) -> str:
        """The name of the model that counts its requests."""
        return self.name

    def open(self) -> ServedSession:
        """Return its session. Raise `ApiError` while there is none."""
        session = self.session
        if session is None:
            state = "is being loaded" if self.failure is None else "could not be opened; the server's log says why"
            raise unavailable(f"the model {self.name!r} {state}")
        if session.closed:
            raise unavailable(f"the session of {self.name!r} is closed", retry_after=None)
        return session

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        names: tuple[str, ...] = getattr(self.session, "adapters", ())
        return names

    @property
    def state(self) -> str:
        """Its state, by the names of llama.cpp's router, and "failed"."""
        if self.session is None:
            return "loading" if self.failure is None else "failed"
        if self.session.closed:
            return "unloaded"
        return "sleeping" if getattr(self.session, "asleep", False) else "loaded"

    @property
    def trouble(self) -> str | None:
        """The reason why it takes no requests now, or None."""
        try:
            self.open()
        except ApiError as refused:
            return refused.message
        return None

    async def take(self, caller: Caller) -> ServedSession:
        """Return its session for a request. Raise `ApiError` while there is none."""
        return self.open()

    async def load_now(self, caller: Caller) -> None:
        """Load it, for a request to do just that. One that is always loaded is loaded, or about to be."""
        self.open()

    async def unload(self) -> None:
        """Unload it. Raise `ApiError` if it stays loaded."""
        raise ApiError(
            400,
            f"the model {self.name!r} stays loaded here. Start the server with --max-loaded, --models-memory or "
            "--idle-unload",
            param="model",
            code="not_supported",
        )

    async def load(self) -> None:
        """Wait until it is open. If that fails, keep the error and raise it."""
        try:
            self.session = await self.opening
        except BaseException as error:
            self.failure = error
            raise

    def as_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"id": self.name, "object": "model", "created": self.created, "owned_by": "rekindle"}
        fields["status"] = {"value": self.state}
        session = self.session  # one that is loaded on demand may leave at any time
        if session is not None:
            fields |= {"max_model_len": session.config.max_model_len, "root": session.model}
            fields["input_modalities"] = ["text", "image"] if session.reads_pictures else ["text"]
            chat = session.chat_sampling  # as a notebook's chat begins; requests without fields have an API's
            fields["chat_sampling"] = {name: getattr(chat, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return fields


class ServedOnDemand(ServedModel):
    """A model that is loaded when a request needs it."""

    def __init__(self, name: str, source: OnDemand) -> None:
        self.name, self._source = name, source
        self.created = int(time.time())
        self.opening, self.failure = None, None

    @property
    def session(self) -> Any:  # type: ignore[override]
        """Its session, awake or asleep; None while it is unloaded."""
        return self._source.open_session

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._source.adapters

    @property
    def state(self) -> str:
        return self._source.state

    @property
    def trouble(self) -> str | None:
        return f"the model {self.name!r} is closed" if self._source.closed else None

    def open(self) -> ServedSession:
        session: ServedSession | None = self.session
        if session is None or session.closed:
            raise unavailable(f"the model {self.name!r} is not loaded; a request loads it")
        return session

    async def take(self, caller: Caller) -> ServedSession:
        """Return its session when it is loaded and it is the request's turn; it does not sleep before the end."""
        lent = await self._lent(caller)
        caller.holds(lent)
        session: ServedSession = lent.session
        return session

    async def _lent(self, caller: Caller) -> LentModel:
        try:
            lent = self._source.lease_now()
            if lent is None:
                place = self._source.wait()
                try:
                    with caller.waits(place, self._progress):
                        lent = await place
                except BaseException:
                    place.cancel()  # also where the server began to end before it knew of the wait
                    raise
            return lent
        except (ApiError, Busy, QueueFull, RequestAborted, SessionClosed):
            raise
        except Exception as error:  # the shelf has logged it; paths are not for clients
            problem = f"the model {self.name!r} could not be loaded; the server's log says why"
            again = None if isinstance(error, OutOfMemory) else 5  # what does not fit won't in a while
            raise unavailable(problem, retry_after=again) from error

    def _progress(self) -> str:
        return ", ".join(filter(None, (f"the model is {self._source.state}", self._source.progress)))

    async def load_now(self, caller: Caller) -> None:
        (await self._lent(caller)).release()

    async def unload(self) -> None:
        await self._source.unload_in_turn()


class ServedAdapter(ServedModel):
    """An adapter of a model under a name of its own, `name` or `model:name`."""

    def __init__(self, name: str, parent: ServedModel, adapter: str) -> None:
        self.name, self.parent, self.adapter = name, parent, adapter
        self.created = int(time.time())
        self._adapted: AdaptedSession | None = None

    @property
    def figures(self) -> str:
        return self.parent.name

    @property
    def state(self) -> str:
        return self.parent.state

    def open(self) -> ServedSession:
        return self._over(self.parent.open())

    async def take(self, caller: Caller) -> ServedSession:
        return self._over(await self.parent.take(caller))

    async def load_now(self, caller: Caller) -> None:
        await self.parent.load_now(caller)

    async def unload(self) -> None:
        await self.parent.unload()

    def _over(self, session: ServedSession) -> ServedSession:
        if self._adapted is None or self._adapted.base is not session:
            self._adapted = AdaptedSession(session, self.adapter)
        return self._adapted

    def states(self) -> set[Status]:
        """Return the states of its requests that have not ended."""
        return set() if self._adapted is None else self._adapted.states()

    def as_dict(self) -> dict[str, Any]:
        return {**self.parent.as_dict(), "id": self.name, "created": self.created, "parent": self.parent.name}


class AdaptedSession:
    """A session that uses one adapter for all requests."""

    def __init__(self, base: Any, adapter: str) -> None:
        self.base, self._adapter = base, adapter
        self._lock = threading.Lock()
        self._handles: weakref.WeakSet[HandleLike] = weakref.WeakSet()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def submit(self, prompt: Any, /, **options: Any) -> Any:
        return self._kept(self.base.submit(prompt, adapter=self._adapter, **options))

    def generate(self, prompt: Any, /, **options: Any) -> Any:
        return self._kept(self.base.generate(prompt, adapter=self._adapter, **options))

    def embed(self, texts: Any, /, **options: Any) -> Any:
        return self._kept(self.base.embed(texts, adapter=self._adapter, **options))

    def decide(self, state: Any, questions: Any, /, **options: Any) -> Any:
        return self._kept(self.base.decide(state, questions, adapter=self._adapter, **options))

    def rerank(self, query: Any, documents: Any, /, **options: Any) -> Any:
        return self._kept(self.base.rerank(query, documents, adapter=self._adapter, **options))

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> Any:
        return self._kept(self.base.chat(messages, adapter=self._adapter, **options))

    def _kept(self, handle: Any) -> Any:
        with self._lock:  # figures are read in other threads
            self._handles.add(handle)
        return handle

    def states(self) -> set[Status]:
        """Return the states of its requests that have not ended. This waits for the session's loop."""
        with self._lock:
            handles = [handle for handle in self._handles if not handle.done]
        return {handle.status for handle in handles} - {Status.FINISHED, Status.FAILED, Status.ABORTED}


class Models:
    """All models of a server, and their adapters. A request without `model` gets the first."""

    def __init__(self, sessions: Any, name: str | None = None) -> None:
        if isinstance(sessions, Mapping):
            if name is not None:
                raise ConfigError("name", name, "is given together with a mapping of names to sessions", "Leave it out")
            if not sessions:
                raise ConfigError("sessions", sessions, "does not map names to sessions", 'Pass {"name": session}')
            names = [checked_name("sessions", name, colons=True) for name in sessions]
            self.by_name = {
                name: _served(name, session) for name, session in zip(names, sessions.values(), strict=True)
            }
        else:
            if name:
                checked_name("name", name, colons=True)
            name = name or name_of_model(Path(str(getattr(sessions, "model", "") or "model")).name)
            self.by_name = {name: ServedModel(name, sessions)}
        self._adapters: dict[str, ServedAdapter] = {}

    def get(self, name: str | None) -> ServedModel:
        """Return a model by its name. Raise `ApiError` (404) for an unknown one."""
        if name is None:
            return next(iter(self.by_name.values()))
        served = self.by_name.get(name) or self._adapter(name)
        if served is None:
            known = ", ".join(entry.name for entry in self.all())
            raise ApiError(
                404, f"the model {name[:200]!r} does not exist here. Use one of: {known}", param="model",
                code="model_not_found",
            )  # fmt: skip
        return served

    def busy_adapters(self) -> tuple[list[str], list[str]]:
        """Return the names of adapters with requests that wait, and of those with requests that run."""
        waiting, running = set[str](), set[str]()
        for served in tuple(self._adapters.values()):
            states = served.states()
            if Status.QUEUED in states:
                waiting.add(served.adapter)
            if states - {Status.QUEUED}:
                running.add(served.adapter)
        return sorted(waiting), sorted(running)

    def all(self) -> list[ServedModel]:
        """Return every model, each followed by its adapters."""
        entries: list[ServedModel] = []
        for served in self.by_name.values():
            entries.append(served)
            for adapter in served.adapters:
                name = f"{served.name}:{adapter}" if self._is_taken(adapter, served) else adapter
                entry = self._adapter(name)
                entries += [] if entry is None else [entry]
        return entries

    def _adapter(self, name: str) -> ServedModel | None:
        """Return an adapter by its name, alone or after the model's; None for an unknown one.

        Names of adapters have no colon, so the two forms never meet.
        """
        model, colon, adapter = name.rpartition(":")
        owners = (self.by_name.get(model),) if colon else tuple(self.by_name.values())
        for served in owners:
            if served is not None and adapter in served.adapters:
                known = self._adapters.get(name)
                if known is None or (known.parent, known.adapter) != (served, adapter):
                    known = self._adapters[name] = ServedAdapter(name, served, adapter)
                return known
        self._adapters.pop(name, None)
        return None

    def _is_taken(self, adapter: str, owner: ServedModel) -> bool:
        """True if a name means a model, or an adapter of a model before its owner."""
        first = next((served for served in self.by_name.values() if adapter in served.adapters), owner)
        return adapter in self.by_name or first is not owner

    @property
    def trouble(self) -> str | None:
        """The reason why a model takes no requests now, or None."""
        return next((served.trouble for served in self.by_name.values() if served.trouble is not None), None)


def _served(name: str, source: Any) -> ServedModel:
    """Return an entry for a session, one that is still opening, or a model that is loaded on demand."""
    return ServedOnDemand(name, source) if hasattr(source, "lease_now") else ServedModel(name, source)
