"""Late masks: which tokens each row of a step may choose, known once the tokens of the step before have been read.

The host fills the masks while the model of the step runs. A program that can wait takes them after the model, through a
gate. Where no program can wait, such a step is two programs, up to the logits and the choice. Steps with late masks
have sizes of their own.

Axes: N rows, V vocabulary, W = ceil(V / 32) words of a mask. All bits are set in a row that may choose any token.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.records import Mask, Request, Row, RowResult, StepPlan, mask_words
from rekindle._src.programs.request_state import BIAS_LIMIT
from rekindle._src.programs.row_option import RowOption
from rekindle._src.programs.sampling import Choose, Take
from rekindle.errors import InvalidRequest, RekindleError
from rekindle_kernels import gated_masks

NO_TOKEN = -2  # read by the host in place of a token where mask and options together leave none


class LateMasks(RowOption):
    """The late masks of a session's steps. This class has none to fill; it is the base of all others."""

    def operand_width(self, vocab_size: int) -> int:
        """Return the integers of a row's mask."""
        return mask_words(vocab_size)

    def wait(self, gate: Array, logits: Array) -> Array:
        """Return the masks of a program that waits, from its gate, once the logits are computed."""
        return gated_masks(gate, logits)

    def take(self, masks: Array) -> Take:
        """Return a function for tokens [N] that the masks [N, W] allow, and their logits; minus infinity is "never"."""

        def take(logits: Array, choose: Choose) -> tuple[Array, Array]:
            tokens = choose(logits, masks)
            words = jnp.take_along_axis(masks, tokens[:, None] >> 5, axis=1)[:, 0]
            chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
            return tokens, jnp.where((words >> (tokens & 31)) & 1 != 0, chosen, -jnp.inf)

        return take

    def allow(self, logits: Array, masks: Array) -> Array:
        """Return the logits [N, V], minus infinity where the masks [N, W] allow no token."""
        bits = (masks[:, :, None] >> lax.iota(jnp.int32, 32)) & 1
        allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
        return jnp.where(allowed != 0, logits, -jnp.inf)

    def mark(self, tokens: Array, masks: Array, values: Array) -> Array:
        """Return `tokens` [N], with NO_TOKEN in rows with a mask that chose a token with a logit meaning "never".

        Where all logits are minus infinity a token is chosen nevertheless, and an infinite bias is a finite number.
        """
        never = values < -BIAS_LIMIT / 2
        dead = lax.cond(jnp.any(never), lambda: never & jnp.any(masks != -1, axis=1), lambda: never)
        return jnp.where(dead, NO_TOKEN, tokens)

    # -- on the host

    def check(self, request: Request) -> None:
        """Check a request that enters a slot. Raises `InvalidRequest` if it needs masks, and there are none to fill."""
        for kind, extension in request.extensions.items():
            if extension.needs_masks:
                raise InvalidRequest(
                    "request", request.id, f"its {kind.__name__} needs late masks, and these programs have none",
                    "Make programs from a plan with its capability, as Programs.open(plan) does",
                )  # fmt: skip

    def in_plan(self, plan: StepPlan) -> bool:
        return False

    def needs_unread_token(self, plan: StepPlan) -> bool:
        """True if a mask of the plan needs a token that has not been read yet."""
        return False

    def fill(self, plan: StepPlan, rows: int, masks: Mask) -> dict[str, Exception]:
        """Write the masks [N, W] of a plan's rows, where the program has so many decode `rows`.

        Return the errors of requests that can't continue.
        """
        masks.fill(-1)
        return {}

    def advance(
        self, plan: StepPlan, results: tuple[RowResult, ...], errors: dict[str, Exception]
    ) -> tuple[RowResult, ...]:
        """Take the tokens of a step. Return its results; `errors` were returned by `fill`."""
        return results

    def no_token(self, row: Row) -> RekindleError:
        """Return the error of a row for which its mask and the request's other options leave no token."""
        raise NotImplementedError


NO_MASKS = LateMasks()
