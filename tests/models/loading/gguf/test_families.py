"""Every family as a GGUF file: the config and the weights that come out are those that went in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import checkpoints, gguf_files
from helpers.thorough import by_default
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading import checkpoint, reading
from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf
from rekindle._src.models.loading.gguf.header import read_header
from rekindle._src.models.loading.gguf.names import within_layer
from rekindle._src.models.registry import config_from_hf, gguf_forms
from rekindle.errors import CheckpointError, UnsupportedModel

CASES = checkpoints.CASES
HELD = {case: change for family in checkpoints.FAMILY_CASES.values() for case, change in family.held.items()}
REFUSED = {case: words for family in checkpoints.FAMILY_CASES.values() for case, words in family.refused.items()}


def raw_of(case: str) -> dict[str, Any]:
    return CASES[case] | HELD[case]


def plain(config: ModelConfig) -> dict[str, Any]:
    """The config without what a file can't say, or says in other words."""
    others = ("model_type", "dtype", "eos_token_ids", "bos_token_id", "attention")
    found = {name: value for name, value in dataclasses.asdict(config).items() if name not in others}
    return found | {"norm_eps": pytest.approx(config.norm_eps)}


@pytest.mark.parametrize("case", by_default(HELD, lambda case: case in checkpoints.READ))
def test_a_family_comes_back_as_it_was(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "UNPACKED", 2000)  # tensors are read in several pieces
    raw = raw_of(case)
    state = checkpoints.tensors(raw)
    expected = checkpoints.model(raw, state)
    file = gguf_files.convert(checkpoints.write(tmp_path / "folder", raw, state), tmp_path / "model.gguf")
    found = checkpoint.load(file, dtype="float32")
    assert found.folder == file
    assert plain(found.config) == plain(expected.config)
    checkpoints.assert_same(found, expected)
    for ours, theirs in zip(found.config.attention, expected.config.attention, strict=True):
        same = dataclasses.replace(ours, rope=None), dataclasses.replace(theirs, rope=None)
        assert dataclasses.replace(same[0], scale=0.0) == dataclasses.replace(same[1], scale=0.0)
        assert ours.scale == pytest.approx(theirs.scale)
        assert (ours.rope is None) == (theirs.rope is None)
        if ours.rope is not None and theirs.rope is not None:
            for long in (False, True):
                np.testing.assert_allclose(
                    ours.rope.frequencies(long=long), theirs.rope.frequencies(long=long), rtol=1e-6
                )
            assert ours.rope.attention_factor == pytest.approx(theirs.rope.attention_factor, rel=1e-6)


def test_every_family_that_is_written_for_llama_cpp_is_held() -> None:
    assert {CASES[case]["model_type"] for case in HELD} == {
        model_type for model_type, form in gguf_forms().items() if not form.reads_only
    }


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_file_can_say_is_refused(case: str) -> None:
    from rekindle._src.models.loading.gguf.export import describe

    with pytest.raises(UnsupportedModel, match=REFUSED[case]):
        describe(config_from_hf(CASES[case]))


@pytest.mark.parametrize("case", by_default(HELD, lambda case: case in checkpoints.READ))
def test_llama_cpp_calls_the_tensors_so(case: str, tmp_path: Path) -> None:
    """The names and shapes that its own table maps Hugging Face's to, and that it then asks for."""
    gguf = pytest.importorskip("gguf", reason="the oracle: pip install gguf")
    raw = raw_of(case)
    folder = checkpoints.write(tmp_path / "folder", raw)
    file = gguf_files.convert(folder, tmp_path / "model.gguf")
    header = read_header(file)
    name = header.metadata.text("general.architecture")
    (arch,) = [one for one, text in gguf.MODEL_ARCH_NAMES.items() if text == name]
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    blocks = range(header.metadata.integer(f"{name}.block_count"))
    allowed = {text.format(bid=block) for text in known for block in blocks}
    ours = {tensor.name.rpartition(".")[0] for tensor in header.tensors}
    assert ours - {"rope_freqs", "rope_factors_long", "rope_factors_short"} <= allowed
    names = gguf.get_tensor_name_map(arch, len(blocks))
    numbers = gguf_forms()[raw["model_type"]].numbers
    for theirs, value in checkpoints.tensors(raw).items():
        inner = within_layer(theirs)
        if inner is not None and inner[1] in numbers:
            listed = header.metadata.numbers(numbers[inner[1]])
            assert listed.dtype == np.float32 and len(listed) == len(blocks) and listed[inner[0]] == value
        elif ".experts." not in theirs:  # its converter stacks those before it asks for the name
            assert names.get_name(theirs, try_suffixes=(".weight", ".bias")) in {t.name for t in header.tensors}, theirs


