"""Checkpoints written as GGUF files and as folders: what comes back is what went in."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers import checkpoints, vocabularies
from helpers.thorough import by_default
from rekindle import tiny
from rekindle._src.cli.main import main
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading.checkpoint import inspect, load
from rekindle._src.models.loading.gguf import header
from rekindle._src.opening import exporting
from rekindle._src.opening.exporting import export
from rekindle._src.text import ChatTemplate, Tokenizer
from rekindle._src.text.generation_config import checkpoint_sampling
from rekindle.errors import CheckpointError, ConfigError
from workshop import reference

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
PROMPT = "Once upon a time"
QWEN = checkpoints.CASES["qwen3"] | {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load(tiny.folder(), dtype="float32")


@pytest.mark.parametrize("kind", by_default(["auto", "f32"]))
def test_the_embedded_model_as_a_file_is_the_embedded_model(kind: str, tmp_path: Path, embedded: LoadedModel) -> None:
    file = export("tiny", tmp_path / "tiny.gguf", type=kind)
    found = load(file, dtype="float32")
    checkpoints.assert_same(found, embedded)
    assert found.config.eos_token_ids == embedded.config.eos_token_ids
    prompt = Tokenizer.load(file).encode(PROMPT)
    assert prompt == Tokenizer.load(tiny.folder()).encode(PROMPT)
    assert reference.generate(found, prompt, 12) == reference.generate(embedded, prompt, 12)


@pytest.mark.parametrize("out", ["out.gguf", "out"])
def test_tensors_that_contradict_their_config_are_not_written(out: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny.folder(), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] - 1}))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight: shape \[512, 256\], expected \[511, 256\]"):
        export(broken, tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.thorough
def test_a_session_opens_it_and_says_the_same(tmp_path: Path) -> None:
    file = export("tiny", tmp_path / "tiny.gguf")
    said = []
    for model in ("tiny", file, str(tmp_path)):
        with rekindle.open_sync(model, dtype="float32", max_requests=2, max_model_len=256, quiet=True) as session:
            done = session.generate_sync(PROMPT, max_tokens=24)
            reply = session.chat(
                [{"role": "user", "content": "Who are you?"}], max_tokens=16, temperature=0
            ).result_sync()
            said.append((done.text, done.token_ids, done.finish_reason, reply.text))
    assert said[0] == said[1] == said[2]


@pytest.mark.thorough
def test_a_session_computes_with_the_four_bits_of_a_file(tmp_path: Path) -> None:
    file = export("tiny", tmp_path / "tiny.gguf", type="q4_0")
    with rekindle.open_sync(file, max_requests=2, max_model_len=256, quiet=True) as session:
        done = session.generate_sync(PROMPT, max_tokens=24, ignore_eos=True)
        assert len(done.token_ids) == 24 and done.text.startswith((",", " "))
        assert re.search(r"4 bits \d MB.*\(in the groups of the checkpoint", session._repr_html_())
        assert header._read.cache_info().currsize == 0, "an open session needs the file's vocabulary no more"


def test_metadata_has_the_types_without_which_llama_cpp_opens_no_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the oracle: pip install gguf")
    fields = gguf.GGUFReader(export("tiny", tmp_path / "tiny.gguf", type="q4_0")).fields
    assert fields["tokenizer.ggml.token_type"].types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]


@pytest.mark.parametrize("kind", by_default(["bf16", "q4_0", "f16", "q8_0"], 2))
def test_types_are_read_by_the_gguf_package_and_are_what_it_would_write(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the oracle: pip install gguf")
    folder = checkpoints.write(tmp_path / "folder", QWEN)
    file = export(folder, tmp_path / "model.gguf", type=kind)
    state = checkpoints.tensors(QWEN)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    wanted = gguf.GGMLQuantizationType[kind.upper()]
    down = stored["blk.1.ffn_down.weight"]
    assert down.tensor_type == wanted
    expected = gguf.quants.quantize(state["model.layers.1.mlp.down_proj.weight"], wanted)
    np.testing.assert_array_equal(down.data.view(np.uint8).reshape(-1), expected.view(np.uint8).reshape(-1))
    assert stored["blk.1.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    eight = gguf.GGMLQuantizationType["Q8_0" if kind == "q4_0" else kind.upper()]
    assert stored["token_embd.weight"].tensor_type == eight
    found = dict(zip((model := load(file, dtype="float32")).graph.paths, model.leaves, strict=True))
    back = gguf.quants.dequantize(expected, wanted)
    np.testing.assert_array_equal(np.asarray(found["layers.1.mlp.down.weight"]), back)


@pytest.mark.parametrize("kind", by_default(["q4_0", "q8_0"]))
@pytest.mark.parametrize("case", ["qwen3", "llama"])
def test_a_file_of_a_file_has_the_same_blocks(case: str, kind: str, tmp_path: Path) -> None:
    """Q4_0 of what Q4_0 stands for is not the same blocks in general, so blocks are copied, not made anew."""
    raw = checkpoints.CASES[case] | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    first = export(checkpoints.write(tmp_path / "folder", raw), tmp_path / "a.gguf", type=kind)
    again, kept = export(first, tmp_path / "b.gguf", type=kind), export(first, tmp_path / "c.gguf")
    assert again.read_bytes() == first.read_bytes()
    assert kept.read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    "case",
    by_default(
        ["llama3-rope", "qwen3-moe", "gemma2", "gpt2", "phi3-longrope-crossing", "olmo2", "smollm3", "mixtral"], 4
    ),
)
def test_a_folder_of_a_file_of_a_folder_is_the_folder(case: str, tmp_path: Path) -> None:
    raw = checkpoints.CASES[case] | ({"query_pre_attn_scalar": 16} if case == "gemma2" else {})
    folder = checkpoints.write(tmp_path / "folder", raw)
    vocabularies.write(folder, vocabularies.byte_level(), bos_token="<s>", eos_token="</s>", chat_template="hi")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.5, "top_k": 7}))
    file = export(folder, tmp_path / "model.gguf")
    back = export(file, tmp_path / "back")
    checkpoints.assert_same(load(back, dtype="float32"), load(folder, dtype="float32"))
    assert [spec.sliding_window for spec in inspect(back).config.attention] == [
        spec.sliding_window for spec in inspect(folder).config.attention
    ]
    text = "two words and <|im_start|>"
    for found in (file, back):
        assert Tokenizer.load(found).encode(text) == Tokenizer.load(folder).encode(text)
        template = ChatTemplate.load(found)
        assert template is not None and template.text() == "hi"
        sampling = checkpoint_sampling(found)
        assert sampling is not None and (sampling.temperature, sampling.top_k) == (0.5, 7)


def test_transformers_opens_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = checkpoints.write(tmp_path / "folder", QWEN)
    back = export(export(folder, tmp_path / "model.gguf"), tmp_path / "back")
    prompt = torch.tensor([[3, 9, 27, 81, 11]])
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(prompt).logits.detach().numpy()
        for path in (folder, back)
    ]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("kind", by_default(["f16", "bf16", "f32"]))
def test_a_folder_in_another_type(kind: str, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "folder", QWEN)
    made = export(folder, tmp_path / "made", type=kind)
    name = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[kind]
    assert json.loads((made / "config.json").read_text())["dtype"] == name
    expected = [np.asarray(jnp.asarray(leaf).astype(name)) for leaf in load(folder, dtype="float32").leaves]
    for leaf, wanted in zip(load(made, dtype="float32").leaves, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), wanted.astype(np.float32))


@pytest.mark.parametrize(
    ("out", "kind", "named"),
    [("model.gguf", "q5_k", "type='q5_k'"), ("folder", "q8_0", "type='q8_0'"), ("there", "auto", "exists already")],
)
def test_an_export_that_can_not_be_written_leaves_nothing(out: str, kind: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=named):
        export("tiny", tmp_path / out, type=kind)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle._src.opening import exporting

    def fail(*arguments: Any) -> None:
        arguments[0].write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_gguf", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        export("tiny", tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "tiny", str(tmp_path / "tiny.gguf"), "--type", "q8_0"]) == 0
    assert "tiny.gguf (4 MB)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["export", "tiny", str(tmp_path / "tiny.gguf")])
    assert "exists already" in capsys.readouterr().err
    assert main(["doctor", "--model", str(tmp_path / "tiny.gguf")]) == 0
    assert "numbers are finite" in capsys.readouterr().out


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    seen: list[Any] = []
    rekindle.models.export("tiny", tmp_path / "tiny.gguf", progress=seen.append)
    assert seen[-1].done == seen[-1].total == inspect(tiny.folder()).nbytes


def test_a_link_out_of_a_folder_is_not_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise an export, which may be published next, could contain any file of the machine."""
    source, blobs = tmp_path / "hub" / "snapshots" / "commit", tmp_path / "hub" / "blobs"
    for folder in (source, blobs, tmp_path / "out"):
        folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (blobs / "blob").write_text("{}")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    (source / "tokenizer.json").symlink_to(blobs / "blob")
    (source / "vocab.txt").write_text("a")
    exporting.copy_text(source, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["tokenizer.json", "vocab.txt"]
    assert "notes.txt leads out of its folder and is not copied" in caplog.text


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "../../x", "a\nb", "é"])
def test_a_template_whose_name_is_no_file_name_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare:
        has_text = False

    monkeypatch.setattr(exporting.Tokenizer, "load", lambda source: Bare())
    monkeypatch.setattr(exporting.ChatTemplate, "load", lambda source: ChatTemplate({"default": "x", name: "y"}))
    with pytest.raises(CheckpointError, match=r"has a chat template named .*, which can't be the name of a file"):
        exporting.write_text(tmp_path / "model.gguf", {}, tmp_path)
