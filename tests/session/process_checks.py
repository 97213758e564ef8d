"""Checks of sessions of several processes, each in a process of its own: `python process_checks.py FOLDER NAME`.

A check is the leader. It starts its followers, which have two simulated devices each, as it has itself, and compares
with one device when the session is closed. `tests/session/test_processes.py` runs them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("toolkit", "kernels", "tests")]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels"))
    os.environ["REKINDLE_PROCESS_SECRET"] = "a secret of these tests"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import rekindle  # noqa: E402
from helpers import checkpoints, mesh_models  # noqa: E402
from helpers.mesh_models import PROMPT, difference  # noqa: E402
from helpers.sessions import writer_of  # noqa: E402
from rekindle._src.kvcache.tiers.host import DividedHostTier  # noqa: E402
from rekindle._src.processes import joining  # noqa: E402
from rekindle._src.session.session import Session  # noqa: E402

CLOSE = 1e-5
CHECKS: dict[str, Callable[[Path], None]] = {}
OPTIONS: dict[str, Any] = {**mesh_models.OPTIONS, "cache_dir": None}


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


class Opened(NamedTuple):
    session: Session
    followers: list[subprocess.Popen[str]]


def write(folder: Path) -> None:
    """Random checkpoints with two kv heads, which four devices have twice. A leader can't: making them uses JAX."""
    for name, seed in (("llama", 0), ("llama", 1), ("qwen3-moe", 0)):
        raw = mesh_models.raw(name, 2) | {"max_position_embeddings": 4096}
        checkpoints.write(folder / f"{name}-{seed}", raw, seed=seed)


def checkpoint(folder: Path, name: str = "llama", seed: int = 0) -> str:
    return str(folder / f"{name}-{seed}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def follower(
    port: int, process: int, processes: int, folder: Path, *options: str, secret: str | None = None
) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "rekindle", "follow", "--coordinator", f"127.0.0.1:{port}", "--process", str(process),
        "--processes", str(processes), "--cache-dir", str(folder / f"cache{process}"), "--wait", "60", *options,
    ]  # fmt: skip
    environment = dict(os.environ) if secret is None else {**os.environ, "REKINDLE_PROCESS_SECRET": secret}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def opened(folder: Path, model: str, processes: int = 2, mesh: Any = 4, **options: Any) -> Iterator[Opened]:
    port = free_port()
    followers = [follower(port, process, processes, folder) for process in range(1, processes)]
    more = OPTIONS | {"cache_dir": str(folder / "cache0")} | options
    try:
        with rekindle.open_sync(
            model, mesh=mesh, processes=processes, coordinator=f"127.0.0.1:{port}", **more
        ) as session:
            yield Opened(session, followers)
    finally:
        for one in followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(60)
            one.kill()
            print(
                f"a follower ended with {one.returncode}: {one.stderr.read()[-2000:] if one.stderr else ''}", flush=True
            )


def alone(folder: Path, model: str, **options: Any) -> Session:
    return rekindle.open_sync(model, **OPTIONS | {"cache_dir": str(folder / "alone")} | options)


def asked(session: Session, salt: str | None = None) -> list[rekindle.Completion]:
    """Ask a greedy request, one with a seed, and one with its history kept on the devices."""
    more: dict[str, Any] = {"max_tokens": 8, "logprobs": 3, "salt": salt}
    greedy = session.generate_sync(PROMPT, **more)
    drawn = session.generate_sync(PROMPT[:4], temperature=0.8, seed=7, top_k=20, **more)
    shaped = session.generate_sync(PROMPT[:6], repetition_penalty=1.3, logit_bias={5: 3.0, 9: -9.0}, **more)
    session.check_integrity()
    return [greedy, drawn, shaped]


