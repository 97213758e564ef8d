"""Attention whose keys and values are made of one vector for each token, and of a part of the key that is rotated.

Pages keep these two alone. A query is multiplied by the matrix that would make its head's keys, and the weighted sum of
vectors by the one that would make its values; neither keys nor values are ever there.

T tokens, H query heads, P plain and R rotated size of a head's query, V size of a value, C size of the vector.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.nn.decoders import SparseBlock
from rekindle._src.models.nn.layers import Attend, RopeTables
from rekindle._src.models.nn.linear import Linear, RMSNorm, parameter
from rekindle._src.models.precision import Precision


class LatentAttention(nnx.Module):
    """An attention layer over latent pages. Queries may be made of a vector, too."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        spec, rope, E, H = config.latent, config.attention[layer].rope, config.hidden_size, config.num_heads
        assert spec is not None, "the layer has latent pages"
        assert rope is not None, "the layer rotates"
        queries = H * (spec.plain_size + spec.rotated_size)
        self.first = spec.query_rank or queries  # rows of the input's product that make queries
        self.inputs = Linear(self.first + spec.rank + spec.rotated_size, E, precision, bias=config.qkv_bias)
        self.query_norm = nnx.data(RMSNorm(self.first, spec.eps, precision) if spec.query_rank else None)
        self.query = nnx.data(Linear(queries, self.first, precision) if spec.query_rank else None)
        self.norm = RMSNorm(spec.rank, spec.eps, precision)
        self.up = parameter((H * (spec.plain_size + spec.value_size), spec.rank), precision.weights)
        self.out = Linear(E, H * spec.value_size, precision, bias=config.o_bias, partial=True)
        self.spec, self.rope, self.heads, self.layer = spec, rope, H, layer

    def __call__(
        self,
        x: jax.Array,
        tables: RopeTables,
        attend: Attend,
        residual: jax.Array | None = None,
        norm: RMSNorm | None = None,
    ) -> jax.Array:
        """Compute the attention of norm(x), plus `residual`."""
        spec, H, T = self.spec, self.heads, x.shape[0]
        made = self.inputs(x, norm=norm)
        q, vector, key = jnp.split(made, [self.first, self.first + spec.rank], axis=-1)
        q = q if self.query is None else self.query(q, norm=self.query_norm)
        q = q.reshape(T, H, -1)
        turned = jnp.concatenate([q[..., spec.plain_size :], key[:, None]], axis=1)
        turned = tables.rotated(turned, self.rope)
        up = self.up[...].reshape(H, -1, spec.rank)
        queries = [_by_head("thp,hpc->thc", q[..., : spec.plain_size], up[:, : spec.plain_size]), turned[:, :H]]
        keys = [self.norm(vector), turned[:, H]]
        with jax.named_scope("attend"):
            y = attend(self.layer, jnp.concatenate(queries, axis=-1), jnp.concatenate(keys, axis=-1)[:, None], None)
        y = _by_head("thc,hvc->thv", y, up[:, spec.plain_size :])
        return self.out(y.reshape(T, -1).astype(x.dtype), residual=residual)


class LatentBlock(SparseBlock):
    """A block with such attention, and experts where the config has them."""

    def make_attention(self, config: ModelConfig, layer: int, precision: Precision) -> LatentAttention:  # type: ignore[override]
        return LatentAttention(config, layer, precision)


def _by_head(subscripts: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply each head by a matrix of its own, in x's dtype."""
    narrow = x.astype(weights.dtype)
    wide = jnp.einsum(subscripts, narrow, weights, preferred_element_type=jnp.float32, precision="highest")
    return wide.astype(x.dtype)
