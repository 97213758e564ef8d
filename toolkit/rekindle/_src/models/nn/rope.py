"""Rotary position embeddings: their options, their frequencies, and the tables of a step.

T tokens, F rotated frequencies (half of the rotated part of a head).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import jax

ROTATED = 32  # native kernels rotate and norm heads with so many rotated numbers, or a multiple of it
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors", "proportional")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rotary embedding of a model. Layers with equal specs share tables."""

    theta: float
    dim: int  # the number of rotated dimensions of a head: its first ones
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0  # pre-training length, for the kinds that scale past it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope; factors: the divisor of each frequency
    long_factor: tuple[float, ...] = ()  # longrope
    attention_factor: float = 1.0  # multiplies cos and sin
    interleaved: bool = False  # a pair is two neighbours of a head, else lies half of the rotated part apart
    part: float = 1.0  # proportional: of the frequencies; the others are 0
    sections: tuple[int, ...] = ()  # of frequencies that turn with each coordinate of a position; see `axes`
    query_growth: float = 0.0  # queries are multiplied by 1 + growth · log(1 + ⌊position / original_length⌋)

    @property
    def axes(self) -> NDArray[np.int32]:
        """The coordinate with which each frequency turns [F]: 0 time, 1 row, 2 column.

        They take turns, time, row, column, …, for as many turns as the section of row or column has. All the rest is
        time's. The coordinates of a token of text are all its position, so text is rotated as without sections.
        """
        index = np.arange(self.dim // 2)
        axis = index % 3
        most = np.array([0, *self.sections[1:3]])[axis] * 3
        return np.where(index < most, axis, 0).astype(np.int32)

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies change with the length of the sequence, not with the position alone."""
        return self.kind in ("dynamic", "longrope")

    def regime(self, length: int) -> int:
        """Return a number that is equal for prompt lengths with the same rotation of a shared prefix's keys."""
        if not self.depends_on_length or length <= self.original_length:
            return 0
        return 1 if self.kind == "longrope" else length

    def frequencies(self, *, long: bool = False) -> NDArray[np.float32]:
        """Return the radians per position [F], rounded to float32 after each operation as in transformers."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        periods = np.power(np.float32(self.theta), exponents)
        plain = np.float32(1.0) / periods
        if self.kind == "linear":
            return plain / np.float32(self.factor)
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain, np.float32(1.0) / (np.float32(self.factor) * periods))
        if self.kind == "proportional":
            rotated = np.arange(self.dim // 2) < int(self.part * self.dim // 2)
            return np.where(rotated, plain / np.float32(self.factor), np.float32(0))
        if self.kind == "factors":
            return plain / np.asarray(self.short_factor, np.float32)
        if self.kind == "longrope":
            stretch = np.asarray(self.long_factor if long else self.short_factor, np.float32)
            return np.float32(1.0) / (stretch * periods)
        return plain

    def _llama3(self, plain: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return Llama 3's frequencies: long wavelengths are stretched, short ones kept, those between interpolated."""
        wavelengths = np.float32(2 * math.pi) / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (np.float32(self.original_length) / wavelengths - np.float32(low)) / np.float32(high - low)
        interpolated = (1 - smooth) * plain / np.float32(self.factor) + smooth * plain
        stretched = np.where(wavelengths > self.original_length / low, plain / np.float32(self.factor), plain)
        medium = (wavelengths >= self.original_length / high) & (wavelengths <= self.original_length / low)
        return np.where(medium, interpolated, stretched).astype(np.float32)

    def _yarn(self, plain: NDArray[np.float32], stretched: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return YaRN's frequencies: a linear ramp from the fast dimensions to the slow ones."""

        def dimension(turns: float) -> float:
            return self.dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(self.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
        keep = np.float32(1) - ramp
        return (stretched * (1 - keep) + plain * keep).astype(np.float32)


def attention_factor(kind: str, factor: float, original_length: int, options: dict[str, Any]) -> float:
    """Return the factor of cos and sin for a checkpoint without one."""
    if kind == "yarn":

        def scaled(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        if options.get("mscale") and options.get("mscale_all_dim"):
            return scaled(options["mscale"]) / scaled(options["mscale_all_dim"])
        return scaled(1.0)
    if kind == "longrope" and factor > 1:
        return math.sqrt(1 + math.log(factor) / math.log(original_length))
    return 1.0


def tables(spec: RopeSpec, positions: jax.Array, lengths: jax.Array | None) -> tuple[jax.Array, ...]:
    """Return the tables cos and sin [..., F] in float32, and the factor of queries [...] if the spec has one.

    Positions are [T]; for a spec with sections, they may be coordinates [T, 3].
    `lengths` is the sequence length to assume for each token; only length-dependent kinds use it. None means
    `positions + 1`, as in decoding token by token, and the only choice under which the keys of a prefix do not
    depend on the tokens after it. Transformers assumes max(prompt length, position + 1).
    """
    import jax.numpy as jnp  # configs, which have specs, are read before JAX is imported

    if positions.ndim == 2:
        assert spec.sections, "the rope has no coordinates"
        column = positions.astype(jnp.float32)[:, spec.axes]
    else:
        column = positions.astype(jnp.float32)[..., None]
    frequencies: jax.Array | NDArray[np.float32] = spec.frequencies()
    if spec.depends_on_length:
        length = (positions + 1 if lengths is None else lengths)[..., None]
        if spec.kind == "longrope":
            frequencies = jnp.where(length > spec.original_length, spec.frequencies(long=True), frequencies)
        else:
            clamped = jnp.maximum(length, spec.original_length).astype(jnp.float32)
            growth = (spec.factor * clamped / spec.original_length) - (spec.factor - 1)
            base = spec.theta * growth ** (spec.dim / (spec.dim - 2))
            frequencies = 1.0 / base ** (np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim))
    angles = column * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if spec.attention_factor != 1.0:
        cos, sin = cos * spec.attention_factor, sin * spec.attention_factor
    if spec.query_growth:
        turns = jnp.floor(positions.astype(jnp.float32) / spec.original_length)
        return cos, sin, 1.0 + spec.query_growth * jnp.log1p(turns)
    return cos, sin


def halves(heads: jax.Array, dim: int) -> jax.Array:
    """Reorder the first `dim` numbers of each head [..., D]: the first of each pair of neighbours, then the others.

    Scores do not change if queries and keys are reordered alike.
    """
    import jax.numpy as jnp  # most of what reads specs has no need of it

    rotated = heads[..., :dim]
    pairs = rotated.reshape(*rotated.shape[:-1], dim // 2, 2)
    rotated = jnp.swapaxes(pairs, -1, -2).reshape(rotated.shape)
    return rotated if dim == heads.shape[-1] else jnp.concatenate([rotated, heads[..., dim:]], axis=-1)
