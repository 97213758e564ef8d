"""Writes golden.json with transformers: `python tests/images/make_golden.py [torchvision]`.

`tests`, `toolkit` and `kernels` have to be on PYTHONPATH. With torchvision it writes the families that need it, next to
what the file has: their texts and numbers of patches, since their pixels depend on the processor's instructions.
"""

from __future__ import annotations

import json
import sys

from images.cases import CASES, GOLDEN, SIZES, TORCHVISION, digest, digest_of_text, golden, picture
from images.oracle import reference


def main() -> None:
    tensors = "torchvision" in sys.argv[1:]
    written = dict(golden()) if GOLDEN.exists() else {}
    for name, files in (TORCHVISION if tensors else CASES).items():
        written[name] = {}
        for width, height in SIZES:
            result = reference(files, picture(width, height))
            text = digest_of_text(result.text, len(result.values))
            written[name][f"{width}x{height}"] = text if tensors else digest(result.values, result.text)
    GOLDEN.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
