"""Folders become models: every family, layout and dtype; what is wrong with a folder is said at once, and named."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import struct
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from helpers import checkpoints
from helpers.python import run_python
from helpers.thorough import by_default
from rekindle._src.models.loading import checkpoint, hub, reading, stored
from rekindle._src.models.loading.load_progress import LoadProgress
from rekindle._src.models.loading.tensor_files import read_header
from rekindle._src.models.precision import resolve_dtype
from rekindle._src.models.registry import config_from_hf
from rekindle.errors import CheckpointError, ConfigError, MissingExtra, UnsupportedModel
from rekindle_kernels import tuning

RAW = checkpoints.CASES["llama"]


@pytest.mark.parametrize("name", by_default(checkpoints.CASES, lambda name: name in checkpoints.READ))
def test_every_family_loads_what_was_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1000)  # small tensors are read in several pieces, too
    folder = checkpoints.write(tmp_path, checkpoints.CASES[name], checkpoints.tensors(checkpoints.CASES[name]))
    loaded = checkpoint.load(folder, dtype="float32")
    checkpoints.assert_same(loaded, checkpoints.case(name))
    assert loaded.folder == folder
    assert loaded.config == config_from_hf(checkpoint.read_config(folder))


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_dtypes_convert(tmp_path: Path, source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1000)
    folder = checkpoints.write(tmp_path, RAW, dtype=source, shards=3)
    stored = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    loaded = checkpoints.leaves(checkpoint.load(folder, dtype=target))
    wanted = np.dtype(getattr(ml_dtypes, target, None) or target)
    expected = stored["model.layers.1.mlp.down_proj.weight"].astype(wanted)
    np.testing.assert_array_equal(loaded["layers.1.mlp.down.weight"], expected)
    assert loaded["norm.weight"].dtype == np.float32
    np.testing.assert_array_equal(loaded["norm.weight"], stored["model.norm.weight"].astype(np.float32))


def test_auto_is_bfloat16_on_cpu_and_the_checkpoints_own_elsewhere(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, RAW, dtype="float16")
    assert checkpoints.leaves(checkpoint.load(folder))["head.weight"].dtype == ml_dtypes.bfloat16
    config = checkpoint.inspect(folder).config
    assert resolve_dtype("auto", config, "gpu") == "float16"
    assert resolve_dtype("float32", config, "gpu") == "float32"


def test_auto_is_what_the_gpu_multiplies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = checkpoint.inspect(checkpoints.write(tmp_path, RAW, dtype="bfloat16")).config
    scaled = dataclasses.replace(config, embed_scale=8.0)
    monkeypatch.setattr(tuning, "compute_capability", lambda: 7.5)  # a T4's
    assert [resolve_dtype("auto", each, "gpu") for each in (config, scaled)] == ["float16", "float32"]
    assert resolve_dtype("bfloat16", config, "gpu") == "bfloat16"
    monkeypatch.setattr(tuning, "compute_capability", lambda: 8.0)
    assert [resolve_dtype("auto", each, "gpu") for each in (config, scaled)] == ["bfloat16", "bfloat16"]


def test_shards_and_names_of_files_make_no_difference(tmp_path: Path) -> None:
    expected = checkpoint.load(checkpoints.write(tmp_path / "one", RAW), dtype="float32")
    checkpoints.assert_same(
        checkpoint.load(checkpoints.write(tmp_path / "many", RAW, shards=4), dtype="float32"), expected
    )
    (tmp_path / "many" / "model.safetensors.index.json").unlink()
    checkpoints.assert_same(checkpoint.load(tmp_path / "many", dtype="float32"), expected)


def test_a_bare_model_lacks_the_prefix(tmp_path: Path) -> None:
    raw = checkpoints.CASES["llama-mha-tied"]
    state = checkpoints.tensors(raw)
    bare = {name.removeprefix("model."): value for name, value in state.items()}
    folder = checkpoints.write(tmp_path, raw, bare)
    checkpoints.assert_same(checkpoint.load(folder, dtype="float32"), checkpoints.case("llama-mha-tied"))


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    raw = checkpoints.CASES["llama-mha-tied"]
    state = checkpoints.tensors(raw)
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "lm_head.weight": state["model.embed_tokens.weight"],
    }
    folder = checkpoints.write(tmp_path, raw, state | extras)
    checkpoints.assert_same(checkpoint.load(folder, dtype="float32"), checkpoints.case("llama-mha-tied"))


@pytest.mark.parametrize("whole", [True, False], ids=["compared whole", "by samples"])
def test_a_stored_head_is_used_if_it_is_another_matrix_than_the_embedding(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever config.json says, as in transformers: a head may be trained by itself where the config ties both."""
    monkeypatch.setattr(stored, "COMPARED_WHOLE", 1 << 20 if whole else 0)
    raw = {**RAW, "tie_word_embeddings": True}
    state = checkpoints.tensors(raw)
    embedding = state["model.embed_tokens.weight"]
    tied = checkpoint.load(checkpoints.write(tmp_path / "copy", raw, state | {"lm_head.weight": embedding}))
    assert tied.config.tie_embeddings, "a copy of the embedding needs no memory of its own"
    head = embedding.copy()
    head[-1, -1] += 1.0
    model = checkpoint.load(checkpoints.write(tmp_path / "other", raw, state | {"lm_head.weight": head}, shards=2))
    assert not model.config.tie_embeddings
    expected = checkpoint.load(
        checkpoints.write(tmp_path / "untied", raw | {"tie_word_embeddings": False}, state | {"lm_head.weight": head})
    )
    checkpoints.assert_same(model, expected)


