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


class Saved(NamedTuple):
    """The folder of a case as each release saved it, and why one did not."""

    folders: dict[str, Path]
    reasons: dict[str, dict[str, str]]  # by release and case


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    pytest.importorskip("torch")
    newest = pytest.importorskip("transformers").__version__
    installed = os.environ.get(versions.FOLDER)
    others = versions.VERSIONS if installed else ()
    environments = {newest: None, **{version: Path(installed or "") / version for version in others}}
    folders = {version: tmp_path_factory.mktemp("saved") for version in environments}
    reasons = {version: versions.save(place, folders[version]) for version, place in environments.items()}
    return Saved(folders, reasons)


@pytest.mark.parametrize("name", checkpoints.CASES)
def test_it_opens_and_computes_the_same(name: str, saved: Saved) -> None:
    for version, folder in saved.folders.items():
        said = saved.reasons[version].get(name)
        if said is not None:
            unknown, why = "Unrecognized model identifier", versions.reason(versions.UNABLE, name, version)
            assert unknown in said or (why is not None and why in said), f"{version}: {said}"
            continue
        model = checkpoint.load(folder / name, dtype="float32")
        logits, _ = reference.prefill(model, versions.PROMPT, reference.empty_cache(model, len(versions.PROMPT)))
        expected = np.load(folder / name / versions.LOGITS)
        off = np.abs(np.asarray(logits) - expected).max() / expected.std()
        otherwise = versions.reason(versions.OTHERWISE, name, version)
        assert (off <= TOLERANCE) == (otherwise is None), f"{version}: {off:.1e} off, {otherwise}: {folder / name}"
