"""Reading a range of a file into given memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import CheckpointError


def read_exactly(path: Path, name: str, offset: int, out: NDArray[Any]) -> None:
    """Fill the contiguous `out` with a file's bytes from `offset` on; the GIL is free while it reads.

    Raise `CheckpointError`, with `name` in its message, if the file can't be read or ends before.
    """
    rest = out.reshape(-1).view(np.uint8).data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise broken(path, f"it ends {len(rest):,} bytes early within {name}")
                rest = rest[count:]
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error}). Check the disk, or copy it again.") from error


def broken(path: Path, problem: str) -> CheckpointError:
    """Return the error for a file that doesn't hold what it should."""
    return CheckpointError(f"{path} is truncated or corrupt: {problem}. Download or copy it again.")
