"""The decoders of families, and the blocks that they consist of. A family's file says which of them is its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rekindle._src.models.config import Cache, ModelConfig, Multipliers
from rekindle._src.models.hooks import Listener, heard
from rekindle._src.models.nn.forward import Attend, ForwardPass, RopeTables
from rekindle._src.models.nn.layers import (
    Attention,
    GatedMlp,
    LayerNorm,
    MultipliedMlp,
    PlainMlp,
    QkNormAttention,
    XieluMlp,
    soft_cap,
)
from rekindle._src.models.nn.linear import Embedding, Linear, RMSNorm, head_logits, norm_rows, parameter
from rekindle._src.models.nn.moe import Experts, ScaledExperts
from rekindle._src.models.nn.recurrent import (
    ChannelDeltaNet,
    GatedAttention,
    GatedDeltaNet,
    HeadGatedAttention,
    ShortConvolution,
    StateSpace,
)
from rekindle._src.models.precision import Precision, Shards
from rekindle_kernels import activate, current_platform, gated


class Block(nnx.Module):
    """One layer: a norm and attention, a norm and the MLP, each added to the residual stream."""

    attention_type: type[Any] = Attention
    state_type: type[Any] | None = None  # in place of attention where the config has a state

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        kind = self.attention_type if self.state_type is None or config.states[layer] is None else self.state_type
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.attention = kind(config, layer, precision)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.mlp = self.make_mlp(config, layer, precision)

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        return GatedMlp(config, precision)

    def __call__(self, x: Array, step: ForwardPass) -> Array:
        with jax.named_scope("attention"):
            x = step.add("attention", self.attention, x, self.attention_norm)
        with jax.named_scope("mlp"):
            return step.add("mlp", self.mlp, x, self.mlp_norm)


class QkNormBlock(Block):
    """A block with norms over each head of q and k."""

    attention_type = QkNormAttention


class SparseBlock(Block):
    """A block with experts where the config has them, and a gated MLP in the other layers."""

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        spec = config.moe[layer] if config.moe else None
        return GatedMlp(config, precision) if spec is None else Experts(config, spec, precision)


class QkNormSparseBlock(QkNormBlock, SparseBlock):
    """A block with experts where the config has them, and norms over each head of q and k."""


class SandwichBlock(Block):
    """A block with norms before and after attention, and before and after the MLP."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        self.attention_out_norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.mlp_out_norm = RMSNorm(config.hidden_size, config.norm_eps, precision)

    def __call__(self, x: Array, step: ForwardPass) -> Array:
        with jax.named_scope("attention"):
            x = self.attention_out_norm.add(step.output("attention", self.attention, x, self.attention_norm), x)
        with jax.named_scope("mlp"):
            return self.mlp_out_norm.add(step.output("mlp", self.mlp, x, self.mlp_norm), x)


class QkNormSandwichBlock(QkNormBlock, SandwichBlock):
    """A block with norms around attention and the MLP, and over each head of q and k."""


