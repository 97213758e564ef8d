"""Fleets on Ray: processes of their own, killed and stopped by signals, and what a client sees of that: a pause."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import rekindle
from helpers.sessions import eventually
from rekindle import ConfigError, Fleet

pytest.importorskip("ray", reason="fleets need the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

OPTIONS: dict[str, Any] = {
    "deterministic": True, "max_requests": 8, "max_tokens_per_step": 128, "max_model_len": 512, "disk_memory": 0,
    "host_memory": 1 << 26,
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def fleet(cache: str) -> Iterator[Fleet]:
    made = rekindle.fleet("tiny", replicas=2, cache_dir=cache, **OPTIONS).result_sync()
    try:
        yield made
    finally:
        made.close()


@functools.cache
def texts(cache: str, count: int, tokens: int) -> list[str]:
    """What one session gives."""
    with rekindle.open_sync("tiny", cache_dir=cache, **OPTIONS) as session:
        handles = [session.submit(prompt(number), **options(number, tokens)) for number in range(count)]
        return [handle.result_sync().text for handle in handles]


def prompt(number: int) -> str:
    return f"{['Once upon a time', 'Tom and Anna', 'One day a dog'][number % 3]}, number {number}, "


def options(number: int, tokens: int) -> dict[str, Any]:
    size = tokens // 2 + number * 37 % tokens
    more = [{}, {"stop": ["!"]}, {"presence_penalty": 0.5}, {"logprobs": 1}, {"min_tokens": 20}][number % 5]
    return {"max_tokens": size, "temperature": 0.8, "seed": number, "ignore_eos": number % 5 != 4, **more}


def ready(fleet: Fleet, count: int, seconds: float = 120.0) -> None:
    eventually(lambda: fleet.stats().ready == count, seconds)


async def ask_all(fleet: Fleet, count: int, tokens: int, at_once: int, *, over: float = 0.0) -> list[str]:
    """The texts of so many streams that begin within `over` seconds, each put together from its deltas."""
    found = [""] * count
    limiter = anyio.CapacityLimiter(at_once)

    async def ask(number: int) -> None:
        await anyio.sleep(over * number / count)
        async with limiter:
            parts = [delta.text async for delta in fleet.stream(prompt(number), **options(number, tokens))]
            found[number] = "".join(parts)

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(ask, number)
    return found


def test_it_answers_as_one_session(fleet: Fleet, cache: str) -> None:
    assert anyio.run(ask_all, fleet, 12, 60, 12) == texts(cache, 12, 60)


def test_nothing_listens_to_other_machines(fleet: Fleet) -> None:
    family = {pid for pid, line in processes() if "ray" in line and ("gcs_server" in line or "raylet" in line)}
    assert family, "Ray does not run"
    listening = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True)
    if listening.returncode:
        pytest.skip("there is no ss")
    mine = [line for line in listening.stdout.splitlines() if re.search(r"gcs_server|raylet|ray::", line)]
    assert mine
    assert [line for line in mine if not re.search(r"(127\.0\.0\.1|\[::1\]|\[::ffff:127\.0\.0\.1\]):\d", line)] == []


def processes() -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found.append((int(folder.name), (folder / "cmdline").read_bytes().decode(errors="replace")))
            except OSError:
                continue
    return found


def test_its_ray_asks_for_a_token_that_no_file_has(fleet: Fleet) -> None:
    """Other users of the machine ran code on a Ray that asked for none, or read a file of mode 0644."""
    import ray
    from ray._raylet import AuthenticationMode, get_authentication_mode

    def told() -> tuple[str | None, str | None]:
        return os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN")

    mode, token = ray.get(ray.remote(told).options(num_cpus=0).remote())
    assert mode == "token" and token is not None and len(token) == 64
    assert get_authentication_mode() == AuthenticationMode.TOKEN
    assert "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_MODE" not in os.environ, "others may start another Ray"
    file = Path.home() / ".ray" / "auth_token"
    assert not file.exists() or token not in file.read_text()


def test_chats_vectors_and_objects(fleet: Fleet) -> None:
    reply = fleet.chat([{"role": "user", "content": "Who are you?"}], max_tokens=12).result_sync()
    assert reply.text
    vectors = fleet.embed(["one", "two"]).result_sync()
    assert vectors.shape == (2, 256) or vectors.shape[0] == 2
    pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
    done = fleet.generate("The number is ", regex="[0-9]{3}", max_tokens=8).result_sync()
    assert re.fullmatch("[0-9]{3}", done.text) and done.parsed == done.text
    with pytest.raises(rekindle.InvalidRequest):
        fleet.generate("a", regex="(", max_tokens=8).result_sync()


@dataclasses.dataclass
class Locked:
    """Its method holds a lock, so that the class can't be pickled by value."""

    yes: bool

    def held(self, lock: Any = threading.Lock()) -> Any:  # noqa: B008
        return lock


