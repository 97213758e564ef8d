"""Sessions over the fake model: real tasks, threads and text, a real scheduler, and a runner without a device."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from helpers.fakes import EOS, FakeModel, FakeRunner, make_request
from rekindle._src.capabilities import capabilities_of
from rekindle._src.core.config import EngineConfig, spare_places
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.device import Device
from rekindle._src.dispatch.engine import Engine
from rekindle._src.dispatch.host import Host, wait
from rekindle._src.dispatch.threads import Mailbox
from rekindle._src.drafts.plan import of_texts
from rekindle._src.kvcache import PagePool, PrefixCache
from rekindle._src.scheduling.scheduler import Limits, Scheduler
from rekindle._src.session.session import Session
from rekindle._src.text.backends import WholeTokenizer
from rekindle._src.text.detokenizers import real_detokenizer
from rekindle._src.text.tokenizer import Tokenizer
from rekindle._src.text.tokenizer_limits import byte_of_character

T = TypeVar("T")

CONFIG = EngineConfig(max_requests=8, max_tokens_per_step=64, max_model_len=512, page_size=8, max_queue=256, seed=0)


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """UTF-8 bytes as token ids, as fakes.ByteTokenizer, but with everything that detokenizing asks for."""
    vocabulary = byte_of_character()
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("</s>", special=True)])
    assert backend.token_to_id("</s>") == EOS
    return Tokenizer(WholeTokenizer(backend.to_str().encode()), eos_ids=(EOS,))


def parts(config: EngineConfig = CONFIG, *, num_pages: int = 512, **runner: Any) -> tuple[Scheduler, FakeRunner]:
    """A scheduler and a fake runner that agree with each other."""
    assert config.page_size is not None
    limits = Limits.of(config, max_prefill_rows=8)
    places = config.max_queue + config.max_requests
    limits = dataclasses.replace(limits, max_queue=places + spare_places(places))
    pool = PagePool(num_pages)
    fake = FakeRunner(
        num_pages=num_pages, page_size=config.page_size, max_requests=config.max_requests,
        max_tokens_per_step=config.max_tokens_per_step, max_prefill_rows=8, **runner,
    )  # fmt: skip
    cache = PrefixCache(pool, config.page_size, b"root") if config.prefix_cache else None
    drafters = [kind.drafter(limits) for kind in of_texts(config.drafts, config.prompt_lookup)]
    scheduler = Scheduler(limits, pool, cache=cache, policy=config.policy, seed=config.seed, drafters=drafters)
    return scheduler, fake


def fake_session(config: EngineConfig = CONFIG, **options: Any) -> Session:
    """An open session over fakes; keyword options are the runner's and `num_pages`."""
    scheduler, runner = parts(config, **options)
    return Session(scheduler, runner, byte_tokenizer(), config, model="fake")


def session_with(tokenizer: Tokenizer, config: EngineConfig = CONFIG, **options: Any) -> Session:
    """A session over fakes that takes texts in as one of `open` does, by this tokenizer."""
    front = fake_front(config, **options)._replace(
        tokenizer=tokenizer, detokenizer=real_detokenizer(tokenizer), vocab_size=tokenizer.vocab_size,
        characters_per_token=lambda: tokenizer.characters_per_token,
    )  # fmt: skip
    return session_of(front)


def session_of(front: Front) -> Session:
    """A session over these parts."""
    host = Host(lambda: front, capabilities_of)
    host.start()
    return Session.attached(host, wait(host.opened))


def fake_engine(config: EngineConfig = CONFIG, device: Device | None = None, **options: Any) -> Engine:
    """An engine over fakes; keyword options are the runner's and `num_pages`."""
    return Engine(*parts(config, **options), config, device)


def fake_front(config: EngineConfig = CONFIG, **options: Any) -> Front:
    """The parts of such a session, as `open` would build them."""
    tokenizer = byte_tokenizer()
    engine = fake_engine(config, **options)
    return Front(engine, tokenizer, real_detokenizer(tokenizer), config, EOS + 1, model="fake")


def engine_of(session: Session) -> Any:
    """Return the engine of a session, with its scheduler, device and runner."""
    return session._engine


def writer_of(session: Session) -> Any:
    """The writer of a session's cache, which has the tiers of host memory and disk."""
    return session._cache_writer


def host_of(session: Session) -> Any:
    """Return the host of a session: its event loop, its queue and the thread of its steps."""
    return session._host


def client_of(session: Session) -> Any:
    """Return the part of a session that makes calls of prompts and options."""
    return session._client


def front_of(session: Session) -> Any:
    """Return the front of a session, with its tokenizer, chat template and capabilities."""
    return session._front


def change_front(session: Session, **changes: Any) -> None:
    """Give a session another template of chats, or another name, than it was opened with."""
    session._front = session._front._replace(**changes)


@contextmanager
def opened(config: EngineConfig = CONFIG, **options: Any) -> Iterator[Session]:
    """A session that has to be whole again afterwards: no live request, every page back, no thread left."""
    with checked(lambda: fake_session(config, **options)) as session:
        yield session


@contextmanager
def checked(make: Callable[[], Session]) -> Iterator[Session]:
    """A session that has to be whole again afterwards."""
    before = threads()
    session = make()
    try:
        yield session
        wait_until_idle(session)
    finally:
        session.close()
    eventually(lambda: threads() <= before)


def threads() -> set[threading.Thread]:
    """Return the threads that a session may have started; trio keeps threads of its own for ten seconds."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(("rekindle", "AnyIO"))}


def wait_until_idle(session: Session) -> None:
    """Wait until nothing lives in the session any more, and check that nothing leaked."""
    eventually(lambda: session.stats().live == 0 and not engine_of(session).scheduler.has_work)
    session.check_integrity()


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def hold_steps(session: Session) -> threading.Event:
    """Let no step of a session over fakes end before the event is set."""
    gate: threading.Event = threading.Event()
    engine_of(session).runner.gate = gate
    return gate


async def result_of(call: Awaitable[T]) -> T:
    """Await a call, for tasks and event loops that want a coroutine."""
    return await call


async def cancel_once(ready: Callable[[], object], call: Callable[[], Awaitable[object]]) -> None:
    """Await a call in a task that is cancelled as soon as `ready()`, which the call must not outrun."""

    async def wait() -> None:
        await call()
        raise AssertionError("it ended before it was cancelled")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        while not ready():  # noqa: ASYNC110 (other threads decide)
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()


def listener_of(server: Any) -> Any:
    """The listener of a server: its connections, and the answers that are on their way."""
    return server._listener


async def comes_to_rest(server: Any) -> None:
    """Wait until a server has no exchange, connection or queued token left."""
    listener = listener_of(server)
    await asyncio.to_thread(eventually, lambda: not listener.life.active, 60.0)
    await asyncio.to_thread(eventually, lambda: listener.connections.count == 0, 60.0)
    assert listener.life.queued_tokens == 0


def expected(prompt: str | list[int], model: FakeModel | None = None, **sampling: Any) -> list[int]:
    """Return the fake model's tokens for a prompt, computed in a plain loop."""
    return (model or FakeModel()).generate(make_request(prompt, **sampling))


def submission(text: str | None = "abc", ids: list[int] | None = None, **sampling: Any) -> Submission:
    options = Sampling(**sampling)
    token_ids = None if ids is None else np.asarray(ids, np.int32)
    return Submission("s", text if ids is None else None, token_ids, True, options, Mailbox(options.n), 1.0)


async def rest(stream: Any) -> list[Any]:
    """Return all messages left in a stream after its senders are gone."""
    async with stream:
        return [message async for message in stream]