class WideNormAttention(Attention):
    """Attention with one norm over all heads of q together and one over all heads of k."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.norm_eps, precision)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps, precision)
        self.shards = precision.shards

    def normed(self, qkv: Array) -> Array:
        qk = qkv[..., : self.heads + self.kv_heads, :]
        wide = qk.reshape(*qk.shape[:-2], -1)
        split = self.heads * self.head_dim
        if self.shards is not None:
            return self._normed_over_devices(wide, split, self.shards).reshape(qk.shape)
        parts = [self.q_norm(wide[..., :split]), self.k_norm(wide[..., split:])]
        return jnp.concatenate(parts, axis=-1).reshape(qk.shape)

    def _normed_over_devices(self, wide: Array, split: int, shards: Shards) -> Array:
        """Norm heads that are divided: all devices have equally many, so the mean of their means is the mean."""
        parts = [part.astype(jnp.float32) for part in (wide[..., :split], wide[..., split:])]
        means = shards.mean(jnp.stack([jnp.mean(part * part, axis=-1) for part in parts]))
        outputs = [
            part * jax.lax.rsqrt(mean + norm.eps)[..., None] * norm.weight[...]
            for part, mean, norm in zip(parts, means, (self.q_norm, self.k_norm), strict=True)
        ]
        return jnp.concatenate(outputs, axis=-1).astype(wide.dtype)


class CorrectedBlock(SparseBlock):
    """A block with experts that store their correction as a matrix of one row."""

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        mlp = super().make_mlp(config, layer, precision)
        if isinstance(mlp, Experts):
            mlp.correction = parameter((1, mlp.spec.num_experts), jnp.float32)
        return mlp


class WideNormSparseBlock(SparseBlock):
    """A block with experts, and norms over all heads of q and of k."""

    attention_type = WideNormAttention


class PostNormBlock(Block):
    """A block that norms the outputs of attention and MLP."""

    attention_type: type[Any] = WideNormAttention

    def __call__(self, x: Array, step: ForwardPass) -> Array:
        with jax.named_scope("attention"):
            x = self.attention_norm.add(step.output("attention", self.attention, x), x)
        with jax.named_scope("mlp"):
            return self.mlp_norm.add(step.output("mlp", self.mlp, x), x)


class QkNormPostNormBlock(PostNormBlock):
    """A block that norms the outputs of attention and MLP, and each head of q and k."""

    attention_type = QkNormAttention


class LateNormAttention(Attention):
    """Attention that norms q and k, head by head, after rotation."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, precision)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, precision)

    def attended(self, step: ForwardPass, q: Array, k: Array, v: Array) -> Array:
        return step.attend(self.q_norm(q), self.k_norm(k), v)


class LateNormBlock(Block):
    """A block with such attention."""

    attention_type = LateNormAttention


class SinkAttention(Attention):
    """Attention with a sink for each head."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        self.sinks = parameter((config.num_heads,), jnp.float32)

    def attended(self, step: ForwardPass, q: Array, k: Array, v: Array) -> Array:
        return step.attend(q, k, v, self.sinks[...])


class SinkBlock(SparseBlock):
    """A block with experts and with such attention."""

    attention_type = SinkAttention


class PlainBlock(Block):
    """A block with an MLP without a gate."""

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        return PlainMlp(config, precision)


class XieluBlock(QkNormBlock):
    """A block with norms over each head of q and k, and an MLP with xIELU."""

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        return XieluMlp(config, precision)


class ScaledBlock(SparseBlock):
    """A block that multiplies its halves by a factor before they are added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        self.scale = config.residual_scale

    def __call__(self, x: Array, step: ForwardPass) -> Array:
        with jax.named_scope("attention"):
            x = x + step.output("attention", self.attention, x, self.attention_norm) * self.scale
        with jax.named_scope("mlp"):
            return x + step.output("mlp", self.mlp, x, self.mlp_norm) * self.scale


class StateSpaceBlock(ScaledBlock):
    """Such a block with Mamba-2 where the config has a state."""

    state_type = StateSpace