def test_numbers_of_layers_are_in_the_metadata_once_or_for_each(tmp_path: Path) -> None:
    raw = CASES["apertus"]
    state = {
        name: np.full_like(value, 0.25) if name.endswith("alpha_p") else value
        for name, value in checkpoints.tensors(raw).items()
    }
    file = gguf_files.convert(checkpoints.write(tmp_path / "folder", raw, state), tmp_path / "model.gguf")
    tensors = read_header(file).tensors
    kept = {key: value for key, value in read_header(file).metadata.items() if not key.startswith("xielu.")}
    pieces = [np.fromfile(file, np.uint8, tensor.nbytes, offset=tensor.offset) for tensor in tensors]
    described = [OutgoingTensor(tensor.name, tensor.kind, tensor.shape) for tensor in tensors]

    def written(**numbers: Any) -> Path:
        one = {f"xielu.{key}": read_header(file).metadata.numbers(f"xielu.{key}") for key in ("alpha_n", "beta", "eps")}
        write_gguf(tmp_path / "other.gguf", {**kept, **one, **numbers}, described, pieces)
        return tmp_path / "other.gguf"

    found = checkpoint.load(written(**{"xielu.alpha_p": 0.25}), dtype="float32")
    checkpoints.assert_same(found, checkpoint.load(file, dtype="float32"))
    with pytest.raises(CheckpointError, match=r"no xielu\.alpha_p in its metadata"):
        checkpoint.load(written())
    with pytest.raises(CheckpointError, match=r"xielu\.alpha_p has 1 numbers for 2 layers"):
        checkpoint.load(written(**{"xielu.alpha_p": np.array([0.25], np.float32)}))


def test_rows_of_q_and_k_lie_as_in_the_converter(tmp_path: Path) -> None:
    """Llama's rotated pairs side by side: reshape(heads, 2, half, …).swapaxes(1, 2), as in convert_hf_to_gguf.py."""
    gguf = pytest.importorskip("gguf", reason="the oracle: pip install gguf")
    raw = CASES["llama"]
    state = checkpoints.tensors(raw)
    file = gguf_files.convert(checkpoints.write(tmp_path / "folder", raw, state), tmp_path / "model.gguf")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    for letter, heads in (("q", 6), ("k", 2)):
        theirs = state[f"model.layers.1.self_attn.{letter}_proj.weight"]
        expected = theirs.reshape(heads, 2, -1, theirs.shape[1]).swapaxes(1, 2).reshape(theirs.shape)
        np.testing.assert_array_equal(stored[f"blk.1.attn_{letter}.weight"], expected)
    np.testing.assert_array_equal(stored["blk.1.attn_v.weight"], state["model.layers.1.self_attn.v_proj.weight"])


def test_missing_unexpected_and_wrong_tensors_have_llama_cpps_names(tmp_path: Path) -> None:
    raw = CASES["llama"]
    state = checkpoints.tensors(raw)
    folder = checkpoints.write(tmp_path / "folder", raw, state)
    file = gguf_files.convert(folder, tmp_path / "model.gguf")
    content = file.read_bytes()
    for old, new in (
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"),
        (b"blk.0.attn_q.weight", b"blk.0.attn_Q.weight"),
    ):
        content = content.replace(old, new)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="its metadata describes") as caught:
        checkpoint.load(file)
    told = str(caught.value)
    for text in ("missing: blk.1.ffn_up.weight [80, 48]", "missing: blk.0.attn_q.weight [48, 48]",
                 "unexpected: blk.1.ffn_xx.weight", "unexpected: blk.0.attn_Q.weight"):  # fmt: skip
        assert text in told, text


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("llama", {"general.architecture": "clip"}, r"general\.architecture='clip'.*qwen3moe"),
        ("llama", {"general.type": "adapter"}, r"general\.type='adapter'"),
        ("llama", {"llama.block_count": "two"}, r"llama\.block_count is 'two'|llama\.block_count is a str"),
        ("llama", {"llama.block_count": 10**6}, r"llama\.block_count=1000000"),
        ("llama", {"llama.block_count": 1000}, r"llama\.block_count=1000 is not"),
        ("llama", {"llama.rope.scaling.type": "su"}, r"llama\.rope\.scaling\.type='su'"),
        ("llama", {"llama.rope.dimension_count": 1000}, r"llama\.rope\.dimension_count=1000"),
        ("llama", {"llama.attention.value_length": 4}, r"llama\.attention\.value_length=4"),
        ("llama", {"llama.attention.head_count": [6, 3]}, r"llama\.attention\.head_count=\[6, 3\]"),
        ("llama", {"llama.attention.scale": 0.5}, r"llama\.attention\.scale=0\.5"),
        ("llama", {"llama.expert_shared_count": 2}, r"llama\.expert_shared_count=2"),
        ("qwen3", {"split.count": 7}, r"split\.count=7"),
    ],
)
def test_metadata_that_can_not_be_is_a_typed_error(
    case: str, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = checkpoints.write(tmp_path / "folder", CASES[case])
    changed = {key: np.array(value, np.uint32) if isinstance(value, list) else value for key, value in change.items()}
    file = gguf_files.convert(folder, tmp_path / "model.gguf", **changed)
    with pytest.raises(CheckpointError, match=named):
        checkpoint.load(file, dtype="float32")
    asked = change.keys() & {"llama.block_count"}
    for key in asked:
        content = file.read_bytes().replace(key.encode(), b"llama.block_COUNT")
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"no {key} in its metadata"):
            checkpoint.load(file)


