"""generation_config.json is the default of requests where it asks for sampling, and never more than that."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers.sessions import fake_session
from helpers.small import TINY
from rekindle import Sampling, tiny
from rekindle._src.core.sampling import ANSWER_TOKENS
from rekindle._src.models.loading.gguf.export import write_gguf
from rekindle._src.text.generation_config import CHAT, Defaults, checkpoint_sampling, defaults_of, describe
from rekindle._src.text.gguf.writing import sampling_metadata

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")


def written(folder: Path, record: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, Sampling(temperature=0.6, top_p=0.9)),
        ({"do_sample": True}, Sampling(temperature=1.0)),
        (
            {"do_sample": True, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "temperature": None},
            Sampling(temperature=1.0, top_k=20, min_p=0.05, repetition_penalty=1.05),
        ),
        ({"do_sample": True, "max_new_tokens": 7, "max_length": 20, "eos_token_id": [1]}, Sampling(temperature=1.0)),
        ({"do_sample": False, "temperature": 0.6}, None),
        ({"temperature": 0.6}, None),
        ({"do_sample": "yes", "temperature": 0.6}, None),
        ({}, None),
    ],
)
def test_what_a_file_asks_for(tmp_path: Path, record: Any, expected: Sampling | None) -> None:
    assert checkpoint_sampling(written(tmp_path, record)) == expected


def test_a_folder_without_one(tmp_path: Path) -> None:
    assert checkpoint_sampling(tmp_path) is None
    assert checkpoint_sampling(tiny.folder()) is None


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": "many"}])
def test_values_that_mean_nothing_are_told_and_left_alone(
    tmp_path: Path, wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert checkpoint_sampling(written(tmp_path, {"do_sample": True, **wrong})) is None
    assert "generation_config.json is left alone" in caplog.text


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, Defaults(None, CHAT)),
        ({"max_new_tokens": 7, "eos_token_id": [1]}, Defaults(None, CHAT)),
        ({"temperature": 0.6, "top_p": 0.9}, Defaults(None, replace(CHAT, temperature=0.6, top_p=0.9))),
        ({"repetition_penalty": 1.1}, Defaults(None, replace(CHAT, repetition_penalty=1.1))),
        ({"temperature": "warm"}, Defaults(None, CHAT)),
        ({"temperature": 0}, Defaults()),
        ({"do_sample": False}, Defaults()),
        ({"do_sample": False, "temperature": 0.6}, Defaults()),
        ({"do_sample": True, "top_k": 7}, Defaults(*[Sampling(temperature=1.0, top_k=7)] * 2)),
        ({"do_sample": True, "top_k": "many"}, Defaults()),
    ],
)
def test_chats_are_drawn_unless_the_file_says_how_it_is_to_be_used(
    tmp_path: Path, record: Any, expected: Defaults
) -> None:
    assert defaults_of(written(tmp_path, record)) == expected


def test_chats_are_drawn_without_a_file_and_greedy_by_tiny(tmp_path: Path) -> None:
    assert defaults_of(tmp_path) == Defaults(None, CHAT) and not CHAT.greedy
    assert defaults_of(tiny.folder()) == defaults_of(None) == Defaults()


def test_a_session_draws_its_chats_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder(), folder)
    (folder / "generation_config.json").unlink()
    options: dict[str, Any] = TINY
    said = [{"role": "user", "content": "Hello"}]
    with rekindle.open_sync(folder, **options) as session:
        assert session.sampling == session.generate("x").sampling == Sampling()
        assert session.chat_sampling == CHAT and "temperature 0.8" in session._repr_html_().partition("chats with")[2]
        assert session.chat(said, max_tokens=9).sampling == replace(CHAT, max_tokens=9)
        assert session.chat(said, temperature=0, max_tokens=9).sampling.greedy
        assert session.chat(said, Sampling(max_tokens=9)).sampling == Sampling(max_tokens=9)
        done = session.chat(said, max_tokens=8).result_sync()
        again = session.chat(said, max_tokens=8, seed=done.seed).result_sync()
        assert done.seed is not None and again.token_ids == done.token_ids
        others = {session.chat(said, max_tokens=8, seed=seed).result_sync().token_ids for seed in range(4)}
        assert len(others) > 1, "nothing was drawn"
        greedy = {session.chat(said, max_tokens=8, seed=seed, temperature=0).result_sync().text for seed in range(2)}
        assert len(greedy) == 1
        rows = session.map_sync([{"text": "Hello"}] * 2, "{text}", chat=True, max_tokens=4)
        assert len({row.text for row in rows}) == 1, "rows are greedy"
    with rekindle.open_sync(folder, generation_config="greedy", **options) as session:
        assert session.chat_sampling == Sampling() and session.chat(said).sampling.greedy


def test_a_server_draws_as_the_apis_say_and_not_as_a_chat_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's and Anthropic's specifications have temperature 1 and top_p 1 where a request names none."""
    generation = pytest.importorskip("rekindle._src.serve.generation", reason="the server is the extra `serve`")
    with fake_session() as session:
        monkeypatch.setattr(session, "_front", session._front._replace(chat_sampling=CHAT))
        options = generation.sampling_options({}, session)
        assert Sampling.of(session.chat_sampling, options) == Sampling(temperature=1.0)
        options = generation.sampling_options({"temperature": 0.3, "top_p": 0.5}, session)
        assert Sampling.of(session.chat_sampling, options) == Sampling(temperature=0.3, top_p=0.5)