class ParallelBlock(nnx.Module):
    """One layer: attention and the MLP read the same normed input, and both are added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, bias=False)
        self.attention = Attention(config, layer, precision)
        self.mlp = GatedMlp(config, precision)

    def __call__(self, x: Array, step: ForwardPass) -> Array:
        normed = self.norm(x)
        with jax.named_scope("attention"):
            x = step.add("attention", self.attention, x, read=normed)
        with jax.named_scope("mlp"):
            return step.add("mlp", self.mlp, x, read=normed)


class DeltaBlock(SparseBlock):
    """A block with a gated delta rule where the config has a state, and gated attention elsewhere."""

    attention_type, state_type = GatedAttention, GatedDeltaNet


class ConvolutionBlock(QkNormSparseBlock):
    """A block with a short convolution where the config has a state."""

    state_type = ShortConvolution


class ConvolutionSandwichBlock(SandwichBlock):
    """A block with norms after both halves, and a short convolution or attention with gated heads."""

    attention_type, state_type = HeadGatedAttention, ShortConvolution


class LatentAttention(nnx.Module):
    """Attention that makes keys and values of one vector for each token, and of a rotated part of the key.

    Pages keep these two alone. A query is multiplied by the matrix that would make its head's keys, and the weighted
    sum of vectors by the one that would make its values; neither keys nor values are ever there. Queries may be made of
    a vector, too.

    T tokens, H query heads, P plain and R rotated size of a head's query, V size of a value, C size of the vector.
    """

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
        self.gate = nnx.data(Linear(H, E, precision, quantize=False) if spec.gated_heads else None)
        self.spec, self.rope, self.heads = spec, rope, H

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None
    ) -> Array:
        q, k, v, gate = self.split(x, step.tables, norm)
        with jax.named_scope("attend"):
            y = step.attend(q, k, v)
        return self.join(y, gate, x.dtype, residual)

    def split(self, x: Array, tables: RopeTables, norm: RMSNorm | None) -> tuple[Array, Array, None, Array | None]:
        """Return queries and keys of norm(x), normed and rotated, and the gates of heads. It has no values."""
        spec, H, T = self.spec, self.heads, x.shape[0]
        made = self.inputs(x, norm=norm)
        q, vector, key = jnp.split(made, [self.first, self.first + spec.rank], axis=-1)
        q = q if self.query is None else self.query(q, norm=self.query_norm)
        q = q.reshape(T, H, -1)
        turned = jnp.concatenate([q[..., spec.plain_size :], key[:, None]], axis=1)
        turned = tables.rotated(turned, self.rope)
        plain = self.up[...].reshape(H, -1, spec.rank)[:, : spec.plain_size]
        queries = [_by_head("thp,hpc->thc", q[..., : spec.plain_size], plain), turned[:, :H]]
        keys = [self.norm(vector), turned[:, H]]
        gate = None if self.gate is None else self.gate(x, norm=norm)
        return jnp.concatenate(queries, axis=-1), jnp.concatenate(keys, axis=-1)[:, None], None, gate

    def join(self, y: Array, gate: Array | None, dtype: DTypeLike, residual: Array | None) -> Array:
        """Return the layer's result, plus `residual`, from the attended vectors [T, H, C]."""
        values = self.up[...].reshape(self.heads, -1, self.spec.rank)[:, self.spec.plain_size :]
        y = _by_head("thc,hvc->thv", y, values)
        y = y if gate is None else y.astype(dtype) * jax.nn.sigmoid(gate)[..., None]
        return self.out(y.reshape(y.shape[0], -1).astype(dtype), residual=residual)


class LatentBlock(SparseBlock):
    """A block with such attention, and experts where the config has them."""

    attention_type = LatentAttention


class ChannelDeltaBlock(LatentBlock):
    """A block with Kimi's delta rule where the config has a state, and latent attention elsewhere."""

    state_type = ChannelDeltaNet


def _by_head(subscripts: str, x: Array, weights: Array) -> Array:
    """Multiply each head by a matrix of its own, in x's dtype."""
    narrow = x.astype(weights.dtype)
    if current_platform() == "cpu":  # XLA has no batched product of 16 bits there, with AMX only for some sizes
        narrow, weights = narrow.astype(jnp.float32), weights.astype(jnp.float32)
    wide = jnp.einsum(subscripts, narrow, weights, preferred_element_type=jnp.float32, precision="highest")
    return wide.astype(x.dtype)


class TwofoldMixer(nnx.Module):
    """Attention and Mamba-2, which read the same input; their results are multiplied by factors and added."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        self.heads = Attention(config, layer, precision)
        self.recurrence = StateSpace(config, layer, precision)
        self.multipliers = config.multipliers or Multipliers()

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None
    ) -> Array:
        attended = self.heads(x, step, norm=norm) * self.multipliers.attention
        y: Array = self.recurrence(x, step, norm=norm) * self.multipliers.state + attended
        return y if residual is None else residual + y


class TwofoldBlock(Block):
    """A block with such a mixer."""

    attention_type = TwofoldMixer

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        return MultipliedMlp(config, precision)


class SingleBlock(nnx.Module):
    """One layer: a norm, and Mamba-2 or attention where the config has a cache, an MLP or experts where it has none."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        cache, spec = config.caches[layer], config.moe[layer] if config.moe else None
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.mixes = cache != Cache()
        if cache.state is not None:
            self.attention: nnx.Module = StateSpace(config, layer, precision)
        elif self.mixes:
            self.attention = Attention(config, layer, precision)
        elif spec is not None:
            self.mlp: nnx.Module = Experts(config, spec, precision)
        else:
            self.mlp = PlainMlp(dataclasses.replace(config, intermediate_size=config.mlp_size(layer)), precision)

    def __call__(self, x: Array, step: ForwardPass) -> Array:
        if self.mixes:
            with jax.named_scope("attention"):
                return step.add("attention", self.attention, x, self.norm)
        with jax.named_scope("mlp"):
            return step.add("mlp", self.mlp, x, self.norm)


