"""The architecture and sizes of a model as plain records; `registry.config_from_hf` reads them from a config.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from rekindle._src.models.nn.rope import RopeSpec
from rekindle.errors import UnsupportedModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The scale, window, cap and rotation of one layer's attention."""

    scale: float  # multiplies q·k
    sliding_window: int | None = None  # a query sees this many keys, its own included
    causal: bool = True  # False: it also sees the keys after it; with a window, as many as before it
    soft_cap: float | None = None  # scores become cap · tanh(score / cap)
    rope: RopeSpec | None = None  # None: this layer does not rotate
    sinks: bool = False  # each head has a logit that the softmax counts and that carries no value
    keys_as_values: bool = False  # values are the keys' vectors before they are normed and rotated
    budget: int | None = None  # keys that a decoding token attends to in each kv head, on whole pages; None: all

    def sees(self, distance: Any) -> Any:
        """Return an array that is True where a query sees a key: `distance` is its position less the key's."""
        seen = distance >= 0 if self.causal else distance == distance
        return seen if self.sliding_window is None else seen & (abs(distance) < self.sliding_window)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The mixture of experts of one layer."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool  # the weights of the chosen experts sum to one
    epsilon: float = 0.0  # is added to the sum that they are divided by
    scoring: str = "softmax"  # or "sigmoid": how the router's logits become weights
    correction: bool = False  # a bias of each expert counts for the choice, not for the weights
    scale: float = 1.0  # multiplies the weights
    groups: int = 1  # experts are chosen from the best `top_groups` of so many groups
    top_groups: int = 1
    group_best: int = 2  # the sum of so many best experts ranks a group
    shared_size: int = 0  # the intermediate size of an MLP that all tokens pass in addition to their experts
    shared_gate: bool = False  # the sigmoid of a product with the token multiplies that MLP's result
    bias: bool = False  # the router and the experts have biases
    gated: bool = True  # experts and that MLP are down(act(gate(x)) · up(x)); else down(act(up(x)))
    latent_size: int = 0  # of a vector that experts read and write in place of the token; 0: the token itself


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """The state of one layer: a convolution's last inputs, and matrices."""

    channels: int  # of the convolution
    kernel: int  # inputs that it reads
    key_heads: int = 0  # 0: the layer is a convolution alone
    heads: int = 0  # of values; consecutive ones share a head of keys
    key_size: int = 0
    value_size: int = 0
    normed: bool = True  # the result is normed
    norm_first: bool = False  # before it is gated; False: after that
    decay_bound: float | None = None  # the least logarithm of a decay; None: there is none

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a sequence's state, in float32."""
        tail = (self.kernel - 1, self.channels)
        return (tail, (self.heads, self.key_size, self.value_size)) if self.heads else (tail,)


@dataclasses.dataclass(frozen=True, slots=True)
class Pages:
    """The keys and values that one layer keeps of each token."""

    heads: int
    key_size: int
    value_size: int  # less than `key_size`: values are the first numbers of the keys, and are not stored

    @property
    def latent(self) -> bool:
        """True if keys alone are stored."""
        return self.value_size < self.key_size


@dataclasses.dataclass(frozen=True, slots=True)
class SharedWith:
    """No pages: the layer attends to an earlier layer's."""

    layer: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Attention over latent pages: keys and values of all heads are made of one vector for each token."""

    query_rank: int | None  # queries are made of a vector of this size; None: of the layer's input
    plain_size: int  # of a head's query and key, the part that is not rotated
    rotated_size: int  # the other part
    value_size: int
    rank: int  # size of the vector that keys and values are made of
    eps: float = 1e-6  # of the norms of both vectors
    gated_heads: bool = False  # the sigmoid of a product with the input multiplies each head's result


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """The cache of one layer for each sequence: pages, a state, both, or neither."""

    pages: Pages | SharedWith | None = None
    state: RecurrentSpec | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors within the layers of a model that was scaled up from a small one."""

    attention: float = 1.0  # of the result of attention
    state: float = 1.0  # of the result of the layer's recurrence
    inputs: tuple[float, float, float, float, float] = (1.0,) * 5  # of that one's gate, values, keys, queries, steps
    gate: float = 1.0  # of the MLP's gate, before its activation
    mlp: float = 1.0  # of the result of the MLP


_LATER = (
    "pictures",
    "sections",
    "draft_head",
    "added_pages",
    "assists",
    "reads",
    "eagle",
    "block",
    "gated_heads",
    "decay_bound",
    "budget",
)  # fields that were added when digests were in use: told only where they say something


def _told(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value or name not in _LATER}