@check
def tokens(folder: Path) -> None:
    """Requests, pages saved to disk, and an orderly end; then the same on one device, which finds those pages."""
    model, disk = checkpoint(folder), {"disk_memory": 1 << 26, "cache_dir": str(folder / "cache0")}
    prompt = [(7 * index) % 150 + 3 for index in range(33)]
    with opened(folder, model, **disk) as (session, followers):
        found = asked(session)
        kept = session.generate_sync(prompt, max_tokens=6, logprobs=3)
        saved = session.save("here").result_sync()
        told = session.stats().mesh
        assert told is not None and told.processes == 2 and "4 devices of 2 processes" in str(told)
        assert saved.pages >= 4
    assert [one.returncode for one in followers] == [0]
    with alone(folder, model, restore="here", **disk) as session:
        apart = difference(asked(session, salt="none of those pages"), found)
        print(f"log-probabilities differ by {apart:.1e}")
        assert apart < CLOSE
        again = session.generate_sync(prompt, max_tokens=6, logprobs=3)
        assert again.usage.cached_tokens == 32
    assert difference([kept], [again]) < CLOSE


@check
def more_requests(folder: Path) -> None:
    """Prompts that are scored, several at once, and vectors."""
    model = checkpoint(folder)

    def told(session: Session) -> tuple[list[rekindle.Completion], np.ndarray]:
        scored = session.generate_sync(PROMPT, max_tokens=2, logprobs=1, prompt_logprobs=2)
        several = session.generate_sync([PROMPT[at:] for at in range(6)], max_tokens=9, logprobs=1, ignore_eos=True)
        return [scored, *several], np.asarray(session.embed(PROMPT).result_sync())

    with opened(folder, model) as (session, _):
        found, vector = told(session)
    with alone(folder, model) as session:
        expected, other = told(session)
    assert difference(expected, found) < CLOSE
    np.testing.assert_allclose(vector, other, atol=1e-5)


@check
def killed(folder: Path) -> None:
    """A follower that is killed while it computes: callers learn of it without waiting for its silence, and the
    leader's process goes on."""
    joining.FOLLOWER_SILENCE = 600.0
    model = checkpoint(folder)
    with opened(folder, model, max_model_len=4000, device_pages=600) as (session, followers):
        session.generate_sync(PROMPT, max_tokens=4)
        handle = session.submit(PROMPT, max_tokens=3900, ignore_eos=True)
        stream = iter(handle.stream_sync())
        next(stream)
        killed_at = time.monotonic()
        followers[0].kill()
        refused(lambda: handle.result_sync())
        print(f"the caller knew after {time.monotonic() - killed_at:.2f} s")
        refused(lambda: session.generate_sync(PROMPT, max_tokens=4))
        start = time.monotonic()
    print(f"closed after {time.monotonic() - start:.1f} s")
    assert float(jax.numpy.ones(3).sum()) == 3.0, "the process goes on"


def refused(call: Callable[[], Any]) -> None:
    """`call` raises a typed error that leads to the lost process."""
    with pytest.raises(rekindle.RekindleError) as raised:
        call()
    chain: BaseException | None = raised.value
    while chain is not None and not isinstance(chain, rekindle.ProcessLost):
        chain = chain.__cause__
    assert chain is not None, f"{raised.value!r} does not say that a process is gone"
    assert "process 1 is gone" in str(chain), chain


@check
def stopped_for_a_while(folder: Path) -> None:
    """A follower that stands still is waited for."""
    model = checkpoint(folder)
    with opened(folder, model) as (session, followers):
        session.generate_sync(PROMPT, max_tokens=4)
        followers[0].send_signal(signal.SIGSTOP)
        threading.Timer(3.0, followers[0].send_signal, [signal.SIGCONT]).start()
        start = time.monotonic()
        found = session.generate_sync(PROMPT, max_tokens=20, logprobs=1, ignore_eos=True)
        assert time.monotonic() - start > 2.0
    with alone(folder, model) as session:
        expected = session.generate_sync(PROMPT, max_tokens=20, logprobs=1, ignore_eos=True)
    assert difference([expected], [found]) < CLOSE


@check
def stopped_for_good(folder: Path) -> None:
    """A follower that says nothing for too long counts as gone."""
    joining.FOLLOWER_SILENCE = 2.5
    with opened(folder, checkpoint(folder)) as (session, followers):
        session.generate_sync(PROMPT, max_tokens=4)
        followers[0].send_signal(signal.SIGSTOP)
        refused(lambda: session.generate_sync(PROMPT, max_tokens=20, ignore_eos=True))
        followers[0].kill()


