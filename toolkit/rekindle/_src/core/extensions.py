"""The extensions of requests that need no more than the records do. `RequestTaps` is another one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rekindle._src.core.extension import Extension

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rekindle._src.core.records import GuideLike


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Guidance(Extension):
    """A guide decides how the text may go on. It changes with each token, on the device's thread."""

    guide: GuideLike

    def resume(self, token_ids: NDArray[np.int32]) -> None:
        for token in token_ids.tolist():
            self.guide.consume(token)

    def another(self) -> Guidance:
        return Guidance(self.guide.copy())