@dataclasses.dataclass(frozen=True, slots=True)
class PictureSpec:
    """How a language model takes the rows of pictures, which an encoder computes."""

    levels: int = 0  # first layers after which rows of a picture add more to the stream
    token: int | None = None  # the token whose embeddings in layers pictures have; None: that of their places
    both_ways: str = "no"  # the layers where a picture's tokens see later ones of it: "windows", "all"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AssistantSpec:
    """How an assistant drafts for another model: its layers attend to the pages of that model, which says the rest."""

    hidden_size: int  # of that model
    centroids: int = 0  # clusters of the vocabulary, all alike in size; 0: it has none
    nearest: int = 0  # how many of them have logits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """How an EAGLE-3 head drafts for a model: its own parts, and the order of its norms."""

    hidden_size: int  # of that model
    inputs: int = 3  # layers of that model whose inputs it reads
    vocab_size: int  # tokens that it can draft
    own_embedding: bool  # or it has that of the model
    own_head: bool
    maps: bool  # its tokens are some of the model's, which a tensor of the checkpoint names
    absolute: bool = False  # that tensor has their ids, and not the distances to their own places
    norm_before_residual: bool = False
    norm_before_join: bool = False  # the inputs of all layers are normed together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """How a head drafts a block of tokens at once: the last token of a text, and masks after it."""

    size: int  # tokens of a block, the last one of the text included
    mask: int  # the token that stands for each of the others


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture and sizes of a model. It is hashable; programs and stores are keyed by it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    tie_embeddings: bool
    attention: tuple[AttentionSpec, ...]  # one per layer
    moe: tuple[MoeSpec | None, ...] = ()  # one per layer, or empty: no experts at all
    recurrent: tuple[RecurrentSpec | None, ...] = ()  # one per layer, or empty: none has a state
    # One per layer, None where it has no pages; or empty: layers without a state have `num_kv_heads` of `head_dim`.
    pages: tuple[Pages | SharedWith | None, ...] = ()
    latent: LatentSpec | None = None  # all layers with pages have latent ones
    mlp_sizes: tuple[int, ...] = ()  # one per layer, 0 where it has no MLP; or empty: all have `intermediate_size`
    multipliers: Multipliers | None = None
    layer_embedding: int = 0  # the size of an embedding that tokens have in each layer
    activation: str = "silu"
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what attention and MLP add to the residual stream
    logit_scale: float = 1.0
    final_soft_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pictures: PictureSpec | None = None  # how it takes pictures; None: it reads text alone
    draft_head: ModelConfig | None = None  # of a head that its checkpoint has; None: it has none, or it is not read
    added_pages: tuple[Pages, ...] = ()  # what a drafter of a session keeps of each token, after the layers' own pages
    assists: AssistantSpec | None = None  # it drafts for another model, whose pages are of the shapes of `pages`
    # Of a head: the layers whose inputs in the residual stream of its model it reads, where `num_layers` of that model
    # is the output of the last one. None: it reads the final hidden state.
    reads: tuple[int, ...] = ()
    eagle: EagleSpec | None = None  # it is an EAGLE-3 head
    block: BlockSpec | None = None  # it is a head that drafts a block of tokens at once
    headless: bool = False  # the checkpoint has no head, so that texts can be embedded and not continued
    dtype: str | None = None  # of the weights, by config.json

    def __post_init__(self) -> None:
        assert len(self.attention) == self.num_layers, "one AttentionSpec per layer"
        for entries in (self.moe, self.recurrent, self.pages, self.mlp_sizes):
            assert len(entries) in (0, self.num_layers), "one entry per layer, or none"
        for spec in self.moe:
            if spec is None:
                continue
            if spec.num_experts % spec.groups or not 1 <= spec.top_groups <= spec.groups:
                raise UnsupportedModel(
                    f"{spec.top_groups} of {spec.groups} groups of {spec.num_experts} experts can't be chosen. Check "
                    "n_group and topk_group in config.json."
                )
            if spec.top_k > (choice := spec.num_experts // spec.groups * spec.top_groups):
                raise UnsupportedModel(
                    f"num_experts_per_tok={spec.top_k} is more than the {choice} experts to choose from. "
                    "Check config.json."
                )
        for state in dict.fromkeys(self.recurrent):
            if state is not None and state.heads % max(1, state.key_heads):
                raise UnsupportedModel(
                    f"{state.heads} heads of values can't share {state.key_heads} heads of keys evenly. "
                    "Check the sizes of states in config.json."
                )
        for heads in dict.fromkeys([self.num_kv_heads, *(pages.heads for pages in self.kinds_of_pages)]):
            if self.num_heads % heads:
                raise UnsupportedModel(
                    f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={heads}. "
                    "Check config.json."
                )

    def with_budget(self, budget: int) -> ModelConfig:
        """Return the config of the same model with a budget of keys in layers that see all of them."""

        def limited(layer: int, spec: AttentionSpec) -> AttentionSpec:
            whole = self.has_budgets(layer)
            return dataclasses.replace(spec, budget=budget) if whole else spec

        return dataclasses.replace(self, attention=tuple(limited(*each) for each in enumerate(self.attention)))

    def has_budgets(self, layer: int) -> bool:
        """True if decoding tokens may attend to some of a layer's pages: a query sees all, and values are stored."""
        spec, pages = self.attention[layer], self.caches[self.source(layer)].pages
        return spec.causal and spec.sliding_window is None and isinstance(pages, Pages) and not pages.latent

    def sees_pictures_both_ways(self, layer: int) -> bool:
        """True if the tokens of a picture see each other in a layer, whatever their order."""
        kind = "no" if self.pictures is None else self.pictures.both_ways
        return kind == "all" or (kind == "windows" and self.attention[layer].sliding_window is not None)

    def computes_as(self, other: ModelConfig) -> bool:
        """True if both compute the same of equal weights: files of trainers may name another dtype or other ends."""

        def common(config: ModelConfig) -> ModelConfig:
            return dataclasses.replace(config, dtype=None, eos_token_ids=(), bos_token_id=None)

        return common(self) == common(other)

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The pages and the state that each layer keeps of a sequence, and after those the pages that are added."""
        usual = Pages(self.num_kv_heads, self.head_dim, self.head_dim)
        pages = self.pages or tuple(None if state else usual for state in self.states)
        return *map(Cache, pages, self.states), *map(Cache, self.added_pages)

    @property
    def kinds_of_pages(self) -> tuple[Pages, ...]:
        """The distinct pages of layers, in order of first use."""
        return tuple(dict.fromkeys(cache.pages for cache in self.caches if isinstance(cache.pages, Pages)))

    @property
    def kinds_apart(self) -> tuple[tuple[Pages, ...], tuple[Pages, ...]]:
        """The distinct pages of layers that keep all of their pages, and of layers that give some back."""
        both: tuple[dict[Pages, None], dict[Pages, None]] = {}, {}
        for cache, windowed in zip(self.caches, self.windowed, strict=True):
            if isinstance(cache.pages, Pages):
                both[windowed][cache.pages] = None
        return tuple(both[0]), tuple(both[1])

    def source(self, layer: int) -> int:
        """Return the layer that has the pages a layer attends to: itself, or an earlier one."""
        cache = self.pages[layer] if self.pages else None
        return cache.layer if isinstance(cache, SharedWith) else layer

    def pages_of(self, layer: int) -> Pages:
        """Return the pages that a layer attends to."""
        pages = self.caches[self.source(layer)].pages
        assert isinstance(pages, Pages), "the layer has no pages"
        return pages

    @property
    def windowed(self) -> tuple[bool, ...]:
        """True for layers that give back pages their window has passed, if other layers keep all of theirs. Added pages
        are never given back.
        """
        caches = self.caches[: self.num_layers]
        kept = {self.source(layer) for layer, spec in enumerate(self.attention) if spec.sliding_window is None}
        windowed = tuple(isinstance(cache.pages, Pages) and layer not in kept for layer, cache in enumerate(caches))
        whole = any(isinstance(cache.pages, Pages) for layer, cache in enumerate(caches) if layer in kept)
        if not whole or self.is_recurrent or self.is_bidirectional:
            windowed = (False,) * self.num_layers
        return *windowed, *[False] * len(self.added_pages)

    @property
    def window(self) -> int:
        """The widest window of layers that give pages back; 0 if none does."""
        windowed, specs = self.windowed, enumerate(self.attention)
        return max((spec.sliding_window or 0 for layer, spec in specs if windowed[self.source(layer)]), default=0)

    def makes_keys(self, layer: int) -> bool:
        """True if a layer has keys and values of its own, and attends to no other layer's or model's."""
        return self.assists is None and self.source(layer) == layer

    def mlp_size(self, layer: int) -> int:
        """Return the intermediate size of a layer's MLP."""
        return self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size

    @property
    def states(self) -> tuple[RecurrentSpec | None, ...]:
        """The state of each layer; None where it has none."""
        return self.recurrent or (None,) * self.num_layers

    @property
    def is_recurrent(self) -> bool:
        """True if a layer has a state that each token changes."""
        return any(self.recurrent)

    @property
    def is_bidirectional(self) -> bool:
        """True if tokens see those after them: a text is computed whole, and has no next token."""
        return not all(spec.causal for spec in self.attention)

    @property
    def only_embeds(self) -> bool:
        """True if texts can be embedded and not continued."""
        return self.headless or self.is_bidirectional

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct ropes, in order of first use."""
        return tuple(dict.fromkeys(spec.rope for spec in self.attention if spec.rope is not None))

    def rope_regime(self, prompt_length: int) -> int:
        """Return a number that is equal for prompts with keys rotated alike; only those prompts share prefixes.

        It is 0 up to the length from which a dynamic or longrope model rotates in another way.
        """
        return max((rope.regime(prompt_length) for rope in self.ropes), default=0)

    def digest(self) -> str:
        """Return a hash of the config that is the same in every process."""
        text = json.dumps(dataclasses.asdict(self, dict_factory=_told), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
