"""Adapters as folders of PEFT, which `load_adapter` and PEFT itself read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rekindle._src.models.adapters.adapter import Adapter, Matrix
from rekindle._src.models.adapters.peft import TRAINING
from rekindle._src.models.adapters.sites import Sites
from rekindle._src.models.loading import tensor_files

_OF_MODEL = "base_model.model"  # how PEFT's names of modules begin


def write_folder(adapter: Adapter, folder: Path, sites: Sites, base: str) -> None:
    """Write an adapter of the model `base` into a new folder. Its scale is in its matrices, so that PEFT's is 1."""
    tensors: dict[str, Matrix] = {}
    ranks: dict[str, int] = {}
    for site in sites.sites:
        for module, product in zip(site.modules, adapter.products.get(site.path, ()), strict=False):
            if product is not None:
                ranks[module] = len(product.down)
                tensors[f"{_OF_MODEL}.{module}.lora_A.weight"] = product.down
                tensors[f"{_OF_MODEL}.{module}.lora_B.weight"] = product.up
    others = {module: rank for module, rank in ranks.items() if rank != adapter.rank}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "bias": "none", "fan_in_fan_out": False, "lora_dropout": 0.0, "r": adapter.rank, "lora_alpha": adapter.rank,
        "target_modules": [*ranks], "rank_pattern": others, "alpha_pattern": others,
    }  # fmt: skip
    folder.mkdir()
    try:
        tensor_files.write(folder / "adapter_model.safetensors", tensors, tensors.values(), metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        if adapter.trained_on:
            training = {"base": base, "weights": adapter.trained_on}
            (folder / TRAINING).write_text(json.dumps(training, indent=2) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # so that it can be written again
        raise