class Decoder(nnx.Module):
    """The decoder: embedding, blocks, final norm, head. Families differ within the block."""

    def __init__(self, config: ModelConfig, precision: Precision, block: Callable[..., nnx.Module] = Block) -> None:
        self.config, self.precision = config, precision
        self.embed = Embedding(config.vocab_size, config.hidden_size, precision)
        self.layers = nnx.List([block(config, layer, precision) for layer in range(config.num_layers)])
        self.norm: RMSNorm | LayerNorm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.vocab_size, config.hidden_size, precision, quantize=precision.quantize_embeddings)
        )

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        attend: Attend,
        lengths: Array | None = None,
        listeners: Sequence[Listener] = (),
    ) -> Array:
        """Compute tokens, positions [T] → hidden [T, E] after the final norm; `lengths` as in `rope.tables`."""
        x, tables = self.begin(tokens, positions, lengths, listeners)
        step = ForwardPass(tables, attend, listeners)
        x = step.at("residual_before", x)
        for number, layer in enumerate(self.layers):
            here = step.of(number)
            x = here.at("residual", layer(x, here))
        return self.end(x)

    def begin(
        self,
        tokens: Array,
        positions: Array,
        lengths: Array | None = None,
        listeners: Sequence[Listener] = (),
    ) -> tuple[Array, RopeTables]:
        """Compute the input of the first layer, and the rope tables."""
        with jax.named_scope("embed"):
            x = heard(listeners, "embedding", 0, self.embedded(tokens))
        return x, RopeTables(self.config, positions, lengths)

    def embedded(self, tokens: Array) -> Array:
        """Compute the embeddings [T, E] of tokens as they enter the residual stream."""
        x = self.embed(tokens)
        if self.config.embed_scale == 1.0:
            return x
        # Rounded, by one bit more than the product would be: XLA:CPU would else join it to the first layer's
        # addition, where both are in one program, and other bits would come out than where they are in two.
        return jax.lax.reduce_precision(x * self.config.embed_scale, 8, 22)

    def end(self, x: Array) -> Array:
        """Compute the hidden states from the last layer's output."""
        return self.norm(x)

    @property
    def whole_vocab_size(self) -> int:
        """The size of the whole model's vocabulary; a device of a mesh has a part."""
        shards = self.precision.shards
        return self.config.vocab_size if shards is None else shards.vocab_size

    def logits(self, hidden: Array, count: Array | None = None) -> Array:
        """Compute hidden [N, E] → float32 [N, V]; rows after the first `count` are undefined."""
        with jax.named_scope("logits"):
            head = self.embed if self.head is None else self.head
            logits = head_logits(hidden, head, self.precision, count=count)
            logits = logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale
            logits = soft_cap(logits, self.config.final_soft_cap)
            if self.precision.deterministic and (self.config.logit_scale, self.config.final_soft_cap) != (1.0, None):
                return jax.lax.reduce_precision(logits, 8, 22)  # as in `begin`: log-probabilities subtract from them
            return logits