def test_all_that_is_wrong_is_in_one_error(tmp_path: Path) -> None:
    state = checkpoints.tensors(RAW)
    del state["model.layers.0.self_attn.k_proj.weight"], state["lm_head.weight"]
    state["model.layers.1.mlp.up_proj.weight"] = np.zeros((81, 48), np.float32)
    state["model.layers.2.mlp.up_proj.weight"] = np.zeros((80, 48), np.float32)
    folder = checkpoints.write(tmp_path, RAW, state)
    save_file(
        load_file(folder / "model.safetensors") | {"model.norm.weight": np.zeros(48, np.int8)},
        folder / "model.safetensors",
    )
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder)
    for said in (
        "5 differences",
        "missing: model.layers.0.self_attn.k_proj.weight [16, 48]",
        "missing: lm_head.weight [160, 48]",
        "model.layers.1.mlp.up_proj.weight: shape [81, 48], expected [80, 48]",
        "unexpected: model.layers.2.mlp.up_proj.weight",
        "model.norm.weight: stored as I8",
    ):
        assert said in str(caught.value)


def test_weights_adopt_their_memory_without_a_copy(tmp_path: Path) -> None:
    placed: dict[str, int] = {}

    def place(path: str, array: np.ndarray) -> jax.Array:
        placed[path] = array.ctypes.data
        return reading.place_on_default_device(path, array)

    model = checkpoint.load(checkpoints.write(tmp_path, RAW), dtype="float32", place=place)
    for path, leaf in zip(model.graph.paths, model.leaves, strict=True):
        assert leaf.unsafe_buffer_pointer() == placed[path], path


def test_progress_reports_bytes_rate_and_what_remains(tmp_path: Path) -> None:
    reports: list[LoadProgress] = []
    folder = checkpoints.write(tmp_path, RAW)
    checkpoint.load(folder, progress=reports.append)
    last = reports[-1]
    assert last.done == last.total == sum(entry.nbytes for entry in read_header(folder / "model.safetensors").entries)
    assert last.rate > 0 and last.eta == 0
    assert "MB/s" in str(last)
    half = LoadProgress(50, 100, 2.0)
    assert (half.rate, half.eta) == (25.0, 2.0)


@pytest.fixture(scope="module")
def heavier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 8000}
    return checkpoints.write(tmp_path_factory.mktemp("heavier"), {**RAW, **sizes})


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of resident memory from /proc")
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [
        pytest.param("float32", None, marks=pytest.mark.slow),
        pytest.param("bfloat16", None, marks=pytest.mark.slow),
        ("bfloat16", "int8"),
    ],
)
def test_peak_memory_is_the_weights(heavier: Path, tmp_path: Path, dtype: str, quantize: str | None) -> None:
    program = """if True:
        import sys
        import jax
        from rekindle._src.models.loading import checkpoint
        def peak():
            line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        jax.devices()
        options = {"dtype": sys.argv[3], "quantize": sys.argv[4] or None}
        checkpoint.load(sys.argv[2], **options)  # what is imported takes memory, too
        before = peak()
        model = checkpoint.load(sys.argv[1], **options)
        print(model.nbytes, peak() - before)
    """
    small = checkpoints.write(tmp_path, RAW)
    printed = run_python("-c", program, str(heavier), str(small), dtype, quantize or "")
    weights, grown = map(int, printed.split())
    assert weights > 15_000_000
    print(f"{grown / 1e6:.1f} MB for {weights / 1e6:.1f} MB of weights")
    assert grown < 1.05 * weights + reading.workers() * (reading.CHUNK + (4 << 20)) + (4 << 20)