def test_a_session_uses_it_says_it_once_and_turns_it_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder(), folder)
    written(folder, {"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": [2, 0]})
    options: dict[str, Any] = {**TINY, "quiet": False, "cache_dir": str(tmp_path / "cache")}
    with (
        caplog.at_level(logging.INFO, "rekindle.engine"),
        rekindle.open_sync(folder, **options) as session,
    ):
        wanted = Sampling(temperature=0.7, top_k=20)
        assert session.sampling == wanted
        assert "samples with temperature 0.7, top_k 20" in repr(session)
        assert "temperature 0.7, top_k 20" in session._repr_html_()
        assert [record.getMessage().count("temperature 0.7") for record in caplog.records].count(1) == 1
        assert session.generate("x").sampling == wanted
        assert session.stream("x", temperature=None).sampling == wanted
        assert session.generate("x", temperature=0).sampling == Sampling(top_k=20)
        assert session.generate("x", max_tokens=3).sampling == Sampling(temperature=0.7, top_k=20, max_tokens=3)
        chat = session.chat([{"role": "user", "content": "x"}])
        assert chat.sampling == replace(wanted, max_tokens=ANSWER_TOKENS)
        assert session.generate("x", Sampling(), seed=1).sampling == Sampling(seed=1)
        done = session.generate_sync("Once", max_tokens=4, seed=3)
        forked = session.fork(done, at=2)
        assert (forked.sampling.temperature, forked.sampling.top_k) == (0.7, 20)
        assert forked.result_sync().token_ids == done.token_ids[2:]
    with rekindle.open_sync(folder, generation_config="greedy", **options) as session:
        assert session.sampling == session.generate("x").sampling == Sampling()
        assert "samples" not in repr(session)


def test_words() -> None:
    assert describe(Sampling(temperature=0.6, top_p=0.9)) == "temperature 0.6, top_p 0.9"


def test_samplers_of_a_gguf_file_are_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    fields = {
        "temp": 0.75, "xtc_probability": 0.5, "xtc_threshold": 0.25, "mirostat": 0, "mirostat_tau": 4.0,
        "sequence": "penalties;top_k;typ_p;temperature", "top_k": 9,
    }  # fmt: skip
    write_gguf(
        path, {"general.architecture": "llama"} | {f"general.sampling.{k}": v for k, v in fields.items()}, [], []
    )
    expected = Sampling(
        temperature=0.75, xtc_probability=0.5, xtc_threshold=0.25, mirostat_tau=4.0, top_k=9,
        samplers=["penalties", "top_k", "typical_p", "temperature"],
    )  # fmt: skip
    found = checkpoint_sampling(path)
    assert found == expected and found is not None
    assert "samplers penalties;top_k;typical_p;temperature" in describe(found)
    again = tmp_path / "b.gguf"
    write_gguf(again, {"general.architecture": "llama"} | sampling_metadata(found), [], [])
    assert checkpoint_sampling(again) == found


@pytest.mark.parametrize(
    ("key", "value"),
    [("sequence", "top_k;infill"), ("sequence", "top_k;penalties"), ("mirostat", 1), ("xtc_probability", 2.0)],
)
def test_a_sampler_that_is_not_known_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, value: Any
) -> None:
    fields = {"temp": 0.75, "top_k": 9, "mirostat_tau": 4.0, key: value}
    path = tmp_path / "a.gguf"
    write_gguf(
        path, {"general.architecture": "llama"} | {f"general.sampling.{k}": v for k, v in fields.items()}, [], []
    )
    expected = Sampling(temperature=0.75, top_k=9, mirostat_tau=4.0)
    assert defaults_of(path) == Defaults(expected, expected)
    assert (
        caplog.text.count("a default of sampling is left out") == 1
        and key.replace("sequence", "samplers") in caplog.text
    )


def test_a_sampler_that_is_not_known_is_logged_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, {"general.architecture": "llama", "general.sampling.sequence": "top_k;infill"}, [], [])
    assert checkpoint_sampling(path) is None
    assert "infill" in caplog.text
