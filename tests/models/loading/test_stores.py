"""Models in homes made as other tools make them: they are listed, opened by name, and never believed too much."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from helpers import checkpoints, gguf_files, tool_homes
from rekindle._src.models.loading import hub, stored
from rekindle._src.models.loading.stores import known, model_store, ollama
from rekindle.errors import CheckpointError

CASE = checkpoints.CASES["qwen3"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("made")
    return gguf_files.convert(checkpoints.write(folder / "hf", CASE), folder / "model.gguf").read_bytes()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tool_homes.empty(tmp_path / "home", monkeypatch)


def names() -> list[str]:
    return known.names()


def where(model: str) -> Path:
    place = hub.on_disk(model)
    assert place is not None
    return place.path


def test_an_empty_machine(home: Path) -> None:
    assert names() == []
    with pytest.raises(CheckpointError, match=r"no 'qwen3' in Ollama's store .*It is empty\. `rekindle ls`"):
        hub.on_disk("ollama:qwen3")


def test_ollama(home: Path, gguf: bytes) -> None:
    store = home / ".ollama" / "models"
    tool_homes.ollama(store, "library/qwen3/0.6b", tool_homes.manifest(store, model=gguf, template=b"{{ .Prompt }}"))
    tool_homes.ollama(store, "library/qwen3/latest", tool_homes.manifest(store, model=gguf))
    tool_homes.ollama(store, "me/mine/v1", tool_homes.manifest(store, model=gguf, license=b"MIT"))
    tool_homes.ollama(store, "hf.co/owner/Name-GGUF/Q8_0", tool_homes.manifest(store, model=gguf))
    assert names() == [
        "ollama:hf.co/owner/Name-GGUF:Q8_0", "ollama:me/mine:v1", "ollama:qwen3:0.6b", "ollama:qwen3:latest",
    ]  # fmt: skip
    blob = where("ollama:qwen3:0.6b")
    assert blob.parent == store / "blobs"
    assert stored.look("ollama:qwen3:0.6b").raw["model_type"] == "qwen3"
    for same in ("qwen3", "QWEN3:latest", "library/qwen3", "registry.ollama.ai/library/qwen3"):
        assert where(f"ollama:{same}") == blob
    assert hub.readable_name(blob).startswith("ollama:"), "kept weights have a name that people know"
    assert known.names_at(blob) == names(), "one file, four names"
    with pytest.raises(CheckpointError, match=r"Did you mean 'ollama:qwen3:0\.6b'"):
        where("ollama:qwen3:0.6")
    with pytest.raises(CheckpointError, match=r"It has .*qwen3:0\.6b"):
        where("ollama:gemma")


def test_ollama_links_manifests_to_blobs(home: Path, gguf: bytes) -> None:
    store = home / ".ollama" / "models"
    tool_homes.ollama(store, "library/qwen3/0.6b", tool_homes.manifest(store, tensor=b"x"))  # the older one
    child = json.dumps({**tool_homes.manifest(store, model=gguf), "runner": "ollama", "format": "gguf"}).encode()
    several = [
        {"runner": "mlx", "format": "safetensors", "layers": [{"mediaType": tool_homes.KIND + "tensor"}]},
        {"runner": "ollama", "format": "gguf", "digest": tool_homes.blob(store, child)["digest"]},
    ]
    lists = {"schemaVersion": 2, "mediaType": "application/vnd.ollama.manifest.list.v2+json", "manifests": several}
    tool_homes.ollama(store, "library/qwen3/0.6b", lists, newer=True)
    assert names() == ["ollama:qwen3:0.6b"]
    assert where("ollama:qwen3:0.6b").read_bytes() == gguf


def test_ollama_where_its_variable_says(
    home: Path, tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool_homes.ollama(tmp_path / "o", "library/qwen3/0.6b", tool_homes.manifest(tmp_path / "o", model=gguf))
    assert names() == []
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "o"))
    assert names() == ["ollama:qwen3:0.6b"]


def of_digest(digest: object) -> bytes:
    return json.dumps({"layers": [{"mediaType": tool_homes.KIND + "model", "digest": digest}]}).encode()


REFUSED: dict[str, tuple[Any, str]] = {
    "a model in the cloud": ({}, "has no weights on this machine"),
    "tensor by tensor": ({"tensor": b"x"}, "not in GGUF"),
    "an adapter": ({"model": b"GGUF", "adapter": b"GGUF"}, "only Ollama puts together"),
    "no JSON": (b"{", "has a manifest that can't be used"),
    "a list": (b"[]", "has a manifest that can't be used"),
    "deep": (b"[" * 100_000, "has a manifest that can't be used"),
    "a large one": (b" " * (ollama.MAX_MANIFEST + 1), "at most"),
    "a path": (of_digest("../../../x"), "no digest"),
    "a number": (of_digest(7), "no digest"),
    "not there": (of_digest("sha256:" + "a" * 64), "ollama pull odd:1"),
    "odd layers": (b'{"layers": {"a": 1}}', "has no weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_ollama_has_and_nobody_else_opens(home: Path, case: str) -> None:
    content, words = REFUSED[case]
    store = home / ".ollama" / "models"
    tool_homes.ollama(
        store, "library/odd/1", content if isinstance(content, bytes) else tool_homes.manifest(store, **content)
    )
    assert names() == []
    with pytest.raises(CheckpointError, match=words):
        where("ollama:odd:1")


def test_the_hub(home: Path, gguf: bytes, tmp_path: Path) -> None:
    cache = home / ".cache" / "huggingface" / "hub"
    folder = checkpoints.write(tmp_path / "hf", CASE)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    whole = tool_homes.hub(cache, "owner/name", files)
    os.utime(whole, (1, 1))
    tool_homes.hub(cache, "owner/name", {**files, "old.txt": b""}, commit="f" * 40)
    (cache / "models--owner--name" / "refs" / "main").write_text(tool_homes.COMMIT)
    tool_homes.hub(cache, "owner/one-GGUF", {"m-Q8_0.gguf": gguf, "mmproj-m.gguf": b"x"})
    tool_homes.hub(cache, "owner/two-GGUF", {"Q4/m-Q4.gguf": gguf, "m-Q8.gguf": gguf + b" "})
    tool_homes.hub(cache, "gpt2", files)
    tool_homes.hub(cache, "owner/vocabulary", {"tokenizer.json": b"{}"})
    (cache / "datasets--owner--data").mkdir()
    assert names() == [
        "hub:gpt2", "hub:owner/name", "hub:owner/one-GGUF", "hub:owner/two-GGUF/m-Q8.gguf",
        "hub:owner/two-GGUF/Q4/m-Q4.gguf",
    ]  # fmt: skip
    assert where("hub:owner/name") == whole
    assert stored.look("hub:gpt2").raw["model_type"] == "qwen3"
    assert stored.look("hub:owner/two-GGUF/Q4/m-Q4.gguf").is_gguf
    with pytest.raises(CheckpointError, match="Did you mean 'hub:owner/name'"):
        where("hub:owner/nam")


@pytest.mark.parametrize(
    ("variable", "below"), [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")]
)
def test_the_hub_where_its_variables_say(
    home: Path, tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    tool_homes.hub(tmp_path / "there" / below, "owner/name", {"m.gguf": gguf})
    monkeypatch.setenv(variable, str(tmp_path / "there"))
    assert names() == ["hub:owner/name"]


def test_lm_studio(home: Path, gguf: bytes, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "hf", CASE)
    models = home / ".lmstudio" / "models"
    tool_homes.lm_studio(models, "lmstudio-community/Qwen3-GGUF", {"Qwen3-Q8_0.gguf": gguf, "mmproj-a.gguf": b"x"})
    tool_homes.lm_studio(models, "me/my models", {"one.gguf": gguf, "two.gguf": gguf})
    tool_homes.lm_studio(models, "mlx-community/Qwen3", {path.name: path.read_bytes() for path in folder.iterdir()})
    tool_homes.lm_studio(home / ".cache" / "lm-studio" / "models", "older/one", {"a.gguf": gguf})
    (models / "stray.gguf").write_bytes(gguf)
    assert names() == [
        "lmstudio:lmstudio-community/Qwen3-GGUF", "lmstudio:me/my models/one.gguf", "lmstudio:me/my models/two.gguf",
        "lmstudio:mlx-community/Qwen3", "lmstudio:older/one",
    ]  # fmt: skip
    assert where("lmstudio:lmstudio-community/qwen3-gguf").name == "Qwen3-Q8_0.gguf"
    assert where("lmstudio:mlx-community/Qwen3").is_dir()
    for name in ("lmstudio:me/my models/two.gguf", "lmstudio:mlx-community/Qwen3"):
        assert hub.readable_name(where(name)) == name
    assert hub.readable_name(models / "stray.gguf") == "stray.gguf"


def test_lm_studio_where_its_files_say(home: Path, gguf: bytes, tmp_path: Path) -> None:
    other, downloads = tmp_path / "studio", tmp_path / "downloads"
    tool_homes.lm_studio(other / "models", "a/b", {"m.gguf": gguf})
    tool_homes.lm_studio(downloads, "c/d", {"m.gguf": gguf})
    (home / ".lmstudio-home-pointer").write_text(f"{other}\n")
    (other / "settings.json").write_text(json.dumps({"downloadsFolder": str(downloads)}))
    assert names() == ["lmstudio:a/b", "lmstudio:c/d"]
    for wrong in ("relative", "\0", "\n" * (1 << 15)):
        (home / ".lmstudio-home-pointer").write_text(wrong)
        assert names() == []


def test_llama_cpp(home: Path, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = home / ".cache" / "llama.cpp"
    tool_homes.llama_cpp(cache, "ggml-org/Qwen3-GGUF", {"Qwen3-Q8_0.gguf": gguf, "mmproj-Qwen3.gguf": b"x"})
    tool_homes.llama_cpp(cache, "ggml-org/other", {"other.gguf": gguf})
    monkeypatch.setattr("sys.platform", "linux")
    assert names() == ["llamacpp:ggml-org_other_other", "llamacpp:ggml-org_Qwen3-GGUF_Qwen3-Q8_0"]
    first = hub.on_disk("llamacpp:ggml-org_Qwen3-GGUF_Qwen3-Q8_0.gguf")
    assert first is not None
    assert first.projector == cache / "ggml-org_Qwen3-GGUF_mmproj-Qwen3.gguf", "its repository's, by the manifest"
    second = hub.on_disk("llamacpp:ggml-org_other_other")
    assert second is not None
    assert second.projector is None
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "newer"))  # which newer versions fill as the Hub's cache is
    tool_homes.hub(tmp_path / "newer", "owner/name", {"m.gguf": gguf})
    assert names() == ["llamacpp:owner/name"]


def test_names_that_cannot_be_shown_are_left_out(home: Path, gguf: bytes) -> None:
    models = home / ".lmstudio" / "models"
    for name in ("a\x1b[31m", "b\u202ec", "d\ne", "é"):
        tool_homes.lm_studio(models, f"me/{name}", {"m.gguf": gguf})
    assert names() == ["lmstudio:me/é"]


def test_a_store_is_listed_up_to_a_bound(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = home / ".ollama" / "models"
    for number in range(12):
        tool_homes.ollama(store, f"library/m/{number}", {"layers": []})
    monkeypatch.setattr(model_store, "MAX_MODELS", 10)
    assert len(ollama.Ollama().entries()) == 10
    monkeypatch.setattr(model_store, "MAX_ENTRIES", 7)
    assert len(ollama.Ollama().entries()) == 7


def test_a_model_by_half_its_name(home: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    store = home / ".ollama" / "models"
    tool_homes.ollama(store, "library/qwen3/0.6b", tool_homes.manifest(store, model=gguf))
    with pytest.raises(CheckpointError, match=r"qwen3:0\.6b does not exist\. Did you mean 'ollama:qwen3:0\.6b'"):
        hub.locate("qwen3:0.6b")
    tool_homes.lm_studio(home / ".lmstudio" / "models", "owner/name", {"m.gguf": gguf})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True, raising=False)
    with pytest.raises(CheckpointError, match="This machine has 'lmstudio:owner/name'"):
        hub.locate("owner/naem")


def test_a_path_wins_over_a_name(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints.write(tmp_path / "ollama:qwen3", CASE)
    assert where("ollama:qwen3") == Path("ollama:qwen3")


def test_a_commit_that_is_a_link_to_nothing_is_no_model(home: Path, gguf: bytes) -> None:
    """Every listing, every name and each Tab in a shell failed with FileNotFoundError."""
    folder = home / ".cache" / "huggingface" / "hub" / "models--owner--name"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "snapshots" / ("a" * 40)).symlink_to(home / "nowhere")
    (folder / "snapshots" / ("b" * 40)).write_bytes(b"no folder")
    assert names() == []
    commit = folder / "snapshots" / ("c" * 40)
    commit.mkdir()
    (commit / "m.gguf").write_bytes(gguf)
    assert names() == ["hub:owner/name"]


def test_folders_that_may_not_be_looked_at_have_no_models(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama as a service keeps its models under another user, where pathlib's `is_dir` raises PermissionError."""
    store = home / ".ollama" / "models"
    manifest = tool_homes.manifest(store, model=b"GGUF")
    tool_homes.ollama(store, "library/qwen3/0.6b", manifest)
    real = os.stat

    def closed(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and str(path).startswith((str(store / "blobs"), str(ollama.SERVICE))):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", closed)
    with pytest.raises(CheckpointError, match="lacks its weights"):
        hub.on_disk("ollama:qwen3:0.6b")
    monkeypatch.setattr(ollama.Ollama, "folders", lambda self: [ollama.SERVICE])
    with pytest.raises(CheckpointError, match="It is empty"):
        hub.on_disk("ollama:qwen3:0.6b")


@pytest.mark.parametrize("model", ["x" * 300, "ollama:" + "x" * 5000, "~nosuchuser/model", "a/" * 3000])
def test_a_name_that_is_no_path_is_a_typed_error(home: Path, model: str) -> None:
    with pytest.raises(CheckpointError, match="can't be looked at") as caught:
        hub.on_disk(model)
    assert len(str(caught.value)) < 400
    with pytest.raises(CheckpointError, match="can't be looked at"):
        hub.hub_id(model)


def test_links_that_lead_to_one_folder_many_times_are_looked_at_up_to_a_bound(
    home: Path, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 links to a folder of 4,096 links gave sixteen million paths, and Tab never ended."""
    cache, deep = home / ".cache" / "huggingface" / "hub", tmp_path / "deep"
    real = tool_homes.hub(tmp_path / "there", "owner/name", {"notes.txt": b""})
    deep.mkdir()
    for number in range(8):
        (deep / f"e{number}").mkdir()
        (real / f"d{number}").symlink_to(deep)
    cache.mkdir(parents=True)
    for number in range(8):
        (cache / f"models--owner--n{number}").symlink_to(real.parent.parent)
    looked = 0
    scanned = os.scandir

    def counted(path: Any) -> Any:
        nonlocal looked
        looked += 1
        return scanned(path)

    monkeypatch.setattr(os, "scandir", counted)
    assert names() == []
    assert looked > 8 * 64, "all folders are read below the bound"
    looked = 0
    monkeypatch.setattr(model_store, "MAX_LOOKS", 1000)
    assert names() == []
    assert looked < 1000 // 16 + 10 * len(known.STORES)
    monkeypatch.undo()


def test_manifests_are_read_up_to_a_bound_of_bytes(home: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand tags that were links to one manifest of 4 MB took Tab minutes."""
    store = home / ".ollama" / "models"
    manifest = tool_homes.manifest(store, model=gguf)
    for number in range(10):
        tool_homes.ollama(store, f"library/m/{number}", manifest)
    assert len(names()) == 10
    monkeypatch.setattr(model_store, "MAX_BYTES", 4 * len(json.dumps(manifest)))
    assert 2 <= len(names()) <= 4


def test_a_folder_that_may_not_be_read_has_a_file_that_may(
    tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for an optional picture encoder next to it raised PermissionError."""
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf)
    expected = stored.look(file).raw
    real = os.listdir

    def closed(path: Any) -> list[str]:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", closed)
    assert stored.look(file).raw == expected
    with pytest.raises(CheckpointError, match=r"can't be read \(Permission denied\)"):
        stored.look(tmp_path)
