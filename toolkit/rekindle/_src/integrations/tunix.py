"""A rollout worker of Tunix, and the weights that its trainer has."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle._src.core.sampling import SamplingOptions
from rekindle._src.evaluation.rollouts import one_each
from rekindle._src.models.base import merge
from rekindle._src.models.plain import token_logprobs
from rekindle._src.session.session import Session, client_of
from rekindle.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:

    class BaseRollout:
        """The base class of Tunix's workers, for a package without types."""

    RolloutOutput: Any

else:
    try:
        from tunix.rl.rollout.base_rollout import BaseRollout, RolloutOutput
    except ImportError as error:
        raise MissingExtra("google-tunix", "tunix") from error


class RekindleRollout(BaseRollout):
    """A session as a rollout worker: prompts to completions with log-probabilities, and a trainer's weights to it.

    The trainer's model is the module of the session's own graph, `worker.model()`; its parameters become the session's
    weights without a copy. Prompts are padded on the left by `pad_id()`; completions come as they are, as Tunix 0.1.7
    has them.
    """

    def __init__(self, session: Session, *, pad_id: int | None = None, **_: Any) -> None:
        """Roll out in an open session; `pad_id` pads, by default the token that ends a sequence.

        Other arguments, which Tunix has for its own samplers, mean nothing here.
        """
        self._session, self._pad_id = session, pad_id
        device = client_of(session).engine.device
        if not device.has_weights:
            raise InvalidRequest("session", repr(session), "has no weights of its own", "Make it with rekindle.open")
        model = device.model
        self._model: Any = merge(model.graph, model.leaves)

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> Any:
        """Return Tunix's `RolloutOutput` of one completion for each prompt. It has no logits."""
        config = rollout_config
        options: SamplingOptions = {"max_tokens": config.max_tokens_to_generate, "temperature": config.temperature}
        if config.top_p is not None:
            options["top_p"] = config.top_p
        if config.top_k is not None and config.top_k > 0:
            options["top_k"] = config.top_k
        if config.seed is not None:
            options["seed"] = _seed(config.seed)
        if getattr(config, "eos_tokens", None):
            options["stop_token_ids"] = list(config.eos_tokens)
        width = config.max_prompt_length
        encode = self._session.tokenizer.encode
        ids = [encode(prompt)[-width:] for prompt in prompts]  # Tunix keeps the end of a long prompt, too
        done = one_each(self._session, ids, options)
        padded = np.full((len(done), width), self.pad_id(), np.int32)
        for line, own in enumerate(ids):
            padded[line, width - len(own) :] = own
        return RolloutOutput(
            text=[one.text for one in done],
            logits=None,
            tokens=[np.asarray(one.token_ids, np.int32) for one in done],
            left_padded_prompt_tokens=padded,
            logprobs=[np.asarray([entry.logprob for entry in one.logprobs or ()], np.float32) for one in done],
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array, completion_mask: jax.Array | None = None
    ) -> jax.Array:
        """Compute the log-probability [B, T] of each completion's tokens by the session's weights; 0 where masked."""
        from flax import nnx

        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad, width = self.pad_id(), prompts.shape[1]
        # Positions count from a prompt's first token, so padding moves from its left to the completion's right.
        starts = (prompts != pad).argmax(axis=1)
        lines = np.concatenate([prompts, completions, np.full_like(prompts, pad)], axis=1)
        places = starts[:, None] + np.arange(width + completions.shape[1])
        moved = np.take_along_axis(lines, places, axis=1)
        every = np.asarray(_logprobs(*nnx.split(self._model), jnp.asarray(moved)))
        inside = (width - starts)[:, None] + np.arange(completions.shape[1])
        result = np.take_along_axis(every, inside, axis=1)
        if completion_mask is None:  # up to the first token that ends a sequence, which is part of it
            ends = np.isin(completions, list(self._session.tokenizer.eos_ids))
            inside_mask: Any = np.cumsum(ends, axis=1) - ends == 0
        else:
            inside_mask = np.asarray(completion_mask) != 0
        return jnp.asarray(np.where(inside_mask, result, 0.0))

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Make a trainer's parameters, an nnx state of all of them, the session's weights."""
        from flax import nnx

        nnx.update(self._model, params)
        self._session.swap_weights(nnx.state(self._model, nnx.Param)).result_sync()

    def pad_id(self) -> int:
        """Return the token that pads."""
        return self.eos_id() if self._pad_id is None else self._pad_id

    def eos_id(self) -> int:
        """Return the first token that ends a sequence."""
        return int(next(iter(self._session.tokenizer.eos_ids)))

    def model(self) -> Any:
        """Return the module that has the session's parameters."""
        return self._model


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(graph: Any, state: Any, tokens: jax.Array) -> jax.Array:
    from flax import nnx

    return token_logprobs(nnx.merge(graph, state), tokens)


def _seed(seed: Any) -> int:
    """Return an int of a seed or a key of JAX."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return int(np.asarray(seed, np.int64).reshape(-1)[-1])
