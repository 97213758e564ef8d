"""The origin of a model's parameters in a checkpoint. Each family declares it once, and nothing here does I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rekindle._src.models.roles import REPLICATED, Role


class TensorPart(NamedTuple):
    """The place of one checkpoint tensor in a parameter: `parameter[place] = read(name)`, transposed or shifted."""

    name: str
    shape: tuple[int, ...]  # as the checkpoint stores it
    place: tuple[int | slice, ...]  # numpy broadcasting tiles a [D] tensor over a [repeats, D] place


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The assembly of one parameter from checkpoint tensors.

    The tensors are joined along the parameter's first axis: tensor i fills the next `rows[i]` rows. With `stack`
    each `len(rows)` consecutive names make one matrix of a stack (an expert). With `tiled`, tensor i is repeated to
    fill its rows. Sources describe matrices `[out, in]` before quantisation.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    stack: bool = False
    tiled: bool = False
    transpose: bool = False  # the checkpoint stores [in, out]
    add: float = 0.0  # added to the stored values: Gemma stores norm weights minus one
    whole: bool = False  # stored as whole numbers, which a float holds, too
    role: Role = REPLICATED  # which part of it a device has that shares the model with others

    def renamed(self, old: str, new: str) -> Source:
        """Return the same source with names that begin with `new` in place of `old`."""
        names = tuple(new + name.removeprefix(old) if name.startswith(old) else name for name in self.names)
        return dataclasses.replace(self, names=names)

    def parts(self, shape: tuple[int, ...]) -> Iterator[TensorPart]:
        """Yield the tensors in the order of the parameter's rows; `shape` is the parameter's."""
        count = len(self.rows)
        assert len(self.names) == (count * shape[0] if self.stack else count), self.names
        rest = shape[2:] if self.stack else shape[1:]
        assert sum(self.rows) == shape[1 if self.stack else 0], (self.names, shape)
        for number, name in enumerate(self.names):
            position = number % count
            start = sum(self.rows[:position])
            stop = start + self.rows[position]
            stored = rest if self.tiled else (self.rows[position], *rest)
            place: tuple[int | slice, ...] = (slice(start, stop),)
            if self.stack:
                place = (number // count, *place)
            yield TensorPart(name, stored[::-1] if self.transpose else stored, place)


def one(name: str, rows: int, **options: Any) -> Source:
    """Return the source of a parameter that is a single checkpoint tensor."""
    return Source(names=(name,), rows=(rows,), **options)


class FusedExperts(NamedTuple):
    """The tensors `gate_up_proj` and `down_proj` of all experts of a layer, which some checkpoints have.

    Manifests name the matrices of single experts; `named_tensors.py` cuts them out.
    """

    interleaved: bool = False  # rows of gate and up alternate, else gate's rows come first
    transposed: bool = False  # matrices are stored [in, out], unless they are in four bits


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A family's checkpoint: parameter path → source.

    Paths are as in `Graph.paths` without quantisation; a matrix `…weight` that is quantised comes with `…scale`,
    which has no source of its own.
    """

    sources: Mapping[str, Source]
    prefix: str = "model."  # of all names but the head's; `stored.beginnings` finds a checkpoint's own
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names, by other transformers releases'
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)  # transformers' names, by the checkpoint's
    # Full matches on names without the prefix: tensors that may be there and are not used. Early Llamas stored these.
    ignored: tuple[str, ...] = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    fused: FusedExperts | None = None