@check
def preemption_and_tiers(folder: Path) -> None:
    """More requests than pages: sequences are preempted, and pages leave for the leader's memory and come back."""
    model, rng = checkpoint(folder), np.random.default_rng(0)
    stem = rng.integers(3, 150, 17).tolist()
    prompts = [stem[: int(rng.integers(0, 18))] + rng.integers(3, 150, 9).tolist() for _ in range(24)]
    more: dict[str, Any] = {"max_requests": 4, "max_tokens_per_step": 32, "max_queue": 64}
    ask: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.7, "seed": 5}
    with opened(folder, model, device_pages=13, **more) as (session, _):
        tiers = writer_of(session).tiers
        assert tiers is not None
        tiers.costs.mode = "always"  # copying is preferred to computing
        found = [[one.token_ids for one in session.generate_sync(prompts, **ask)] for _ in range(2)]
        stats = session.stats()
        print(f"{stats.preemptions} preemptions, {stats.pages_out} pages out, {stats.pages_in} in")
        assert stats.preemptions and stats.pages_out and stats.pages_in
        session.check_integrity()
    with alone(folder, model, device_pages=200, **more) as session:
        expected = [one.token_ids for one in session.generate_sync(prompts, **ask)]
    assert found == [expected, expected]


@check
def parts_of_pages(folder: Path) -> None:
    """Run twice. Every process keeps the heads of its own devices, whether a page came from them or from the leader's
    disk; saved pages are whole, so one device can restore them, and several processes can.
    """
    disk: dict[str, Any] = {"disk_memory": 1 << 26, "cache_dir": str(folder / "cache0")}
    model, marker = checkpoint(folder), folder / "saved"
    prompts = [[(seed * index) % 150 + 3 for index in range(33)] for seed in (7, 11, 13, 17, 19, 23)]
    ask: dict[str, Any] = {"max_tokens": 6, "logprobs": 3}
    restore = "parts" if marker.exists() else None
    with opened(folder, model, device_pages=13, restore=restore, **disk) as (session, _):
        tiers = writer_of(session).tiers
        assert tiers is not None and isinstance(tiers.host, DividedHostTier)
        tiers.costs.mode = "always"  # copying is preferred to computing
        team = tiers.host._others._followers  # type: ignore[attr-defined]
        rounds = []
        for _ in range(2):
            sent = team.bytes_sent
            rounds.append([session.generate_sync(prompt, **ask) for prompt in prompts])
            told = session.stats()
            print(f"{told.pages_out} pages out, {told.pages_in} in, {team.bytes_sent - sent} bytes sent", flush=True)
            page = sum(leaf.nbytes for leaf in next(iter(tiers.host._payloads.values())))
            if told.pages_in:  # twice: neither what comes back from memory nor what comes from disk is sent
                assert team.bytes_sent - sent < told.pages_in * page / 2, "pages travel between processes"
        again = 32 if restore else 0
        assert [one.usage.cached_tokens for one in rounds[0]] == [again] * len(prompts)
        assert [one.usage.cached_tokens for one in rounds[1]] == [32] * len(prompts)
        digest, part = next(iter(tiers.host._payloads.items()))
        whole = tiers.host.peek(digest)
        assert whole is not None
        assert [leaf.shape[3] for leaf in part] == [1] * len(part), "its devices have one of two heads"
        assert [leaf.shape[3] for leaf in whole] == [2] * len(part)
        if restore is None:
            saved = session.save("parts").result_sync()
            assert saved.pages == 24 and not saved.skipped, saved
            session.cache.clear(tier="memory").result_sync()
            assert len(tiers.host) == 0
            assert difference(rounds[1], [session.generate_sync(prompt, **ask) for prompt in prompts]) < CLOSE
        session.check_integrity()
    with alone(folder, model, restore="parts", **disk) as session:
        found = [session.generate_sync(prompt, **ask) for prompt in prompts]
        assert [one.usage.cached_tokens for one in found] == [32] * len(prompts)
    with alone(folder, model) as session:
        expected = [session.generate_sync(prompt, **ask) for prompt in prompts]
    for one in (*rounds, found):
        assert difference(expected, one) < CLOSE
    marker.touch()


