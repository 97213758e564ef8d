"""Releases of transformers side by side, and what each of them saves.

    python tests/helpers/transformers_versions.py FOLDER

installs them, each alone in a folder, over one Python that has torch. `save` runs one of them: it writes a small random
model of every family that it knows as it saves it, with the logits that it computes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "REKINDLE_TRANSFORMERS"
# The first that is supported, those that changed how something is saved, and the newest whose requirements are older.
# These need an older package for the hub and older tokenizers.
VERSIONS = ("5.2.0", "5.5.4", "5.9.0", "5.15.1")
NEEDED = ("huggingface_hub>=1.5,<2", "tokenizers==0.22.2")
LOGITS, REASONS = "logits.npy", "reasons.json"
PROMPT = [(7 * place) % 150 + 3 for place in range(24)]


# Cases by the first release tried that computes as the models' authors do; the one before it does not.
OTHERWISE = {
    "deepseek-v2": ((5, 15), "YaRN's factor of the scores was left out"),
    "granite4": ((5, 24), "the norm of a state was over all of its groups together"),
}
# Those that read keys of the case's config.json in another way, and save what they read.
READ_OTHERWISE = {
    "olmo3": ((5, 15), "without rope_theta, the base was another"),
    "olmo3-scaled-global-rope": ((5, 15), "layers with a window had the scaled rope of the others"),
}
# Cases by the first release tried that can make them, and what the one before it says.
UNABLE = {
    "deepseek-v2-groups": ((5, 15), "has no attribute 'num_experts'"),
    "granite4-dense": ((5, 9), "has_previous_state"),
    "nemotron-h": ((5, 9), "'-'"),  # no layer was an MLP
    "nemotron-h-experts-of-latent-vectors": ((5, 9), "`layer_types` entries must be in"),
}


def release(version: str) -> tuple[int, int]:
    """The minor release of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def reason(table: Mapping[str, tuple[tuple[int, int], str]], name: str, version: str) -> str | None:
    """Why a release can't be compared with on a case; None if it can."""
    first, why = table.get(name, ((0, 0), ""))
    return why if release(version) < first else None


def older_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the names of layers that releases before 5.15 take."""
    older = {"linear_attention": "mamba", "full_attention": "attention"}
    key = "layers_block_type"
    return {**raw, key: [older.get(name, name) for name in raw[key]]} if key in raw else dict(raw)


def install(folder: Path) -> None:
    """Install the releases that are not there yet."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    for version in VERSIONS:
        place = folder / version
        if not place.exists():
            subprocess.run([*pip, "--target", str(place), f"transformers=={version}", *NEEDED], check=True)


def save(environment: Path | None, folder: Path) -> dict[str, str]:
    """Write each family's model into a folder of its case's name; returns why some cases have none, in words.

    Without an environment, the installed release does.
    """
    paths = [str(Path(__file__).parents[1]), *([] if environment is None else [str(environment)])]
    existing = os.environ.get("PYTHONPATH")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([existing] if existing else [])])}
    code = "import sys, pathlib, helpers.transformers_versions as v; v._save_all(pathlib.Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads((folder / REASONS).read_text()))


def _save_all(folder: Path) -> None:
    import transformers

    from helpers.families import FAMILY_CASES

    transformers.logging.set_verbosity_error()
    reasons = {}
    for family in FAMILY_CASES.values():
        for name, raw in family.cases.items():
            try:
                _save(folder / name, raw)
            except Exception as error:
                reasons[name] = f"{type(error).__name__}: {error}"[:200]
    (folder / REASONS).write_text(json.dumps(reasons))


def _save(folder: Path, raw: Mapping[str, Any]) -> None:
    import numpy as np
    import torch
    import transformers

    torch.manual_seed(3)
    raw = raw if release(transformers.__version__) >= (5, 15) else older_names(raw)
    config = transformers.AutoConfig.for_model(**raw)
    kind = getattr(transformers, raw["architectures"][0])
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("dt_bias"):
                # Long steps: Nemotron-H takes none below `time_step_min` here, which its authors' kernels don't know.
                parameter.copy_(0.2 * noise)
            elif parameter.dim() > 1:
                parameter.copy_(1.6 * parameter.shape[-1] ** -0.5 * noise)
            else:
                parameter.add_(0.2 * noise)
        logits = model(torch.tensor([PROMPT])).logits[0].float().numpy()
    model.save_pretrained(folder)
    np.save(folder / LOGITS, logits)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
