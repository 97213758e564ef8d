"""What tests of single tasks put into their streams and take out of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Submission
from rekindle._src.dispatch.threads import Mailbox


def submission(text: str | None = "abc", ids: list[int] | None = None, **sampling: Any) -> Submission:
    options = Sampling(**sampling)
    token_ids = None if ids is None else np.asarray(ids, np.int32)
    return Submission("s", text if ids is None else None, token_ids, True, options, Mailbox(options.n), 1.0)


async def rest(stream: Any) -> list[Any]:
    """Everything that is in a stream whose senders are gone."""
    async with stream:
        return [message async for message in stream]