def test_an_error_in_the_callback_ends_the_load(tmp_path: Path) -> None:
    def report(_: LoadProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(checkpoints.write(tmp_path, RAW), progress=report)


# Broken folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "model", RAW, shards=2)


SHARD = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=f"{SHARD} is truncated or corrupt.*bytes"):
        checkpoint.load(folder)


def rewritten(data: bytes, **changes: object) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    first = next(name for name in header if name != "__metadata__")
    header[first] |= changes
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + length :]


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [3, 3]},
        {"data_offsets": [0, 10**9]},
        {"data_offsets": [8, 4]},
        {"data_offsets": "x"},
        {"shape": [-1, 5]},
    ],
)
def test_an_inconsistent_header_is_named(folder: Path, changes: dict[str, object]) -> None:
    (folder / SHARD).write_bytes(rewritten((folder / SHARD).read_bytes(), **changes))
    with pytest.raises(CheckpointError, match=f"{SHARD} is truncated or corrupt"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, struct.pack("<Q", 4) + b"[1]x" + b"0" * 9, struct.pack("<Q", 2) + b"]]"]
)
def test_foreign_bytes_are_named(folder: Path, data: bytes) -> None:
    (folder / SHARD).write_bytes(data)
    with pytest.raises(CheckpointError, match=SHARD):
        checkpoint.load(folder)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_to_a_header_is_a_checkpoint_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.int8)}, file)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(
            st.sampled_from(b'0123456789[]{}",:-e\x00\xff ABF')
        )
    file.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        header = read_header(file)
        for entry in header.entries:
            assert entry.offset >= 0 and entry.offset + entry.nbytes <= header.size


def test_a_deeply_nested_header_is_a_checkpoint_error(tmp_path: Path) -> None:
    raw = b'{"a":' + b"[" * 200_000
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(CheckpointError, match="makes no sense"):
        read_header(tmp_path / "x.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = checkpoint.look(folder)
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-40])
    monkeypatch.setattr(checkpoint, "look", lambda *_, **__: seen)
    with pytest.raises(CheckpointError, match=f"{SHARD} is truncated.* ends .* early"):
        checkpoint.load(folder)


def test_an_lfs_pointer_says_so(folder: Path) -> None:
    (folder / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        checkpoint.load(folder)


def test_missing_shards_are_listed(folder: Path) -> None:
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of the 2 files.*{SHARD}"):
        checkpoint.load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        checkpoint.load(folder)


def test_pickles_are_refused_with_the_reason(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        checkpoint.load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*pickle can run any code.*save_pretrained"):
        checkpoint.load(folder)


def test_config_problems_are_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(UnsupportedModel, match="rwkv"):
        checkpoint.load(folder)
    for text, said in (("{", "can't be read"), ("[]", "not an object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"config.json .*{said}"):
            checkpoint.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        checkpoint.load(folder)
    (folder / "config.json").symlink_to("config.json")  # it can be no more looked at than in a locked folder
    with pytest.raises(CheckpointError, match=r"config\.json can't be read"):
        checkpoint.load(folder)


def test_an_unknown_quantisation_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="int8-weight"):
        checkpoint.load(folder, quantize="int3")


# Where the folder comes from


def test_local_folders_win_and_other_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints.write(tmp_path / "owner" / "name", RAW)
    assert hub.locate("owner/name").path == Path("owner/name")
    for wrong in ("no-such-folder", "/no/such/folder", "../a/b", "a/b/c", Path("owner/other")):
        with pytest.raises(CheckpointError, match="does not exist"):
            hub.locate(wrong)
    shutil.copy(tmp_path / "owner" / "name" / "config.json", tmp_path / "file")
    with pytest.raises(CheckpointError, match="is a file"):
        checkpoint.load(tmp_path / "file")


class FakeHub:
    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []

    def snapshot_download(self, name: str, **options: object) -> str:
        self.asked.append((name, options["revision"]))
        if name.endswith("private"):
            raise OSError("401 Client Error\nsecond line")
        return str(self.folder)


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fake = FakeHub(checkpoints.write(tmp_path / "snapshot", RAW))
    monkeypatch.setattr(hub.importlib, "import_module", lambda _: fake)
    assert checkpoint.load("owner/name@v2", dtype="float32").folder == fake.folder
    assert fake.asked == [("owner/name", "v2")]
    with pytest.raises(CheckpointError, match=r"owner/private.*401 Client Error\)"):
        checkpoint.load("owner/private")


def test_without_huggingface_hub_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(hub.importlib, "import_module", absent)
    with pytest.raises(MissingExtra, match=r"rekindle\[hub\]"):
        checkpoint.load("owner/name")
