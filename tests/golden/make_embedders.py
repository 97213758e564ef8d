"""Writes `embedders.npz` next to this file: what sentence-transformers computes for the cases of `helpers.embedders`.

    python tests/golden/make_embedders.py

needs torch, transformers and sentence-transformers; the tests that read the file need none of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def main() -> None:
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "toolkit"), str(HERE.parents[1] / "kernels")]
    from sentence_transformers import SentenceTransformer

    from helpers import embedders

    arrays: dict[str, Any] = {}
    for name in embedders.CASES:
        with tempfile.TemporaryDirectory() as folder:
            options = {"attn_implementation": "eager", "dtype": "float32"}
            made: Any = SentenceTransformer(
                str(embedders.write(Path(folder), name)), device="cpu", model_kwargs=options
            )
            texts = embedders.texts()
            arrays[f"{name}/own"] = made.encode(texts, batch_size=3)
            arrays[f"{name}/query"] = made.encode(texts[:3], prompt_name="query")
            plain = dict.fromkeys(embedders.PROMPTS, "")
            made.prompts, made.default_prompt_name = plain, None
            arrays[f"{name}/plain"] = made.encode(texts, batch_size=8)
        print(name, arrays[f"{name}/own"].shape, float(np.abs(arrays[f"{name}/own"]).mean()))
    np.savez_compressed(HERE / "embedders.npz", **arrays)


if __name__ == "__main__":
    main()