def test_parts_of_a_large_model_are_read_together(tmp_path: Path) -> None:
    from rekindle._src.models.loading.gguf.export import export, write_gguf
    from rekindle._src.models.loading.stored import look

    raw = CASES["llama"]
    state = checkpoints.tensors(raw)
    stored = look(checkpoints.write(tmp_path / "folder", raw, state))
    made = export(stored, config_from_hf(raw), "f32", lambda count: None)
    arrays = dict(zip((tensor.name for tensor in made.tensors), made.pieces, strict=True))
    names = [f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        tensors = made.tensors[number::3]
        metadata = made.metadata if number == 0 else {}
        write_gguf(
            tmp_path / name,
            metadata | {"split.no": number, "split.count": 3},
            tensors,
            [arrays[t.name] for t in tensors],
        )
    expected = checkpoints.model(raw, state)
    for model in (tmp_path / names[0], tmp_path):
        checkpoints.assert_same(checkpoint.load(model, dtype="float32"), expected)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"lacks 1 of the 3 parts.*{names[1]}"):
        checkpoint.load(tmp_path / names[0])


@pytest.mark.parametrize(
    ("change", "exchange", "named"),
    [
        ({"general.architecture": "gpt2"}, False, r"2-of-00002\.gguf: general\.architecture='gpt2', .* be 'llama'"),
        ({}, True, r"1-of-00002\.gguf: split\.no=1, and as part 1 of 2 of model-00001-of-00002\.gguf it has to be 0"),
        ({"split.no": 0}, False, r"2-of-00002\.gguf: split\.no=0, .* it has to be 1"),
        ({"split.count": 3}, False, r"2-of-00002\.gguf: split\.count=3, and 2 of the files are here"),
        ({"split.tensors.count": 99}, False, r"2-of-00002\.gguf: split\.tensors\.count=99, .* it has to be 21"),
    ],
)
def test_parts_that_are_not_those_of_one_model_are_refused(
    change: dict[str, Any], exchange: bool, named: str, tmp_path: Path
) -> None:
    """Such a model opened, with weights of another one in its place."""
    folder = checkpoints.write(tmp_path / "folder", CASES["llama"])
    header = read_header(gguf_files.convert(folder, tmp_path / "whole.gguf"))
    content = header.path.read_bytes()
    for number in range(2):
        tensors = header.tensors[number::2]
        made = [OutgoingTensor(one.name, one.kind, one.shape) for one in tensors]
        pieces = [np.frombuffer(content, np.uint8, one.nbytes, one.offset) for one in tensors]
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(header.tensors)}
        metadata = split | change if number else dict(header.metadata) | split
        name = 1 - number if exchange else number
        write_gguf(tmp_path / f"model-{name + 1:05d}-of-00002.gguf", metadata, made, pieces)
    with pytest.raises(CheckpointError, match=named):
        checkpoint.inspect(tmp_path / "model-00001-of-00002.gguf")


def test_a_folder_with_several_models_asks_for_one(tmp_path: Path) -> None:
    file = gguf_files.convert(checkpoints.write(tmp_path / "folder", CASES["qwen3"]), tmp_path / "a.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"a projector")
    assert checkpoint.inspect(tmp_path).folder == file
    (tmp_path / "b.gguf").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 models in GGUF: a\.gguf, b\.gguf\. Pass one of them: .*/a\.gguf"):
        checkpoint.load(tmp_path)
