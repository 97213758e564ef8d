"""What a model needs on a mesh, on paper, compared with sums that can be done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import checkpoints, gguf_files
from helpers.thorough import by_default
from rekindle._src.bench.plan import (
    DEVICES,
    PLANNED,
    DeviceSpec,
    make_plan,
    shape_config,
    stored_in_groups,
    stored_model,
)
from rekindle._src.cli.main import main
from rekindle._src.models.partition import Partition
from rekindle._src.opening.resolve import PAGE_SIZES
from rekindle.errors import ConfigError

CONFIG = shape_config("70b")[0]


@pytest.mark.thorough
def test_a_70b_model_does_not_fit_one_h100_and_fits_eight() -> None:
    one, eight = (make_plan(CONFIG, Partition(count), DEVICES["H100"]) for count in (1, 8))
    assert one.weight_bytes == pytest.approx(70.55e9 * 2, rel=0.001)  # the published number of parameters
    assert not one.fits and one.free_bytes < 0 and one.kv_tokens == 0
    assert eight.weight_bytes == pytest.approx(one.weight_bytes / 8, rel=0.001)
    assert eight.fits and eight.kv_tokens == eight.free_bytes // eight.token_bytes
    # keys and values, 80 layers, one head of 128 on each device, two bytes
    assert eight.token_bytes == 2 * 80 * 1 * 128 * 2


def test_keys_and_values_take_the_bytes_of_their_format() -> None:
    tokens = {
        kind: make_plan(CONFIG, Partition(8), DEVICES["H100"], kv_dtype=kind).token_bytes
        for kind in ("bfloat16", "int8", "int8-int4", "int4")
    }
    # 80 layers, one head of 128 on each device, two scales of four bytes
    assert tokens == {
        "bfloat16": 80 * 512, "int8": 80 * (256 + 8), "int8-int4": 80 * (192 + 8), "int4": 80 * (128 + 8)
    }  # fmt: skip


def test_a_step_of_one_row_reads_the_weights_once() -> None:
    found = make_plan(CONFIG, Partition(8), DeviceSpec(80, 1000, 1e6, 1e6, 1e6, latency=0), context=1)
    embedding = 128256 * 8192 * 2 / 8
    assert found.alone_seconds == pytest.approx((found.weight_bytes - embedding) / 1e12, rel=0.001)


def test_sums_over_devices_cost_their_latency_in_each_layer() -> None:
    slow = make_plan(CONFIG, Partition(8), DeviceSpec(80, 1000, 1e6, 1e6, 1e9, latency=100))
    assert slow.sum_seconds == pytest.approx((2 * 80 + 2) * 100e-6, rel=0.001)
    assert make_plan(CONFIG, Partition(1), DEVICES["H100"]).sum_seconds == 0


def test_kv_heads_beyond_those_there_are_take_memory_on_every_device() -> None:
    assert make_plan(CONFIG, Partition(8), DEVICES["H100"]).token_bytes == (
        make_plan(CONFIG, Partition(16), DEVICES["H100"]).token_bytes
    )


def test_experts_are_read_as_far_as_they_are_chosen() -> None:
    config = shape_config("30b-a3b")[0]
    found = make_plan(config, Partition(2, 4), DEVICES["H100"])
    assert found.weight_bytes == pytest.approx(30.5e9 * 2 / 8, rel=0.02)
    assert found.read_bytes == pytest.approx(3.3e9 * 2 / 8, rel=0.05)  # the published number of active parameters


def test_int8_halves_the_weights() -> None:
    full, half = (make_plan(CONFIG, Partition(4), DEVICES["H100"], quantize=q) for q in (None, "int8"))
    assert half.weight_bytes == pytest.approx(full.weight_bytes / 2, rel=0.01)


@pytest.mark.parametrize("shape", by_default(sorted(PLANNED), 2))
def test_every_shape_has_a_plan(shape: str) -> None:
    config, dtype = shape_config(shape)
    found = make_plan(config, Partition(1), DEVICES["H200"], dtype=dtype)
    assert found.weight_bytes > 0 and found.many_seconds >= found.alone_seconds > 0


def test_a_folder_is_planned_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PLANNED["8b"], "torch_dtype": "float32"}))
    config, dtype = shape_config(str(tmp_path))
    assert config.num_layers == 32 and dtype == "float32"


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="Use a folder, or one of micro"):
        shape_config("9000b")
    assert main(["doctor", "--plan", "70b", "--device", "abacus"]) == 1
    assert "Use one of A100, H100" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--plan", "70b", "--mesh", "many"])
    assert "Use --mesh 4, --mesh model=4,expert=2, or --mesh data=2,model=4" in capsys.readouterr().err


def test_the_doctor_tells_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "70b", "--mesh", "8", "--device", "h100"]) == 0
    told = capsys.readouterr().out
    assert "weights take 17.6 GB on each device, of 72.0 GB" in told
    assert "a bound on paper, not a measurement" in told
    assert main(["doctor", "--plan", "70b"]) == 1
    assert "Use more devices" in capsys.readouterr().out


def test_the_doctor_says_how_many_devices_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--mesh", "64"]) == 1
    assert "--mesh needs 64, and there are" in capsys.readouterr().out


def test_a_gguf_file_is_planned_by_its_metadata(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "folder", checkpoints.CASES["qwen3"])
    config, dtype = shape_config(str(gguf_files.convert(folder, tmp_path / "model.gguf", "bf16")))
    assert (config.model_type, config.head_dim, dtype) == ("qwen3", 12, "bfloat16")


@pytest.mark.thorough
def test_four_bits_of_a_file_are_planned_as_they_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {**PLANNED["micro"], "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
    file = gguf_files.of_types(tmp_path / "model.gguf", raw, lambda name: "Q4_0")
    numbers = 32000 * 1024 + 2 * (3 * 1024 * 4096 + 1024 * (1024 + 1024 + 512 + 512))  # without norms
    config, dtype = shape_config(str(file))
    kinds = stored_in_groups(stored_model(str(file)), config, divided=False)
    found = make_plan(config, Partition(1), DEVICES["H100"], dtype=dtype, kinds=kinds)
    assert found.weight_bytes == pytest.approx(numbers * 4.5 / 8, rel=0.1), "with a scale of 16 bits for 32 of them"
    assert main(["doctor", "--plan", str(file)]) == 0
    assert f"weights take {found.weight_bytes / 1e9:.1f} GB" in capsys.readouterr().out
    assert stored_in_groups(stored_model("micro"), config, divided=False) == ()


def test_data_shards_have_the_whole_model_and_rows_of_their_own() -> None:
    one, two = (make_plan(CONFIG, Partition(4), DEVICES["H100"], context=4096, shards=shards) for shards in (1, 2))
    assert (one.devices, two.devices) == (4, 8)
    assert (two.weight_bytes, two.token_bytes, two.pages) == (one.weight_bytes, one.token_bytes, one.pages)
    # two kv heads of 128 on each device, 80 layers, two bytes, 64 tokens
    assert one.pages == one.free_bytes // (2 * 80 * 2 * 128 * 2 * 64)
    assert two.kv_tokens == one.kv_tokens and two.contexts == 2 * one.contexts
    assert two.alone_seconds == one.alone_seconds and two.many_seconds < one.many_seconds
    half = make_plan(CONFIG, Partition(4), DeviceSpec(80, 1000, 1e9, 1e9, 1e9, latency=0), context=1, shards=64)
    assert half.many_seconds == pytest.approx(half.alone_seconds), "64 rows are one for each of 64 shards"


def test_pages_have_the_sizes_that_sessions_choose_there() -> None:
    for name, spec in DEVICES.items():
        assert spec.page_size == PAGE_SIZES["tpu" if name.startswith("v") else "gpu"]


def test_the_doctor_tells_what_each_data_shard_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "70b", "--mesh", "data=2,model=4", "--device", "H100"]) == 0
    told = capsys.readouterr().out
    found = make_plan(CONFIG, Partition(4), DEVICES["H100"], context=8192, shards=2)
    assert "70b on 8 × H100 in 2 data shards of 4: weights take 35.3 GB on each device, of 72.0 GB" in told
    assert f"{found.kv_tokens:,} tokens fit next to them (81,920 bytes of each on a device)" in told
    assert f"in {found.pages:,} pages of 64 of each data shard, {2 * found.kv_tokens:,} in all" in told
    assert f"{found.contexts:,} requests of 8,192 tokens" in told
