"""Adapters over HTTP: served under their names, listed with their model, and loaded only where that was allowed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers import adapters
from helpers.asgi import get, post
from helpers.small import MODEL, OPTIONS, plain, prompt
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle.serve import app

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_programs", "large_steps")]
IDS = prompt(1, 9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [adapters.write(root / str(seed), MODEL.config, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def session(folders: list[Path]) -> Iterator[Any]:
    options = {**OPTIONS, "precompile": "lazy", "max_adapters": 4, "max_adapter_rank": 16}  # as tests/session does
    with rekindle.open_sync(MODEL, adapters={"first": folders[0]}, **options) as opened:
        yield opened


async def tokens(served: Any, model: str) -> list[int]:
    body = {"prompt": IDS, "model": model, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = await post(served, "/v1/completions", {**body, "return_token_ids": True})
    assert answer.status == 200, answer.body
    assert answer.json()["model"] == model
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


async def test_an_adapter_is_a_model_with_a_parent(session: Any, folders: list[Path]) -> None:
    served = app(session, name="base")
    listed = (await get(served, "/v1/models")).json()["data"]
    assert [(entry["id"], entry.get("parent")) for entry in listed] == [("base", None), ("first", "base")]
    assert (await get(served, "/v1/models/base:first")).json()["parent"] == "base"
    expected = adapters.plain(MODEL, folders[0], IDS, 4)
    assert await tokens(served, "first") == await tokens(served, "base:first") == expected
    assert await tokens(served, "base") == list(plain(IDS, 4)) != expected
    missing = await post(served, "/v1/completions", {"prompt": IDS, "model": "second"})
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    assert "Use one of: base, first" in missing.error["message"], "adapters are models that it has"


@pytest.mark.thorough
async def test_it_embeds_under_its_own_name(session: Any) -> None:
    served = app(session, name="base")
    vectors = {name: await session.embed([IDS, IDS[:4]], adapter=name) for name in ("first", None)}
    assert np.abs(vectors["first"] - vectors[None]).max() > 0.1
    for model, expected in (("first", vectors["first"]), ("base:first", vectors["first"]), ("base", vectors[None])):
        answer = await post(served, "/v1/embeddings", {"input": [IDS, IDS[:4]], "model": model})
        assert (answer.status, answer.json()["model"]) == (200, model)
        got = [entry["embedding"] for entry in answer.json()["data"]]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    missing = await post(served, "/v1/embeddings", {"input": [IDS], "model": "base:second"})
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


NO_NAMES = [
    "base:second",
    "first ",
    " first",
    "fir st",
    "first\n",
    "fir\u200bst",
    "\u202efirst",
    "fir\u00a0st",
    "a\0b",
    "x" * 257,
]


async def test_a_name_that_looks_like_another_is_refused_at_every_door(session: Any, folders: list[Path]) -> None:
    served = app(session, name="base", adapter_loading=True)
    for name in [*NO_NAMES, "\ud800", "", 7]:
        for path in ("load", "unload"):
            body = {"lora_name": name, "lora_path": str(folders[1])}
            answer = await post(served, f"/v1/{path}_lora_adapter", body)
            assert answer.status == 400 and answer.error["param"] == (None if name == "\ud800" else "lora_name"), (
                name,
                answer.body,
            )
        with pytest.raises(rekindle.ConfigError, match="adapter"):
            await session.load_adapter(name, folders[1])
        with pytest.raises(rekindle.ConfigError, match="adapters"):
            rekindle.open_sync(MODEL, adapters={name: folders[1]}, **OPTIONS)
    for name in NO_NAMES[1:]:
        with pytest.raises(rekindle.ConfigError, match="name="):
            app(session, name=name)
        with pytest.raises(rekindle.ConfigError, match="sessions="):
            app({name: session})
    assert session.adapters == ("first",)
    # The names of models may have colons, and the last one is that before the name of an adapter.
    served = app({"qwen3:0.6b": session, "qwen3": session})
    expected = adapters.plain(MODEL, folders[0], IDS, 4)
    for name in ("qwen3:0.6b:first", "qwen3:first", "first"):
        assert await tokens(served, name) == expected
    assert await tokens(served, "qwen3:0.6b") == list(plain(IDS, 4))
    for name in ("qwen3:0.6b:", ":first", "0.6b:first", "qwen3:0.6b:first:first"):
        assert (await post(served, "/v1/completions", {"prompt": IDS, "model": name})).status == 404


@pytest.mark.usefixtures("short_turns")
async def test_a_path_that_can_not_be_one_is_the_clients_error(session: Any, folders: list[Path]) -> None:
    served = app(session, name="base", adapter_loading=True)
    paths = [
        "~nosuchuser",
        "~nosuchuser/x",
        "x" * 4096,
        "/" * 5000,
        "x" * 256,
        "a\nb",
        "a\0b",
        "\u202etxt",
        "\ud800",
        "",
        7,
    ]
    for path in [*paths, str(folders[0]) + "/adapter_config.json", "/nowhere", "/nowhere.gguf", "/dev/zero"]:
        answer = await post(served, "/v1/load_lora_adapter", {"lora_name": "second", "lora_path": path})
        assert answer.status == 400, (path, answer.body)
        assert "cache" not in answer.error["message"] and len(answer.error["message"]) < 600
        assert path not in paths or answer.error["param"] == (None if path == "\ud800" else "lora_path")
        if isinstance(path, str):
            with pytest.raises((rekindle.ConfigError, rekindle.CheckpointError)):
                await session.load_adapter("second", path)
    large = await post(
        served, "/v1/load_lora_adapter", {"lora_name": "second", "lora_path": str(_large(folders[0].parent))}
    )
    assert (large.status, large.error["param"]) == (400, "lora_name") and "max_adapter_rank" in large.error["message"]


async def test_no_adapter_is_loaded_under_the_name_of_a_model(session: Any, folders: list[Path]) -> None:
    """A request with its name would get the model without it, and nobody would notice."""
    served = app({"base": session, "qwen3:0.6b": session}, adapter_loading=True)
    for name, lora_name in (("base", "base"), ("qwen3:0.6b", "base")):
        body = {"model": name, "lora_name": lora_name, "lora_path": str(folders[1])}
        answer = await post(served, "/v1/load_lora_adapter", body)
        assert (answer.status, answer.error["param"]) == (400, "lora_name")
        assert "is the name of a model here. Choose another name for the adapter" in answer.error["message"]
    assert session.adapters == ("first",)


def _large(root: Path) -> Path:
    """An adapter of a higher rank than the session has room for."""
    return adapters.write(root / "large", MODEL.config, rank=80, targets=("down_proj",))


async def test_metrics_name_the_adapters_of_requests(session: Any) -> None:
    pytest.importorskip("prometheus_client", reason="metrics are a part of the extra `serve`")
    served = app(session, name="base", metrics_names="both")

    async def info() -> str:
        lines = (await get(served, "/metrics")).body.decode().splitlines()
        (line,) = [line for line in lines if line.startswith("vllm:lora_requests_info{")]
        return line.partition(" ")[0]

    label = 'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{}",waiting_lora_adapters="{}"}}'
    idle = label.format("", "")
    assert await info() == idle

    async def embed(served: Any, model: str) -> None:  # of as many tokens as two steps compute
        answer = await post(served, "/v1/embeddings", {"input": [prompt(3, 50)], "model": model})
        assert answer.status == 200, answer.body

    for ask, models in ((tokens, ("first", "base")), (embed, ("first",))):
        async with session.paused(), anyio.create_task_group() as group:  # requests wait there, and steps are ours
            for model in models:  # they end in one step
                group.start_soon(ask, served, model)
            with anyio.fail_after(60):
                while (line := await info()) == idle:  # noqa: ASYNC110  no event says it
                    await anyio.sleep(0.001)
                assert line == label.format("", "first")
                while (line := await info()) != label.format("first", ""):
                    assert line in (idle, label.format("", "first"))
                    await session.step()
                while await info() != idle:
                    await session.step()


async def test_requests_load_adapters_only_where_that_was_allowed(session: Any, folders: list[Path]) -> None:
    body = {"lora_name": "second", "lora_path": str(folders[1])}
    assert (await post(app(session), "/v1/load_lora_adapter", body)).status in (404, 405)
    served = app(session, name="base", adapter_loading=True)
    assert (await post(served, "/v1/load_lora_adapter", body)).status == 200
    assert await tokens(served, "second") == adapters.plain(MODEL, folders[1], IDS, 4)
    again = await post(served, "/v1/load_lora_adapter", body)
    assert again.status == 400 and "load_inplace" in again.error["message"]
    body["lora_path"] = str(folders[0])
    assert (await post(served, "/v1/load_lora_adapter", {**body, "load_inplace": True})).status == 200
    assert await tokens(served, "second") == adapters.plain(MODEL, folders[0], IDS, 4)
    bad = await post(served, "/v1/load_lora_adapter", {**body, "lora_path": "/nowhere", "load_inplace": True})
    assert bad.status == 400 and "neither a folder" in bad.error["message"]
    assert (await post(served, "/v1/unload_lora_adapter", {"lora_name": "second"})).status == 200
    assert (await post(served, "/v1/unload_lora_adapter", {"lora_name": "second"})).status == 404


@pytest.mark.thorough
async def test_a_storm_of_loads_and_unloads_changes_no_answer(session: Any, folders: list[Path]) -> None:
    """Names come, go and mean another folder while requests name them; the adapter that nobody touches stays exact."""
    served = app(session, name="base", adapter_loading=True, api_key=["one", "two"])
    draw = random.Random(7)
    texts = [adapters.plain(MODEL, folder, IDS, 4) for folder in folders]
    statuses = Counter[tuple[str, int]]()

    async def call(path: str, body: dict[str, Any]) -> Any:
        headers = {"authorization": f"Bearer {draw.choice(('one', 'two'))}"}
        answer = await post(served, path, body, headers=headers)
        statuses[path.rpartition("/")[2], answer.status] += 1
        assert answer.status in (200, 400, 404), answer.body
        return answer

    async def change() -> None:
        for _ in range(20):
            name, folder = draw.choice(("second", "third")), str(draw.choice(folders))
            if draw.random() < 0.6:
                inplace = draw.random() < 0.7
                await call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder, "load_inplace": inplace})
            else:
                await call("/v1/unload_lora_adapter", {"lora_name": name})

    async def ask(names: tuple[str, ...], possible: list[list[int]]) -> None:
        body = {"prompt": IDS, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for _ in range(15):
            answer = await call("/v1/completions", {**body, "model": draw.choice(names)})
            if answer.status == 200:
                assert answer.json()["choices"][0]["token_ids"] in possible
            else:
                assert names != ("first",), answer.body

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(change)
            group.start_soon(ask, ("second", "base:third", "third"), texts)
        group.start_soon(ask, ("first",), texts[:1])
    assert {("completions", 200), ("load_lora_adapter", 200), ("unload_lora_adapter", 200)} <= set(statuses), statuses
    for name in ("second", "third"):
        await call("/v1/unload_lora_adapter", {"lora_name": name})
    assert session.adapters == ("first",)
    session.check_integrity()