class EncoderBlock(nnx.Module):
    """One layer of an encoder, with layer norms. The first one's input is normed already."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        E, eps = config.hidden_size, config.norm_eps
        self.attention_norm = LayerNorm(E, eps, bias=False) if layer else None
        self.attention = Attention(config, layer, precision)
        self.mlp_norm = LayerNorm(E, eps, bias=False)
        self.mlp = GatedMlp(config, precision)

    def __call__(self, x: Array, step: ForwardPass) -> Array:
        with jax.named_scope("attention"):
            normed = x if self.attention_norm is None else self.attention_norm(x)
            x = step.add("attention", self.attention, x, read=normed)
        with jax.named_scope("mlp"):
            return step.add("mlp", self.mlp, x, read=self.mlp_norm(x))


class LayerNormBlock(nnx.Module):
    """One layer: a layer norm and attention, a layer norm and an MLP without a gate, each added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        E, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = LayerNorm(E, config.norm_eps)
        self.attention = Attention(config, layer, precision)
        self.mlp_norm = LayerNorm(E, config.norm_eps)
        self.up = Linear(inner, E, precision, bias=config.mlp_bias)
        self.down = Linear(E, inner, precision, bias=config.mlp_bias, partial=True)
        self.activation = config.activation

    def __call__(self, x: Array, step: ForwardPass) -> Array:
        with jax.named_scope("attention"):
            x = step.add("attention", self.attention, x, read=self.attention_norm(x))
        with jax.named_scope("mlp"):
            return step.add("mlp", self.mlp, x, read=self.mlp_norm(x))

    def mlp(self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None) -> Array:
        """Compute the MLP of x, plus `residual`."""
        return self.down(activate(self.up(x, norm=norm), self.activation), residual=residual)


class LayerNormDecoder(Decoder):
    """A decoder with a layer norm after its blocks."""

    biased = True

    def __init__(self, config: ModelConfig, precision: Precision, block: Callable[..., nnx.Module]) -> None:
        super().__init__(config, precision, block)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, bias=self.biased)


class ParallelDecoder(LayerNormDecoder):
    """One without biases of the norm."""

    biased = False


class Encoder(ParallelDecoder):
    """An encoder: its embedding is normed, and its `attend` is not causal. It has no head but its embedding."""

    def __init__(self, config: ModelConfig, precision: Precision, block: Callable[..., nnx.Module]) -> None:
        super().__init__(config, precision, block)
        self.embed_norm = LayerNorm(config.hidden_size, config.norm_eps, bias=False)

    def begin(
        self,
        tokens: Array,
        positions: Array,
        lengths: Array | None = None,
        listeners: Sequence[Listener] = (),
    ) -> tuple[Array, RopeTables]:
        x, tables = super().begin(tokens, positions, lengths, listeners)
        return self.embed_norm(x), tables


class Gpt2(LayerNormDecoder):
    """One with an embedding of positions in place of ropes."""

    def __init__(self, config: ModelConfig, precision: Precision, block: Callable[..., nnx.Module]) -> None:
        super().__init__(config, precision, block)
        # Rows are only looked up, so quantising them would save little.
        plain = Precision(weights=precision.weights, stream=precision.stream)
        self.position_embed = Embedding(config.max_position_embeddings, config.hidden_size, plain)

    def begin(
        self,
        tokens: Array,
        positions: Array,
        lengths: Array | None = None,
        listeners: Sequence[Listener] = (),
    ) -> tuple[Array, RopeTables]:
        x, tables = super().begin(tokens, positions, None, listeners)
        with jax.named_scope("embed"):
            return x + self.position_embed(positions), tables


class NormedValuesAttention(QkNormAttention):
    """Attention with norms over each head of q and k, and one without weights over each head of v.

    A layer may attend to the pages of another: it has queries alone. Values may be made by the projection of the keys.
    """

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        H, K, D = self.heads, self.kv_heads, self.head_dim
        self.shares = not config.makes_keys(layer)
        self.keys_as_values = config.attention[layer].keys_as_values
        self.kv_heads = K = 0 if self.shares else K
        rows = H + (K if self.keys_as_values else 2 * K)
        self.qkv = Linear(rows * D, config.hidden_size, precision, bias=config.qkv_bias)
        self.qk_norm = RMSNorm((H + K, D), config.norm_eps, precision)
        self.eps = config.norm_eps

    def project(self, x: Array, norm: RMSNorm | None) -> tuple[Array, Array | None]:
        qkv = self.qkv(x, norm=norm).reshape(x.shape[0], -1, self.head_dim)
        return jnp.concatenate([qkv, qkv[:, self.heads :]], axis=1) if self.keys_as_values else qkv, None

    def attended(self, step: ForwardPass, q: Array, k: Array, v: Array) -> Array:
        if self.shares:
            return step.attend(q, None, None)
        return step.attend(q, k, norm_rows(v, None, self.eps, self.implementation))