def test_odd_requests_end_themselves_at_most(fleet: Fleet, cache: str) -> None:
    ready(fleet, 2)
    before = fleet.stats()
    odd = [{"role": "user", "content": "a", "b": {1: 2, "c": 3, None: 4}, "d": threading.Lock()}]
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]

    async def run() -> list[str]:
        async def ask() -> None:
            assert (await fleet.generate("Once", salt="\ud800", max_tokens=4)).text
            assert (await fleet.chat(odd, max_tokens=4)).token_ids
            assert (await fleet.chat([{"role": "user", "content": "a", "deep": deep}], max_tokens=4)).token_ids
            assert isinstance((await fleet.generate("Yes: ", schema=Locked, max_tokens=20)).parsed, Locked)
            with pytest.raises(rekindle.RequestFailed):
                await fleet.generate("Once", max_tokens=10**5000)

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            return await ask_all(fleet, 12, 60, 12)

    assert anyio.run(run) == texts(cache, 12, 60)
    assert (fleet.stats().lost, fleet.stats().moved) == (before.lost, before.moved)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_process_that_is_killed_or_stopped_is_replaced(fleet: Fleet, cache: str, sign: signal.Signals) -> None:
    ready(fleet, 2)

    async def run() -> list[str]:
        async def strike() -> None:
            await anyio.sleep(0.5)
            stats = await anyio.to_thread.run_sync(fleet.stats)
            victim = max(stats.replicas, key=lambda one: one.inside)
            assert victim.inside
            os.kill(victim.pid, sign)

        async with anyio.create_task_group() as group:
            group.start_soon(strike)
            return await ask_all(fleet, 40, 200, 40)

    assert anyio.run(run) == texts(cache, 40, 200)
    assert fleet.stats().moved >= 1
    ready(fleet, 2)


def test_it_grows_and_shrinks(fleet: Fleet, cache: str) -> None:
    fleet.scale(3).result_sync()
    ready(fleet, 3)
    fleet.scale(2, drain=5).result_sync()
    assert len(fleet.stats().replicas) == 2
    assert anyio.run(ask_all, fleet, 6, 60, 6) == texts(cache, 6, 60)


def test_other_weights_while_streams_go_on(fleet: Fleet, cache: str) -> None:
    """The same weights again, so that no text may change, wherever its request was when they came."""

    async def run() -> list[str]:
        found: list[str] = []

        async def ask() -> None:
            found.extend(await ask_all(fleet, 12, 200, 12))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.sleep(0.3)
            await fleet.swap_weights("tiny", drain=0.2)
        return found

    assert anyio.run(run) == texts(cache, 12, 200)
    assert [one.weights for one in fleet.stats().replicas] == ["tiny", "tiny"]
    with pytest.raises(rekindle.CheckpointError):
        fleet.swap_weights("no such folder").result_sync()
    ready(fleet, 2)