@check
def swapped_weights(folder: Path) -> None:
    """Other weights are taken by all processes or by none."""
    first, second = checkpoint(folder), checkpoint(folder, seed=1)
    ask: dict[str, Any] = {"max_tokens": 10, "logprobs": 3}
    with opened(folder, first) as (session, _):
        before = session.generate_sync(PROMPT, **ask)
        session.swap_weights(second).result_sync()
        after = session.generate_sync(PROMPT, **ask)
        for weights in ({}, str(folder / "nowhere")):
            with pytest.raises(rekindle.RekindleError) as raised:
                session.swap_weights(weights).result_sync()
            print(raised.value)
        again = session.generate_sync(PROMPT, **ask)
    for model, found in ((first, before), (second, after), (second, again)):
        with alone(folder, model) as session:
            assert difference([session.generate_sync(PROMPT, **ask)], [found]) < CLOSE


@check
def structured_text(folder: Path) -> None:
    """Check the embedded model within a grammar, along with free text and drafts."""
    ask: list[tuple[str, dict[str, Any]]] = [
        ("The dog was", {"choice": ["happy", "sad", "very tired"], "max_tokens": 12}),
        ("Tell me a number:", {"regex": "[0-9]{3}-[0-9]{2}", "max_tokens": 12, "temperature": 0.9, "seed": 3}),
        ("Once upon a time", {"max_tokens": 24}),
    ]
    options: dict[str, Any] = {"max_model_len": 256, "max_tokens_per_step": 64, "prompt_lookup": 1}

    def told(session: Session) -> list[str]:
        handles = [session.submit(prompt, **more) for prompt, more in ask]
        return [handle.result_sync().text for handle in handles]

    with opened(folder, "tiny", **options) as (session, _):
        found = told(session)
    with alone(folder, "tiny", **options) as session:
        assert told(session) == found, found


@check
def four_processes(folder: Path) -> None:
    """Eight devices of four processes, and experts in groups that lie in different ones."""
    model = checkpoint(folder, "qwen3-moe")
    with opened(folder, model, processes=4, mesh={"model": 4, "expert": 2}) as (session, followers):
        found = asked(session)
    assert [one.returncode for one in followers] == [0, 0, 0]
    with alone(folder, model) as session:
        assert difference(asked(session), found) < CLOSE


@check
def other_secrets_and_weights(folder: Path) -> None:
    """A process without the secret is sent away and changes nothing; one with other weights is named, and ends it."""
    model, other = checkpoint(folder), checkpoint(folder, seed=1)
    port = free_port()
    followers = [follower(port, 1, 2, folder, secret="some other secret")]

    def later() -> None:
        followers[0].wait(60)
        with socket.create_connection(("127.0.0.1", port)) as noise:
            noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        followers.append(follower(port, 1, 2, folder, "--model", other))

    threading.Thread(target=later, daemon=True).start()
    with pytest.raises(rekindle.ProcessRefused, match=r"process 1 can't share the model.*the weights is"):
        rekindle.open_sync(model, mesh=4, processes=2, coordinator=f"127.0.0.1:{port}", **OPTIONS)
    for one, problem in zip(followers, ("it has another secret", "the weights is"), strict=True):
        assert one.stderr is not None
        text = one.communicate(timeout=20)[1]
        assert one.returncode == 1 and problem in text, text


@check
def a_second_start(folder: Path) -> None:
    """Run twice: programs are stored by every process for itself, and loaded without tracing."""
    model = checkpoint(folder)
    warmed = folder / "warmed"
    with opened(folder, model, precompile="all") as (session, _):
        asked(session)
        stats = session.stats()
        print(f"{stats.traces} traces, {stats.compilations} compilations")
        assert (stats.traces == 0 and stats.compilations == 0) == warmed.exists()
    warmed.touch()


@check
def waits_for_its_end(folder: Path) -> None:
    """A leader that is killed from outside while it serves."""
    with opened(folder, checkpoint(folder)) as (session, followers):
        session.generate_sync(PROMPT, max_tokens=4)
        print(f"serving {followers[0].pid}", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    CHECKS[sys.argv[2]](Path(sys.argv[1]))
    print(f"{sys.argv[2]}: done", flush=True)
