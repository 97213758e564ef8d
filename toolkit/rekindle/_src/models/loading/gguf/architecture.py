"""The metadata of a GGUF file as the config.json that the same model has as a Hugging Face folder.

llama.cpp knows some numbers by the architecture alone; families add them to the keys read here. A value that no family
implements raises `UnsupportedModel`, which names the key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rekindle._src.models.hf_config import MAX_LAYERS
from rekindle._src.models.loading.gguf.header import GgufHeader, GgufTensor, Metadata
from rekindle._src.models.nn.rope import RopeSpec
from rekindle.errors import CheckpointError, UnsupportedModel

_LLAMA3_LENGTH = 8192  # the pre-training length of all published models with Llama 3's rope
_MOST = 1 << 14  # frequencies
_LISTED = 64  # integers of a list
# Counts that decide how much is built for a file: `GgufModel` reads them, against bounds, and families can't.
_COUNTS = ("block_count", "nextn_predict_layers")


class GgufModel(NamedTuple):
    """A file's metadata below the prefix of its architecture, and its tensors by name."""

    header: GgufHeader
    prefix: str
    tensors: dict[str, GgufTensor]
    assists: bool = False  # all of its blocks draft, for another model

    @property
    def metadata(self) -> Metadata:
        return self.header.metadata

    def integer(self, key: str, *default: Any) -> Any:
        return self.metadata.integer(self._key(key), *default)

    def number(self, key: str, *default: Any) -> Any:
        return self.metadata.number(self._key(key), *default)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(self._key(key), default)

    def numbers(self, key: str) -> Any:
        """Return an array that has a number for each layer. Raise `UnsupportedModel` for one of another length."""
        values, layers, blocks = self.metadata.numbers(self._key(key)), self.layers, self.blocks
        if len(values) > blocks:
            raise self.unsupported(key, f"{len(values):,} numbers", f"for {layers} layers")
        return values[:layers]

    @property
    def mask_token(self) -> int:
        """The token in place of a block's unknown tokens."""
        return self.metadata.integer("tokenizer.ggml.mask_token_id")

    def listed(self, key: str) -> list[int]:
        """Return a list of a few integers, however many layers there are."""
        values = self.metadata.numbers(self._key(key))
        if len(values) > _LISTED or values.dtype.kind not in "iu":
            raise self.unsupported(
                key, f"{len(values):,} {values.dtype} numbers", f"where up to {_LISTED} integers are"
            )
        return [int(value) for value in values]

    def _key(self, key: str) -> str:
        assert key not in _COUNTS, f"{key} is read by GgufModel.blocks and .drafting alone"
        return f"{self.prefix}.{key}"

    @property
    def layers(self) -> int:
        """How many layers the model has: all blocks except drafting ones, or all of an assistant's."""
        return self.blocks if self.assists else self.blocks - self.drafting

    @property
    def blocks(self) -> int:
        """How many blocks there are, including drafting ones; every block has a tensor."""
        count = self.metadata.integer(f"{self.prefix}.block_count")
        if not 1 <= count <= MAX_LAYERS or count > len(self.tensors):
            raise CheckpointError(
                f"{self.header.path}: {self.prefix}.block_count={count} is not from 1 to {MAX_LAYERS:,}, or more than "
                f"the {len(self.tensors):,} tensors of the file. Download it again."
            )
        return int(count)

    @property
    def drafting(self) -> int:
        """How many of the blocks, the last ones, draft tokens."""
        count = self.metadata.integer(f"{self.prefix}.nextn_predict_layers", 0)
        if not 0 <= count < self.blocks:
            raise CheckpointError(
                f"{self.header.path}: {self.prefix}.nextn_predict_layers={count} is not less than its {self.blocks:,} "
                "layers. Download it again."
            )
        return int(count)

    def has(self, tensor: str) -> bool:
        """True if the file has this tensor."""
        return tensor in self.tensors

    @property
    def head_dim(self) -> int:
        length = self.integer("attention.key_length", None)
        size = length or self.integer("embedding_length") // max(1, self.integer("attention.head_count"))
        if (value := self.integer("attention.value_length", size)) != size:
            raise self.unsupported("attention.value_length", value, f"where heads of q and k have {size}")
        return int(size)

    @property
    def window(self) -> int | None:
        """How many tokens a query sees; None for all of them."""
        return self.integer("attention.sliding_window", 0) or None

    def unsupported(self, key: str, value: object, why: str = "") -> UnsupportedModel:
        """Return the error for a key with a value that no family implements."""
        shown = repr(value)[:80]
        return UnsupportedModel(
            f"{self.header.path}: {self.prefix}.{key}={shown} is not implemented{' ' + why if why else ''}. "
            "Open another model."
        )

    def only(self, key: str, *accepted: Any) -> None:
        """Raise `UnsupportedModel` if a key is there with a value that is not implemented."""
        value = self.metadata.get(f"{self.prefix}.{key}")
        if value is not None and not any(value is choice or value == choice for choice in accepted):
            raise self.unsupported(key, value)

    def decoder(
        self, norm: str = "layer_norm_rms_epsilon", *allowed: str, gaps: bool = False, length: int | None = None
    ) -> dict[str, Any]:
        """Return the keys that nearly all families share.

        `allowed` are options that the family reads itself. With `gaps`, layers may have no heads or no MLP. `length` is
        the size of the MLP where the file has none.
        """
        layers, default = self.layers, () if length is None else (length,)
        keys: dict[str, Any] = {
            "hidden_size": self.integer("embedding_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": self._same("attention.head_count", gaps=gaps),
            "intermediate_size": self._same("feed_forward_length", *default, gaps=gaps),
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self.number(f"attention.{norm}"),
            "head_dim": self.head_dim,
            "tie_word_embeddings": not self.has("output.weight"),
        }
        heads = keys["num_attention_heads"]
        keys["num_key_value_heads"] = self._same("attention.head_count_kv", heads, gaps=gaps)
        for key in ("expert_shared_count", "leading_dense_block_count", "expert_group_count"):
            if key not in allowed:
                self.only(key, 0)
        return keys

    def experts(
        self,
        count: str = "num_experts",
        *,
        of_token: str = "num_experts_per_tok",
        size: str | None = "moe_intermediate_size",
    ) -> dict[str, Any]:
        """Return the numbers of experts by these keys; without `size`, experts are as large as the MLP."""
        keys = {count: self.integer("expert_count"), of_token: self.integer("expert_used_count")}
        return keys if size is None else keys | {size: self.integer("expert_feed_forward_length")}

    def sliding_layers(self) -> dict[str, Any]:
        """Return `layer_types` if the file says for each layer whether its window slides."""
        if isinstance(self.get("attention.sliding_window_pattern", 0), int):
            return {}
        slides = self.numbers("attention.sliding_window_pattern").astype(bool).tolist()
        return {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}

    def rope(self, *, theta: float = 10_000.0, head_dim: int | None = None) -> dict[str, Any]:
        """Return the keys of the rope for heads of `head_dim`; its base is `theta` unless the file says otherwise.

        They are `rope_theta`, `partial_rotary_factor` and `rope_scaling`, as far as the file has them.
        """
        head_dim = head_dim or self.head_dim
        base = self.number("rope.freq_base", theta)
        fields: dict[str, Any] = {"rope_theta": base}
        rotated = self.integer("rope.dimension_count", head_dim)
        if not 0 < rotated <= head_dim or rotated % 2:
            raise UnsupportedModel(
                f"{self.header.path}: {self.prefix}.rope.dimension_count={rotated} does not fit into heads of "
                f"{head_dim}. Check the file."
            )
        if rotated != head_dim:
            fields["partial_rotary_factor"] = (rotated + 0.5) / head_dim  # it is multiplied and rounded down again
        scaling = self._stretched(rotated, base) or self._scaling()
        original = self.integer("rope.scaling.original_context_length", None)
        if "rope_factors_short.weight" in self.tensors or "rope_factors_long.weight" in self.tensors:
            scaling = {
                "rope_type": "longrope",
                "short_factor": self.rope_factors(rotated, "rope_factors_short.weight"),
                "long_factor": self.rope_factors(rotated, "rope_factors_long.weight"),
                "attention_factor": self.number("rope.scaling.attn_factor", 1.0),
            }
            fields["original_max_position_embeddings"] = original or self.integer("context_length")
        elif scaling is not None and scaling["rope_type"] == "yarn":
            scaling["original_max_position_embeddings"] = original or self.integer("context_length")
        return fields if scaling is None else fields | {"rope_scaling": scaling}

    def _scaling(self) -> dict[str, Any] | None:
        """Return the scaling that the metadata asks for."""
        kind = self.metadata.text(f"{self.prefix}.rope.scaling.type", None)
        old = self.number("rope.scale_linear", 0.0)  # of old files
        factor = self.number("rope.scaling.factor", old) or 1.0
        if kind is None:
            kind = "linear" if old else "none"
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise UnsupportedModel(
                f"{self.header.path}: {self.prefix}.rope.scaling.type={kind[:80]!r} is not implemented. "
                "Implemented: none, linear, yarn, longrope."
            )
        if kind in ("none", "longrope") or factor == 1.0:  # longrope has its factors in tensors
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        attention_factor = self.number("rope.scaling.yarn_attn_factor", None) or self.number(
            "rope.scaling.attn_factor", 1.0
        )
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if attention_factor != 1.0:
            scaling["attention_factor"] = attention_factor * (0.1 * float(np.log(factor)) + 1.0)
        return scaling

    def _stretched(self, rotated: int, theta: float) -> dict[str, Any] | None:
        """Return the scaling of a file that stretches each frequency by its own factor, as Llama 3's files do.

        Llama 3's four numbers are not in the file. Where its usual ones give these factors, they are taken.
        """
        if "rope_freqs.weight" not in self.tensors:
            return None
        factors = self.rope_factors(rotated)
        usual: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": max(factors)}
        plain = RopeSpec(theta=theta, dim=rotated)
        scaled = RopeSpec(theta=theta, dim=rotated, kind="llama3", original_length=_LLAMA3_LENGTH, **usual)
        if np.allclose(plain.frequencies() / scaled.frequencies(), factors, rtol=1e-5):
            return {"rope_type": "llama3", "original_max_position_embeddings": _LLAMA3_LENGTH, **usual}
        return {"rope_type": "factors", "factors": factors}

    def each(self, key: str) -> list[int]:
        """Return a number of each layer, which files may have once for all of them."""
        value = self.get(key)
        if value is None or isinstance(value, int):
            return [self.integer(key)] * self.layers
        listed: list[int] = self.numbers(key).tolist()
        if len(listed) != self.layers:
            raise self.unsupported(key, listed, f"for {self.layers} layers")
        return listed

    def each_number(self, key: str) -> list[np.float32]:
        """Return a number of each layer, as float32, by a key without prefix; files may have it once for all layers."""
        value = self.metadata.get(key)
        if value is None or type(value) in (int, float):
            listed = np.full(self.layers, self.metadata.number(key))
        elif len(listed := self.metadata.numbers(key)) < self.layers:
            raise CheckpointError(
                f"{self.header.path}: {key} has {len(listed):,} numbers for {self.layers} layers. Download it again."
            )
        with np.errstate(over="ignore"):
            return [np.float32(number) for number in listed[: self.layers]]

    def attends(self) -> list[bool]:
        """Return which layers have heads of keys and values."""
        return [heads > 0 for heads in self.each("attention.head_count_kv")]

    def rope_factors(self, rotated: int, name: str = "rope_freqs.weight") -> list[float]:
        """Return the divisors of frequencies that the file has as a tensor."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != (rotated // 2,) or tensor.kind.name != "F32" or rotated > _MOST:
            problem = "is missing" if tensor is None else f"is {tensor.kind.name} {[*tensor.shape]}"
            raise CheckpointError(
                f"{self.header.path}: {name} {problem}, where F32 [{rotated // 2}] is expected. Download it again."
            )
        from rekindle._src.models.loading.gguf.rows import GgufRows  # it imports JAX, which most files don't need

        values = GgufRows(self.header.path, name, tensor.kind, tensor.shape, tensor.offset)(0, rotated // 2)
        if not (np.isfinite(values) & (values > 0)).all():
            raise CheckpointError(f"{self.header.path}: {name} holds numbers that are not positive. Download it again.")
        return [float(str(value)) for value in values]

    def _same(self, key: str, *default: Any, gaps: bool = False) -> Any:
        """Return a number that files may have for each layer, with `gaps` zero in some.

        Raise `UnsupportedModel` if layers differ.
        """
        values = self.get(key)
        if values is None or isinstance(values, int):
            return self.integer(key, *default)
        listed = self.numbers(key).tolist()
        distinct = sorted(set(listed) - ({0} if gaps else set()))
        if len(distinct) != 1 or len(listed) != self.layers:
            raise self.unsupported(key, listed, "(layers of different sizes)")
        return int(distinct[0])
