"""`rekindle ls`, `pull` and `rm`: models of other tools are listed and opened, those of the Hub are fetched once, and
only what rekindle has made is removed."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import checkpoints, gguf_files, tool_homes
from rekindle._src.cli.main import main
from rekindle._src.core.atomic_checkpoint import ITEM
from rekindle._src.models.base import abstract_model
from rekindle._src.models.loading import known_models, stored
from rekindle._src.models.registry import config_from_hf
from rekindle_kernels.private_files import TAG, TAG_TEXT

CASE = checkpoints.CASES["qwen3"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tool_homes.empty(tmp_path / "home", monkeypatch)
    folder = checkpoints.write(tmp_path / "hf", CASE)
    store = home / ".ollama" / "models"
    model = gguf_files.convert(folder, tmp_path / "m.gguf").read_bytes()
    tool_homes.ollama(store, "library/qwen3/0.6b", tool_homes.manifest(store, model=model))
    tool_homes.ollama(store, "library/cloud/latest", {"layers": []})
    tool_homes.hub(
        home / ".cache" / "huggingface" / "hub", "owner/name", {p.name: p.read_bytes() for p in folder.iterdir()}
    )
    return home


def test_ls(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [
        "hub:owner/name", "ollama:cloud:latest", "ollama:qwen3:0.6b", "tiny", "tiny-vision",
    ]  # fmt: skip
    assert lines[0].split()[1:] == ["qwen3", *lines[0].split()[2:4], "float32", "opens"]
    assert "has no weights on this machine" in lines[1]
    assert lines[-1].startswith("(5 models, 1 of them refused")
    assert main(["ls", "ollama:", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    assert [(model["name"], model["opens"]) for model in models] == [
        ("ollama:cloud:latest", False),
        ("ollama:qwen3:0.6b", True),
    ]
    assert main(["ls", "--names"]) == 0
    assert capsys.readouterr().out.split() == ["hub:owner/name", "ollama:qwen3:0.6b", "tiny", "tiny-vision"]


def test_a_model_of_ollama_answers(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "x", "--model", "ollama:qwen3:0.6"])
    assert "Did you mean 'ollama:qwen3:0.6b'?" in capsys.readouterr().err


def test_rm_removes_what_rekindle_made_and_nothing_else(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    for name, model in (("a", "ollama:qwen3:0.6b"), ("b", "owner/name")):
        meta = cache / "programs" / name / ITEM / "meta.json"
        meta.parent.mkdir(parents=True)
        meta.write_text(json.dumps({"model": model}))
    (cache / TAG).write_text(TAG_TEXT)
    before = sorted(home.rglob("*"))
    assert main(["rm", "ollama:qwen3:0.6b", "--yes", "--cache-dir", str(cache)]) == 0
    shown = capsys.readouterr()
    assert "dropped 1 entries" in shown.out
    assert "rekindle leaves alone. Remove it with `ollama rm qwen3:0.6b`" in shown.err
    assert main(["rm", "hub:owner/name", "--yes", "--cache-dir", str(cache)]) == 0
    assert "`hf cache rm model/owner/name`" in capsys.readouterr().err
    assert main(["rm", "owner/name", "--yes", "--cache-dir", str(cache)]) == 1, "there is nothing of ours any more"
    assert "`hf cache rm model/owner/name`" in capsys.readouterr().err
    assert sorted(home.rglob("*")) == before
    assert main(["rm", "nothing", "--yes", "--cache-dir", str(cache)]) == 1
    assert "NAME='nothing': has nothing here" in capsys.readouterr().err


def test_rm_by_any_name_of_a_model(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file can have several names in Ollama's store; what is kept of it has the first of them."""
    store, cache = home / ".ollama" / "models", tmp_path / "cache"
    model = gguf_files.convert(tmp_path / "hf", tmp_path / "m.gguf").read_bytes()
    tool_homes.ollama(store, "library/a-copy/latest", tool_homes.manifest(store, model=model))
    meta = cache / "programs" / "a" / ITEM / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"model": "ollama:a-copy:latest"}))
    (cache / TAG).write_text(TAG_TEXT)
    assert main(["rm", "ollama:qwen3:0.6b", "--yes", "--cache-dir", str(cache)]) == 0
    assert "dropped 1 entries" in capsys.readouterr().out