def test_which_ray_is_joined(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Ray that this process has started for itself is there, and belongs to it alone."""
    from rekindle._src.replicas import on_ray

    joined: list[str] = []
    monkeypatch.setattr(on_ray.ray, "init", lambda **given: joined.append(given["address"]))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not on_ray.join_cluster()
    noted = tmp_path / "ray" / "ray_current_cluster"
    noted.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        noted.write_text(address)
        assert on_ray.join_cluster()
    assert not on_ray.join_cluster(), "it has ended"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert not on_ray.join_cluster()
    assert joined == [address]

    def refuse(**given: Any) -> None:
        raise ConnectionError("nothing is there")

    monkeypatch.setattr(on_ray.ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        on_ray.join_cluster()


def test_prompts_in_one_process_and_answers_in_another(cache: str) -> None:
    prompts = [f"{prompt(number)} " * 8 for number in range(12)]
    with rekindle.open_sync("tiny", cache_dir=cache, **OPTIONS) as session:
        wanted = [session.generate_sync(text, **options(number, 60)).text for number, text in enumerate(prompts)]
    with rekindle.fleet("tiny", roles={"prefill": 1, "decode": 1}, cache_dir=cache, **OPTIONS).result_sync() as fleet:
        ready(fleet, 2)
        handles = [fleet.submit(text, **options(number, 60)) for number, text in enumerate(prompts)]
        assert [handle.result_sync().text for handle in handles] == wanted
        eventually(lambda: fleet.stats().pulled_pages > 0)
        stats = fleet.stats()
        assert (stats.handed_over, stats.failed_pulls, [one.role for one in stats.replicas]) == (
            12, 0, ["prefill", "decode"],
        )  # fmt: skip


def test_a_replica_of_two_processes(fleet: Fleet, cache: str) -> None:
    """Two devices of two processes share the model. The death of either is the death of the replica."""
    given: dict[str, Any] = {**OPTIONS, "deterministic": False, "dtype": "float32"}
    asked = {"max_tokens": 150, "temperature": 0.8, "ignore_eos": True}
    with rekindle.open_sync("tiny", cache_dir=cache, **given) as session:
        wanted = [session.generate_sync(prompt(number), seed=number, **asked).text for number in range(4)]
    opening = rekindle.fleet("tiny", replicas=1, mesh=2, processes=2, cache_dir=cache, **given)
    with opening.result_sync() as pair:
        for victim in ("ray::FollowerActor", "ray::Actor"):
            before = {pid for pid, line in processes() if line.startswith(victim)}
            handles = [pair.submit(prompt(number), seed=number, **asked) for number in range(4)]
            eventually(lambda: pair.stats().generated_tokens > 0, 60)
            of_pair = before if victim == "ray::FollowerActor" else {pair.stats().replicas[0].pid}
            for pid in of_pair:
                os.kill(pid, signal.SIGKILL)
            assert [handle.result_sync().text for handle in handles] == wanted
            ready(pair, 1)
        assert pair.stats().lost == 2 and pair.stats().moved >= 2
    eventually(lambda: not [pid for pid, line in processes() if line.startswith("ray::FollowerActor")])
    with pytest.raises(ConfigError, match="coordinator"):
        rekindle.fleet("tiny", mesh=2, processes=2, coordinator="127.0.0.1:7000")


def test_what_can_not_be_opened_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        rekindle.fleet(replicas=0)
    with pytest.raises(ConfigError, match="router"):
        rekindle.fleet(router="nearest")  # type: ignore[arg-type]
    with pytest.raises(rekindle.CheckpointError, match="no such"):
        rekindle.fleet("./no such folder").result_sync()


def test_cores_are_divided() -> None:
    from rekindle._src.replicas.on_ray import cores_of, shares

    cores = sorted(os.sched_getaffinity(0))
    for replicas in (1, 2, 3):
        parts = [cores_of(index, replicas) for index in range(replicas)]
        assert all(parts)
        if replicas <= len(cores):
            assert sorted(core for part in parts for core in part) == cores
    for processes in (2, 3):
        assert len({len(part) for part in shares(0, 1, processes)}) == 1, "they compute alike"


@pytest.mark.parametrize("replicas", [2, 4])
def test_random_deaths_for_two_minutes(cache: str, replicas: int) -> None:
    """300 streams begin; a process dies every five seconds. None is lost, and all texts are those of one session."""
    count, tokens, seconds = 300, 120, 120.0
    wanted = texts(cache, count, tokens)
    draw, deaths = random.Random(replicas), 0
    with rekindle.fleet("tiny", replicas=replicas, cache_dir=cache, **OPTIONS).result_sync() as fleet:
        ready(fleet, replicas)

        async def kill() -> None:
            nonlocal deaths
            while True:
                await anyio.sleep(5)
                stats = await anyio.to_thread.run_sync(fleet.stats)
                alive = [one for one in stats.replicas if one.state == "ready"]
                if alive:
                    os.kill(draw.choice(alive).pid, signal.SIGKILL)
                    deaths += 1
                print(f"{deaths} deaths, {len(alive)} were ready, {stats.live} requests live", flush=True)

        async def run() -> list[str]:
            async with anyio.create_task_group() as group:
                group.start_soon(kill)
                found = await ask_all(fleet, count, tokens, count, over=seconds)
                group.cancel_scope.cancel()
            return found

        begun = time.monotonic()
        found = anyio.run(run)
        took, stats = time.monotonic() - begun, fleet.stats()
        again = sorted(seconds for one in stats.replicas for seconds in one.reopened_after)
        wrong = [number for number in range(count) if found[number] != wanted[number]]
        print(f"{replicas} replicas, {took:.0f} s: {deaths} deaths, {stats.moved} requests moved, {len(wrong)} wrong")
        print(f"seconds to replacement: {', '.join(f'{one:.1f}' for one in again)}", flush=True)
        assert wrong == []
        assert deaths >= 10 and stats.moved >= 10


NOTEBOOK = """
import os, signal, time, rekindle
fleet = await rekindle.fleet("tiny", replicas=2, cache_dir={cache!r}, **{options!r})
---
handles = [fleet.submit(prompt, **given) for prompt, given in {asked!r}]
async for delta in handles[0]:
    break
victim = max(fleet.stats().replicas, key=lambda one: one.inside)
os.kill(victim.pid, signal.SIGKILL)
print([(await handle).text for handle in handles] == {wanted!r}, fleet.stats().moved > 0)
---
fleet.watch()
---
fleet
---
await fleet.aclose()
"""


def test_in_a_notebook(cache: str, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="runs the cells")
    nbformat = pytest.importorskip("nbformat", reason="runs the cells")
    asked = [(prompt(number), options(number, 200)) for number in range(12)]
    source = NOTEBOOK.format(cache=cache, options=OPTIONS, asked=asked, wanted=texts(cache, 12, 200))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in source.split("---")])
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = [output for cell in book.cells for output in cell.outputs]
    printed = [one.text for one in told if one.output_type == "stream" and one.name == "stdout"]
    assert printed == ["True True\n"], told
    assert "replica-0" in str(told)


def test_an_openai_client_and_the_command_line(cache: str) -> None:
    openai = pytest.importorskip("openai", reason="the client")
    command = [
        sys.executable,
        "-m",
        "rekindle",
        "serve",
        "tiny",
        "--port",
        "0",
        "--replicas",
        "2",
        "--cache-dir",
        cache,
    ]
    command += ["--max-requests", "8", "--max-tokens-per-step", "128", "--max-model-len", "512", "--deterministic"]
    server = subprocess.Popen([*command, "--disk-memory", "0"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = next(found[1] for line in server.stderr if (found := re.search(r"listens at (\S+)/v1", line)))
        assert any("is ready" in line for line in server.stderr)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2)
        given = {"temperature": 0.8, "seed": 3, "max_tokens": 60}
        stream = client.completions.create(model="tiny", prompt="Once upon a time", stream=True, **given)
        text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        assert text == client.completions.create(model="tiny", prompt="Once upon a time", **given).choices[0].text
        messages: Any = [{"role": "user", "content": "Hello"}]
        assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=8).choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="tiny", prompt="a", max_tokens=-1)
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
        assert 'rekindle_replicas{model_name="tiny"} 2.0' in metrics
        assert re.search(r'rekindle_replicas_ready\{model_name="tiny"\} [12]\.0', metrics)
    finally:
        server.send_signal(signal.SIGTERM)
        rest = server.communicate(timeout=60)[1]
    assert server.returncode == 0, rest


def test_on_ray_serve(fleet: Fleet, cache: str) -> None:
    """The fleet of the module has started Ray, which listens to this machine alone."""
    assert fleet.stats().replicas
    httpx = pytest.importorskip("httpx", reason="the client")
    serve = pytest.importorskip("ray.serve", reason="the extra `ray`")
    import rekindle.ray

    application = rekindle.ray.deployment("tiny", replicas=2, ingresses=2, cache_dir=cache, **OPTIONS)
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    try:
        serve.run(application, name="rekindle", route_prefix="/")
        url = "http://127.0.0.1:8123"
        eventually(lambda: httpx.get(f"{url}/health", timeout=30).status_code == 200, 120)
        body = {"prompt": prompt(0), "max_tokens": 40, "seed": 1}
        one, two = (httpx.post(f"{url}/v1/completions", json=body, timeout=60).json() for _ in range(2))
        assert one["choices"][0]["text"] == two["choices"][0]["text"]
        ingress = next(pid for pid, line in processes() if "ServeReplica" in line)
        os.kill(ingress, signal.SIGKILL)
        answered: list[Any] = []

        def answers() -> bool:
            try:
                answered.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60).json())
            except (httpx.HTTPError, ValueError):
                return False
            return "choices" in answered[-1]

        eventually(answers, 120)
        assert answered[-1]["choices"][0]["text"] == one["choices"][0]["text"]
    finally:
        serve.shutdown()