class LayerEmbeddingBlock(SandwichBlock):
    """A sandwich block, then the layer's embedding of the token times a gate, then a factor for all of it.

    With experts, they and the MLP read the same input, each with norms of its own, and their results are summed.
    """

    attention_type = NormedValuesAttention

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        E, size, spec = config.hidden_size, config.layer_embedding, config.moe[layer] if config.moe else None
        self.activation = config.activation
        self.scalar = parameter((1,), jnp.float32)
        self.embedding_gate: Any = nnx.data(Linear(size, E, precision) if size else None)
        self.embedding_out: Any = nnx.data(Linear(E, size, precision) if size else None)
        self.embedding_norm: Any = nnx.data(RMSNorm(E, config.norm_eps, precision) if size else None)
        self.experts: Any = nnx.data(None if spec is None else ScaledExperts(config, spec, precision))
        norms = [None if spec is None else RMSNorm(E, config.norm_eps, precision) for _ in range(3)]
        self.dense_out_norm: Any = nnx.data(norms[0])
        self.experts_norm: Any = nnx.data(norms[1])
        self.experts_out_norm: Any = nnx.data(norms[2])

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        return GatedMlp(dataclasses.replace(config, intermediate_size=config.mlp_size(layer)), precision)

    def __call__(self, x: Array, step: ForwardPass) -> Array:
        with jax.named_scope("attention"):
            x = self.attention_out_norm.add(step.output("attention", self.attention, x, self.attention_norm), x)
        with jax.named_scope("mlp"):
            y = step.output("mlp", self.mlp, x, self.mlp_norm)
            if self.experts is not None:
                y = self.dense_out_norm(y)
                y = y + self.experts_out_norm(step.output("mlp_experts", self.experts, x, self.experts_norm))
            if self.embedding_gate is None:
                return self.mlp_out_norm.add(y, x, self.scalar[...])
            x = self.mlp_out_norm.add(y, x)
        with jax.named_scope("layer_embedding"):
            gate = self.embedding_gate
            own = gated(gate(x), self.activation, step.own, implementation=gate.implementation)
            y = step.at("layer_embedding", self.embedding_out(own.astype(x.dtype)))
            return self.embedding_norm.add(y, x, self.scalar[...])


class LayerEmbeddingDecoder(Decoder):
    """A decoder of such blocks. A second table has the embeddings of all layers, of size P each."""

    def __init__(self, config: ModelConfig, precision: Precision, block: Callable[..., nnx.Module]) -> None:
        super().__init__(config, precision, block)
        size = config.layer_embedding
        self.layer_embed: Any = nnx.data(None)
        if size:
            rows = config.num_layers * size
            self.layer_embed = nnx.data(Embedding(config.vocab_size, rows, precision))
            self.layer_projection = Linear(rows, config.hidden_size, precision)
            self.layer_projection_norm = RMSNorm(size, config.norm_eps, precision)

    def begin(
        self,
        tokens: Array,
        positions: Array,
        lengths: Array | None = None,
        listeners: Sequence[Listener] = (),
    ) -> tuple[Array, RopeTables]:
        x, tables = super().begin(tokens, positions, lengths, listeners)
        if self.layer_embed is not None:
            with jax.named_scope("layer_embeddings"):
                tables.own = self.embeddings_of_layers(x, tokens)
        return x, tables

    def embeddings_of_layers(self, x: Array, tokens: Array) -> tuple[Array, ...]:
        """Return for each layer its embeddings [T, P] of tokens [T]; x [T, E] are their embeddings in the stream."""
        layers, size = self.config.num_layers, self.config.layer_embedding
        shape = (*tokens.shape, layers, size)
        projected = self.layer_projection(x) * self.config.hidden_size**-0.5
        stored = self.layer_embed(tokens) * size**0.5
        both = self.layer_projection_norm.add(projected.reshape(shape), stored.reshape(shape)) * 2.0**-0.5
        return tuple(both[..., layer, :] for layer in range(layers))
