"""What other releases of transformers save opens here, and computes what they computed: names and keys change.

`python tests/helpers/transformers_versions.py FOLDER` installs the releases, and $REKINDLE_TRANSFORMERS names that
folder. Without it the installed release saves.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from helpers import checkpoints
from helpers import transformers_versions as versions
from rekindle._src.models.loading import checkpoint
from workshop import reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TOLERANCE = 2e-4  # of the logits' standard deviation
INSTALLED = "installed"
# Cases that older releases compute in another way than the models' authors do, and than newer releases do.
OTHERWISE = {
    "deepseek-v2": "before 5.13 without YaRN's factor of the scores",
    "granite4": "the norm after a state was over all groups together",
    "olmo3-scaled-global-rope": "layers with a window had the scaled rope of the others",
}
# Cases that older releases can't make.
UNABLE = {
    "deepseek-v2-groups": "has no attribute 'num_experts'",
    "granite4-dense": "has_previous_state",
    "nemotron-h": "'-'",  # there were no layers of an MLP
    "nemotron-h-experts-of-latent-vectors": "invalid types: {'mlp'}",
}


class Saved(NamedTuple):
    """The folder of a case as each release saved it, and why one did not."""

    folders: dict[str, Path]
    reasons: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    installed = os.environ.get(versions.FOLDER)
    environments: dict[str, Path | None] = {INSTALLED: None}
    if installed is not None:
        environments |= {version: Path(installed) / version for version in versions.VERSIONS}
    folders = {version: tmp_path_factory.mktemp("saved") for version in environments}
    reasons = {version: versions.save(place, folders[version]) for version, place in environments.items()}
    return Saved(folders, reasons)


@pytest.mark.parametrize("name", checkpoints.CASES)
def test_it_opens_and_computes_the_same(name: str, saved: Saved) -> None:
    for version, folder in saved.folders.items():
        reason = saved.reasons[version].get(name)
        if reason is not None:
            known = reason.startswith("ValueError: Unrecognized model identifier")
            assert version != INSTALLED and (known or UNABLE.get(name, reason + ".") in reason), f"{version}: {reason}"
            continue
        model = checkpoint.load(folder / name, dtype="float32")
        logits, _ = reference.prefill(model, versions.PROMPT, reference.empty_cache(model, len(versions.PROMPT)))
        expected = np.load(folder / name / versions.LOGITS)
        off = np.abs(np.asarray(logits) - expected).max() / expected.std()
        if version in versions.VERSIONS and name in OTHERWISE:
            continue
        assert off <= TOLERANCE, f"{version} saved {name}, which is {off:.1e} off: {folder / name}"