def test_a_name_of_kept_weights_is_no_model_and_says_what_is(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ls` said to pass the file, and `chat --model` with the name that `ls` shows to pass a name that `ls` lists."""
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))
    graph, leaves = abstract_model(config_from_hf(stored.look(tmp_path / "hf").raw))
    name = "Kept-135M.Q4_1.gguf"
    description = tmp_path / "cache" / "weights" / "a" / ITEM / "model.json"
    description.parent.mkdir(parents=True)
    leaf_types = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
    description.write_bytes(known_models.encode(graph, leaf_types, "float32", name))
    assert main(["ls", name]) == 0
    said = capsys.readouterr().out
    assert "pass the file or folder that these weights were made of" in said
    assert "(1 model, 0 of them refused, 1 opened by path;" in said, "it was opened, so it is not refused"
    with pytest.raises(SystemExit):
        main(["chat", "--model", name])
    said = capsys.readouterr().err
    assert f"{name} does not exist" in said and "rekindle ls" not in said
    assert "Pass the file or folder that these weights were made of" in said
    with pytest.raises(SystemExit):
        main(["chat", "--model", "Other.gguf"])
    assert "a name that `rekindle ls` says opens" in capsys.readouterr().err


def test_pull_takes_hub_ids(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, words in (("ollama:llama3", "its own tool fills"), ("tiny", "is on this machine"), (str(home), "is on")):
        with pytest.raises(SystemExit):
            main(["pull", model])
        assert words in capsys.readouterr().err


class HubServer(http.server.ThreadingHTTPServer):
    """A hub on loopback with one repository. It may cut the connection within a file."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.cut, self.sent = files, "", list[str]()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        commit, path = tool_homes.COMMIT, self.path.partition("?")[0]
        if path.startswith("/api/models/owner/name"):
            names = [{"rfilename": name, "type": "file", "path": name, "size": len(self.server.files[name]),
                      "oid": "0" * 40} for name in self.server.files]  # fmt: skip
            found: Any = names if "/tree/" in path else {"id": "owner/name", "sha": commit, "siblings": names}
            return self._send(json.dumps(found).encode(), "application/json", body=body)
        name = path.rpartition("/")[2]
        if name not in self.server.files or "/resolve/" not in path:
            return self.send_error(404)
        content = self.server.files[name]
        if body:
            self.server.sent.append(name)
        if body and name == self.server.cut:
            self._send(content[: len(content) // 2], "application/octet-stream", body=True, length=len(content))
            self.close_connection = True
            return None
        return self._send(content, "application/octet-stream", body=body)

    def _send(self, content: bytes, kind: str, *, body: bool, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", tool_homes.COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    folder = checkpoints.write(tmp_path / "of the hub", CASE, shards=2)
    server = HubServer({path.name: path.read_bytes() for path in folder.iterdir()})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.thorough
def test_pull_goes_on_where_it_was_cut(home: Path, server: HubServer) -> None:
    pytest.importorskip("huggingface_hub")
    url = f"http://127.0.0.1:{server.server_address[1]}"
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home / "fresh"), "HF_HUB_DISABLE_XET": "1"}

    def pull() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rekindle", "pull", "owner/name"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    last = sorted(name for name in server.files if name.endswith(".safetensors"))[-1]
    server.cut = last
    first = pull()
    assert first.returncode == 1, first.stderr
    assert "could not be downloaded" in first.stderr
    server.cut = ""
    whole = set(server.sent) - {last}
    server.sent.clear()
    second = pull()
    assert second.returncode == 0, second.stderr
    assert last in server.sent
    assert not whole & set(server.sent), "what was there is not sent again"
    folder, line = second.stdout.splitlines()
    assert Path(folder).is_relative_to(home / "fresh")
    assert line.split()[0] == "owner/name"
    assert line.split()[-1] == "opens"
    server.sent.clear()
    assert pull().returncode == 0
    assert server.sent == []
