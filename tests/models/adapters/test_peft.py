"""PEFT folders: which modules a config means, with which rank and scale, and what is refused by its name."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from helpers import adapters, checkpoints
from helpers.bounds import Within
from helpers.driving import tiny_model
from rekindle._src.models.adapters import peft
from rekindle._src.models.adapters.adapter import does_not_fit
from rekindle._src.models.adapters.budget import Budget
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.adapters.writing import write_folder
from rekindle.errors import CheckpointError, ConfigError

CONFIG = tiny_model().config


def changed(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def test_products_land_in_fused_matrices_with_their_scales(tmp_path: Path) -> None:
    folder = adapters.write(
        tmp_path, CONFIG, rank=4, lora_alpha=6, rank_pattern={"k_proj": 2}, alpha_pattern={r"layers.1.*.k_proj": 5}
    )
    state = load_file(folder / "adapter_model.safetensors")
    adapter = read_adapter(folder, "x", CONFIG)
    assert adapter.rank == 4 and len(adapter.products) == 2 * 4
    for layer, alpha in ((0, 6), (1, 5)):
        q, k, v = adapter.products[f"layers.{layer}.attention.qkv"]
        prefix = f"base_model.model.model.layers.{layer}.self_attn"
        for product, name, scale in ((q, "q_proj", 1.5), (k, "k_proj", alpha / 2), (v, "v_proj", 1.5)):
            assert product is not None
            np.testing.assert_array_equal(product.down, state[f"{prefix}.{name}.lora_A.weight"])
            expected = state[f"{prefix}.{name}.lora_B.weight"] * np.float32(scale)
            np.testing.assert_array_equal(product.up, expected)
    root = read_adapter(changed(folder, use_rslora=True), "x", CONFIG)
    assert root.digest != adapter.digest
    product = root.products["layers.0.attention.out"][0]
    assert product is not None
    ratio = product.up / state["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"]
    np.testing.assert_allclose(ratio, 3.0, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*\.(q_proj|down_proj)"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "mlp.down_proj"]},
        {"target_modules": ["q_proj", "down_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    ],
)
def test_targets_are_a_list_an_expression_or_all(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = adapters.write(tmp_path, CONFIG, targets=("q_proj", "down_proj"))
    adapter = read_adapter(changed(folder, **fields), "x", CONFIG)
    kinds = {path.partition(".")[2].partition(".")[2] for path in adapter.products}
    assert kinds == {"attention.qkv", "mlp.down"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora='True' is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "mlp.experts.down_proj: adapter_config.json names it"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"r": 5}, "have shapes"),
        ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "v_proj: adapter_config.json names it, and it has no"),
        ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight: adapter_config.json does not name its module"),
        ({"layers_to_transform": [0]}, "layers.1.self_attn.q_proj.lora_A.weight: adapter_config.json does not name"),
        ({"target_modules": "("}, "target_modules='(': a group without its ')' is not supported (at character 2)"),
        ({"exclude_modules": r"(q)_\1"}, r"exclude_modules='(q)_\\1': '\1' is not supported"),
        ({"rank_pattern": {"[": 4}}, "rank_pattern='[': a class without its ']' is not supported"),
        ({"alpha_pattern": {"(?i)Q": 4}}, "alpha_pattern='(?i)Q': '(?i' is not supported"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "("}, "layers_pattern='(', which is not a name"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "(layers)+"}, "Name the list of layers"),
        ({"target_modules": "q" * 5000}, "it has 5,000 characters, and 4,096 are read"),
        ({"target_modules": 5}, "'5' is not a list of names"),
        ({"exclude_modules": [5]}, "'[5]' is not a list of names"),
        ({"target_parameters": "mlp"}, "'mlp' is not a list of names"),
        ({"layers_to_transform": [[1]]}, "has what PEFT does not write"),
        ({"alpha_pattern": {"q_proj": None}}, "has what PEFT does not write"),
        ({"r": float("inf")}, "cannot convert float infinity"),
        ({"r": 0}, "a rank below 1"),
        ({"r": 10**400}, "a rank above 2,147,483,648"),
        ({"rank_pattern": {"q_proj": 10**400}}, "a rank above 2,147,483,648"),
        ({"rank_pattern": {"q_proj": 0}}, "a rank below 1"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config="),
    ],
)  # fmt: skip
def test_unsupported_or_misfit_parts_of_an_adapter_are_named(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    folder = changed(adapters.write(tmp_path, CONFIG, targets=("q_proj", "down_proj")), **fields)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, "x", CONFIG)
    assert words in str(caught.value)


@pytest.mark.parametrize("own", [False, True])
def test_modules_have_transformers_names_or_those_of_the_checkpoint(tmp_path: Path, own: bool) -> None:
    """Ling's checkpoints, and their authors' code, have other names for modules than transformers."""
    config = checkpoints.case("ling3").config
    folder = adapters.write(tmp_path / "x", config, targets=("q_proj", "f_proj", "o_proj"))
    state = load_file(folder / "adapter_model.safetensors")
    (bias,) = (name for name in state if name.endswith("layers.0.self_attn.forget_gate.f_proj.lora_B.weight"))
    expected = read_adapter(folder, "x", config)
    assert {*expected.products} == {f"layers.{layer}.attention.{end}" for layer in range(3) for end in ENDS[layer]}
    if own:
        renamed = {
            name.replace("self_attn.forget_gate", "attention").replace("self_attn", "attention"): value
            for name, value in state.items()
        }
        renamed = {name.replace("2.attention.o_proj", "2.attention.dense"): value for name, value in renamed.items()}
        save_file(renamed, folder / "adapter_model.safetensors")
        changed(folder, target_modules=["q_proj", "f_proj", "o_proj", "dense"])
    found = read_adapter(folder, "x", config)
    assert found.digest == expected.digest
    f_proj = found.products["layers.0.attention.inputs"][4]
    assert f_proj is not None
    np.testing.assert_array_equal(f_proj.up, 2 * state[bias])
    write_folder(found, tmp_path / "again", sites_of(config), "base")
    assert load_file(tmp_path / "again" / "adapter_model.safetensors").keys() == state.keys()


ENDS = {0: ("inputs", "out"), 1: ("inputs", "out"), 2: ("out",)}  # the queries of the last layer are made of a vector


def test_one_problem_is_one(tmp_path: Path) -> None:
    assert "does not fit the model (1 problem): a." in str(does_not_fit("x", ["a"]))
    assert "does not fit the model (2 problems): a; b." in str(does_not_fit("x", ["a", "b"]))


def renamed(folder: Path, change: Any) -> Path:
    """The folder with other names of its tensors; of one that gets several, all have its numbers."""
    path = folder / "adapter_model.safetensors"
    state = {new: tensor for name, tensor in load_file(path).items() for new in change(name)}
    save_file(state, path)
    return folder


def test_a_config_means_modules_by_the_names_of_the_trainers_model(tmp_path: Path) -> None:
    both = ("q_proj", "down_proj")
    plain = read_adapter(adapters.write(tmp_path / "a", CONFIG, targets=both), "x", CONFIG)
    assert plain.name == "x"
    folder = renamed(
        adapters.write(tmp_path / "b", CONFIG, targets=both),
        lambda name: [name.replace("model.model.layers", "model.model.language_model.layers")],
    )
    inner = r"model\.language_model\.layers\.\d+"
    for targets in (rf"{inner}.*\.(q|down)_proj", [f"language_model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]):
        targets = [*targets, "q_proj"] if isinstance(targets, list) else targets
        changed(folder, target_modules=targets, alpha_pattern={rf"{inner}\.self_attn\.q_proj": 80})
        adapter = read_adapter(folder, "x", CONFIG)
        for path, factor in (("layers.1.attention.qkv", 10), ("layers.1.mlp.down", 1)):
            one, other = adapter.products[path][0], plain.products[path][0]
            assert one is not None and other is not None
            np.testing.assert_allclose(one.up, other.up * factor, rtol=1e-6)
    with pytest.raises(CheckpointError, match=r"model\.language_model\.layers\.0\.self_attn\.v_proj: adapter_config"):
        read_adapter(changed(folder, target_modules=[*both, "v_proj"]), "x", CONFIG)


def test_a_whole_name_counts_in_any_layer_and_a_weight_as_its_module(tmp_path: Path) -> None:
    folder = adapters.write(tmp_path, CONFIG, targets=("q_proj",))
    whole = "model.layers.0.self_attn.q_proj"
    changed(folder, target_modules=[whole, "q_proj"], layers_to_transform=[1])
    digest = read_adapter(folder, "x", CONFIG).digest
    changed(folder, target_modules=[], target_parameters=["q_proj.weight"], layers_to_transform=None)
    assert read_adapter(folder, "x", CONFIG).digest == digest
    changed(folder, alpha_pattern={r"q_proj\.weight": 80})
    assert read_adapter(folder, "x", CONFIG).digest != digest
    with pytest.raises(CheckpointError, match=r"v_proj: adapter_config\.json names it, and it has no tensors"):
        read_adapter(changed(folder, target_parameters=["q_proj.weight", "v_proj.weight"]), "x", CONFIG)


@pytest.mark.parametrize("other", ["lora_A.reference.weight", "default"])
def test_of_two_tensors_for_one_matrix_none_is_chosen(tmp_path: Path, other: str) -> None:
    def twice(name: str) -> list[str]:
        bare = name.removeprefix("base_model.model.") if other == "default" else name.replace("lora_A.weight", other)
        return [name, bare]

    folder = renamed(adapters.write(tmp_path, CONFIG, targets=("q_proj",)), lambda name: sorted({*twice(name)}))
    for source in (folder, load_file(folder / "adapter_model.safetensors")):  # a state with several adapters, too
        with pytest.raises(CheckpointError, match="is the second lora_A of its module"):
            read_adapter(source, "x", CONFIG)


def test_every_tensor_has_to_land(tmp_path: Path) -> None:
    folder = adapters.write(tmp_path, CONFIG)
    path = folder / "adapter_model.safetensors"
    state = load_file(path)
    extra = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
    save_file({**state, extra: np.zeros((4, 32), np.float32)}, path)
    with pytest.raises(CheckpointError, match=r"layers\.9\.self_attn\.q_proj\.lora_A\.weight: is not a linear layer"):
        read_adapter(folder, "x", CONFIG)
    broken = dict(state)
    broken[next(iter(broken))][0, 0] = np.inf
    save_file(broken, path)
    with pytest.raises(CheckpointError, match="not finite"):
        read_adapter(folder, "x", CONFIG)
    path.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle can run any code"):
        read_adapter(folder, "x", CONFIG)


def test_arrays_are_those_of_any_trainer(tmp_path: Path) -> None:
    folder = adapters.write(tmp_path, CONFIG, targets=("q_proj",), lora_alpha=6)
    state, digest = load_file(folder / "adapter_model.safetensors"), read_adapter(folder, "x", CONFIG).digest
    assert read_adapter(state, "x", CONFIG, alpha=6).digest == digest
    rounded = {name: jnp.asarray(array, jnp.bfloat16) for name, array in state.items()}
    half = read_adapter(rounded, "x", CONFIG, alpha=6).digest
    inputs, outputs = CONFIG.hidden_size, (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_dim
    pair = {"lora_a": np.ones((inputs, 3), np.float32), "lora_b": np.ones((3, outputs), np.float32)}
    flat = {f"layers.0.attention.qkv.{end}": array for end, array in pair.items()}
    nested = {"layers": [{"attention": {"qkv": pair}}]}, {"layers": {0: {"attention": {"qkv": pair}}}}
    assert len({read_adapter(source, "x", CONFIG).digest for source in (flat, *nested)}) == 1
    bad: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ({**flat, "layers.0.attention.qkv.lora_a": np.float32(1)}, {}, "has shapes"),
        ({name: array[..., :0] if name.endswith("_a") else array[:0] for name, array in flat.items()}, {}, "shapes"),
        ({name: array[:0] if "_A" in name else array[:, :0] for name, array in state.items()}, {}, "a rank below 1"),
        (dict.fromkeys(state, "text"), {}, "is not one of floats"),
        ({name: array.astype(np.complex64) for name, array in flat.items()}, {}, "is not one of floats"),
        ({1: np.ones(2)}, {}, "1: is no lora_a or lora_b"),
        (state, {"alpha": "6"}, "alpha='6': is not a number"),
        (folder, {"alpha": 6}, "is for a trainer's arrays"),
    )
    for source, options, words in bad:
        with pytest.raises((CheckpointError, ConfigError), match=words):
            read_adapter(source, "x", CONFIG, **options)
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(array).requires_grad_() for name, array in state.items()}
    assert read_adapter(tensors, "x", CONFIG, alpha=6).digest == digest
    tensors = {name: tensor.detach().bfloat16() for name, tensor in tensors.items()}
    assert read_adapter(tensors, "x", CONFIG, alpha=6).digest == half


EXPONENTIAL = "(?:[a-z_.0-9]|[a-z_.0-9])*!"


@pytest.mark.usefixtures("short_turns")
def test_an_expression_that_takes_ages_elsewhere_matches_at_once(tmp_path: Path, within: Within) -> None:
    folder = adapters.write(tmp_path, CONFIG, targets=("q_proj", "down_proj"))
    config = (folder / "adapter_config.json").read_text()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"target_modules": EXPONENTIAL}, "does not name its module"),
        ({"exclude_modules": EXPONENTIAL}, ""),
        ({"rank_pattern": {EXPONENTIAL: 2}, "alpha_pattern": {EXPONENTIAL: 2}}, ""),
        ({"layers_to_transform": [0, 1], "layers_pattern": EXPONENTIAL}, "is not a name of letters"),
    )
    for fields, words in cases:
        (folder / "adapter_config.json").write_text(config)
        with within(5):
            if words:
                with pytest.raises(CheckpointError, match=words):
                    read_adapter(changed(folder, **fields), "x", CONFIG)
            else:
                assert read_adapter(changed(folder, **fields), "x", CONFIG).rank == 4


_STARTS = ("layers", "h", "model.layers", "a.b", "experts")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(_STARTS), max_size=2),
    st.lists(st.sampled_from(["model", "layers", "h", "a", "b", "a_b", "0", "12", "x1", "experts", "q"]), max_size=8),
)
def test_the_layer_of_a_module_is_the_one_that_peft_finds(starts: list[str], parts: list[str]) -> None:
    name = ".".join(parts)
    patterns = [rf"(?:^|.*?\.){start}\.(\d+)\." for start in starts] or [r".*?\.[^.]*\.(\d+)\."]
    match = next((match for match in (re.match(pattern, name) for pattern in patterns) if match), None)
    config = {"target_modules": ["q"], "layers_to_transform": 0, "layers_pattern": starts}
    assert peft.Targets(config, "x", Budget()).layer(name) == (None if match is None else int(match[1]))


def written(folder: Path, shapes: dict[str, list[int]]) -> Path:
    """The folder with tensors of these shapes, whose numbers are a hole in the file."""
    fields, offset = {}, 0
    for name, shape in shapes.items():
        nbytes = 4 * shape[0] * shape[1]
        fields[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(fields).encode()
    path = folder / "adapter_model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + offset)
    return folder


@pytest.mark.usefixtures("short_turns")
def test_nothing_is_read_before_all_shapes_are_those_of_the_model(tmp_path: Path) -> None:
    folder = adapters.write(tmp_path, CONFIG, targets=("q_proj",), rank=4)
    names = list(load_file(folder / "adapter_model.safetensors"))
    hidden = CONFIG.hidden_size
    pair = {"A": lambda rank: [rank, hidden], "B": lambda rank: [CONFIG.num_heads * CONFIG.head_dim, rank]}

    def of_rank(rank: int) -> dict[str, list[int]]:
        return {name: pair["A" if "lora_A" in name else "B"](rank) for name in names}

    most = (8 << 30) // 4 // hidden
    cases: tuple[tuple[dict[str, list[int]], int, str], ...] = (
        (of_rank(4) | {names[0]: [most, hidden]}, 4, "have shapes"),
        (of_rank(most), most, "and at most 256 are read"),
        (of_rank(4) | {"base_model.model.lm_head.lora_A.weight": [most, hidden]}, 4, r"lm_head\.lora_A\.weight: is"),
        (of_rank(4) | {f"x{number}": [1, 1] for number in range(3000)}, 4, "has 3,004 tensors, and an adapter of this"),
    )
    for shapes, rank, words in cases:
        changed(written(folder, shapes), r=rank)
        with pytest.raises(CheckpointError, match=words):
            read_adapter(folder, "x", CONFIG, fits=lambda rank: pytest.fail("shapes come first"))
    written(folder, of_rank(hidden))
    with pytest.raises(ConfigError, match="too high"):
        read_adapter(changed(folder, r=hidden), "x", CONFIG, fits=_none_fits)


def _none_fits(rank: int) -> None:
    raise ConfigError("adapter", rank, "is too high", "Train again")


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("name", ["a" * 1025, "é" * 600, "layers.0." * 100_000 + "experts.lora_A.weight"])
def test_names_of_tensors_are_bounded(tmp_path: Path, within: Within, name: str) -> None:
    folder = written(adapters.write(tmp_path, CONFIG, targets=("q_proj",)), {name: [1, 1]})
    words = r"a name of .* characters, .*at most 1,024 bytes are read"
    with within(2), pytest.raises(CheckpointError, match=words) as caught:
        read_adapter(folder, "x", CONFIG)
    assert len(str(caught.value)) < 400


def test_a_header_is_bounded_by_the_tensors_that_an_adapter_may_have(tmp_path: Path) -> None:
    """Parsing 100 MB of JSON, which any loaded adapter may bring, stopped all streams of the session for seconds."""
    folder = adapters.write(tmp_path, CONFIG)
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    raw = data[8 : 8 + length] + b" " * (3 << 20)
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"has a header of 3,.* bytes, and at most 1,.* are read"):
        read_adapter(folder, "x", CONFIG)
