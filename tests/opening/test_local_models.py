"""`rekindle.local_models()`: family, size, precision, and why a model isn't opened, by headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rekindle
from helpers import checkpoints, gguf_files, tool_homes
from rekindle._src.models.loading import checkpoint, fingerprint, prepared
from rekindle._src.models.loading.gguf import header as gguf

CASE = checkpoints.CASES["qwen3"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tool_homes.empty(tmp_path / "home", monkeypatch)


@pytest.fixture
def filled(home: Path, tmp_path: Path) -> Path:
    folder = checkpoints.write(tmp_path / "hf", CASE, dtype="bfloat16")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    store = home / ".ollama" / "models"
    model = gguf_files.convert(folder, tmp_path / "m.gguf", "f16").read_bytes()
    tool_homes.ollama(store, "library/qwen3/0.6b", tool_homes.manifest(store, model=model))
    tool_homes.ollama(store, "library/cloud/latest", {"layers": []})
    hub = home / ".cache" / "huggingface" / "hub"
    tool_homes.hub(hub, "owner/name", files)
    config = json.dumps({**json.loads(files["config.json"]), "model_type": "another"}).encode()
    tool_homes.hub(hub, "owner/another", {**files, "config.json": config})
    cut = files["model.safetensors"][:-9]
    tool_homes.hub(hub, "owner/cut", {**files, "model.safetensors": cut})
    awq = {**json.loads(files["config.json"]), "quantization_config": {"quant_method": "awq", "bits": 4}}
    tool_homes.hub(hub, "owner/awq", {**files, "config.json": json.dumps(awq).encode()})
    return home


def test_what_is_on_the_machine(filled: Path) -> None:
    models = rekindle.local_models()
    assert models.names == [
        "hub:owner/another", "hub:owner/awq", "hub:owner/cut", "hub:owner/name", "ollama:cloud:latest",
        "ollama:qwen3:0.6b", "tiny", "tiny-vision",
    ]  # fmt: skip
    whole = models["hub:owner/name"]
    assert (whole.family, whole.precision, whole.opens) == ("qwen3", "bfloat16", True)
    assert whole.size == (whole.path / "model.safetensors").stat().st_size
    assert (models["ollama:qwen3:0.6b"].precision, models["ollama:qwen3:0.6b"].opens) == ("float16", True)
    assert models["hub:owner/another"].family == "another"
    problem = models["hub:owner/another"].problem
    assert problem == "model_type='another' (architecture Qwen3ForCausalLM) is not implemented"
    assert models["hub:owner/cut"].problem.startswith("model.safetensors is truncated or corrupt: its tensors need")
    assert models["hub:owner/awq"].precision == "awq, 4 bits"
    assert "no weights" in models["ollama:cloud:latest"].problem
    assert (models["tiny"].family, models["tiny"].opens) == ("llama", True)


def test_headers_alone_are_read_and_each_once(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """349 models took 28 s, for fingerprints, vocabularies and samples of the weights."""
    read = list[str]()
    texts = gguf.Cursor.texts

    def passed(cursor: gguf.Cursor) -> gguf.Texts:
        assert cursor.outline
        return texts(cursor)

    monkeypatch.setattr(gguf.Cursor, "texts", passed)
    monkeypatch.setattr(gguf.Cursor, "digest", lambda cursor: pytest.fail("nobody needs a digest"))
    monkeypatch.setattr(fingerprint, "folder_fingerprint", lambda *_: pytest.fail("nobody needs a fingerprint"))
    begin = gguf._begin
    monkeypatch.setattr(gguf, "_begin", lambda cursor: (read.append(cursor.path.name), begin(cursor))[1])
    models = rekindle.local_models()
    assert len(read) == len(set(read)) > 0
    assert models["ollama:qwen3:0.6b"].opens and models["hub:owner/name"].opens


@pytest.mark.thorough
@pytest.mark.usefixtures("short_turns")
def test_hundreds_of_models_keep_no_neighbour_waiting(home: Path, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "hf", CASE)
    file = gguf_files.convert(folder, tmp_path / "m.gguf", "f16").read_bytes()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    store = home / ".ollama" / "models"
    for number in range(175):
        tool_homes.hub(home / ".cache" / "huggingface" / "hub", f"owner/{number}", files)
        named = tool_homes.manifest(store, model=file, license=str(number).encode())
        tool_homes.ollama(store, f"library/qwen3/{number}", named)
    models = rekindle.local_models()
    assert len(models) == 352 and all(model.opens for model in models)


@pytest.mark.thorough
def test_every_listed_model_that_opens_is_opened_by_its_name(filled: Path) -> None:
    for model in rekindle.local_models():
        if model.opens and model.name not in ("tiny", "tiny-vision", "hub:owner/awq"):
            assert checkpoint.describe(model.name).graph.config.model_type == "qwen3"


def test_a_table_and_a_mapping(filled: Path) -> None:
    models = rekindle.local_models()
    assert [model.name for model in models[-2:]] == ["tiny", "tiny-vision"]
    assert [model.name for model in models[:1]] == ["hub:owner/another"]
    assert repr(models) == "<LocalModels: 8 models, 5 of them open>"
    assert models._ipython_key_completions_() == models.names
    page = models._repr_html_()
    assert "hub:owner/name" in page
    assert "bfloat16" in page
    with pytest.raises(KeyError, match="'qwen3' is not on this machine"):
        models["qwen3"]


def test_texts_of_strangers_are_escaped_and_short(home: Path, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "hf", CASE)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    config = {**CASE, "model_type": "<script>\x1b[31m" + "x" * 10_000}
    name = "owner/<b>"
    tool_homes.hub(home / ".cache/huggingface/hub", name, {**files, "config.json": json.dumps(config).encode()})
    models = rekindle.local_models()
    (model,) = [model for model in models if model.store == "hub"]
    assert len(model.family) <= 60
    assert len(model.problem) <= 200
    assert "\x1b" not in model.family + model.problem
    assert "<script>" not in models._repr_html_() + model._repr_html_()
    assert "<b>" not in models._repr_html_()


def test_kept_weights_are_listed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    folder, cache = checkpoints.write(tmp_path / "hf", CASE), tmp_path / "cache"
    checkpoint.load(folder, cache_dir=cache, quantize="int8")
    assert prepared.wait(60)
    kept = [
        model
        for model in rekindle.local_models(cache)
        if model.store == "rekindle" and not model.name.startswith("tiny")
    ]
    assert [(model.name, model.family, model.precision) for model in kept] == [("hf", "qwen3", "int8")]
    assert "were made of" in kept[0].problem
    assert kept[0].size > 0


def test_kept_weights_are_named_as_their_store_names_the_model(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    file, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    rekindle.models.export("tiny", file, type="q4_0")
    tool_homes.lm_studio(home / ".lmstudio" / "models", "owner/tiny", {"a.gguf": file.read_bytes()})
    checkpoint.load("lmstudio:owner/tiny", cache_dir=cache)
    assert prepared.wait(60)
    (kept,) = (model for model in rekindle.local_models(cache) if model.path.parent == cache / "weights")
    assert (kept.name, kept.opens, kept.precision) == ("lmstudio:owner/tiny", True, "int4-32")


def test_a_model_of_ollama_says_what_it_says_elsewhere(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    rekindle.models.export("tiny", file)
    store = home / ".ollama" / "models"
    tool_homes.ollama(store, "library/tiny/latest", tool_homes.manifest(store, model=file.read_bytes()))
    options = {"max_requests": 1, "max_tokens_per_step": 32, "max_model_len": 64, "device_pages": 8, "page_size": 8}
    texts = []
    for model in ("ollama:tiny", "tiny"):
        with rekindle.open_sync(model, precompile="lazy", disk_memory=0, **options) as session:
            assert session.model == model
            texts.append(session.generate_sync("Once upon a time", max_tokens=12).text)
    assert texts[0] == texts[1] != ""
