"""The calls that engines use; each picks the first implementation that supports it, on the platform that runs it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from rekindle_kernels import native, pages
from rekindle_kernels.calls import Call, Implementation, LayerKV, needs_scales, storage_dtype
from rekindle_kernels.native import zeros as untouched

ANYWHERE = ("cpu", "gpu", "tpu")
Tree = TypeVar("Tree")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an implementation lives: its module is imported when it is asked for by name or its platform runs."""

    name: str
    module: str  # has IMPLEMENTATIONS: dict[str, Implementation]
    platforms: tuple[str, ...]


# Order is preference.
REGISTRY = (
    Entry("pallas_gpu", "rekindle_kernels.pallas_gpu", ("gpu",)),
    Entry("pallas_tpu", "rekindle_kernels.pallas_tpu", ("tpu",)),
    Entry("native", "rekindle_kernels.native.attention", ("cpu",)),
    Entry("xla", "rekindle_kernels.xla", ANYWHERE),
    Entry("reference", "rekindle_kernels.reference", ANYWHERE),
    # Never chosen, only named: for tests.
    Entry("pallas_gpu_interpret", "rekindle_kernels.pallas_gpu", ()),
    Entry("pallas_tpu_interpret", "rekindle_kernels.pallas_tpu", ()),
)


def implementation_names() -> tuple[str, ...]:
    """Names that `implementation=` accepts, in order of preference."""
    return tuple(entry.name for entry in REGISTRY)


def load(name: str) -> Implementation:
    """The implementation called `name`; raises ValueError for an unknown one."""
    for entry in REGISTRY:
        if entry.name == name:
            found: Implementation = importlib.import_module(entry.module).IMPLEMENTATIONS[name]
            return found
    raise ValueError(f"unknown implementation {name!r}; there are {', '.join(implementation_names())}")


def current_platform() -> str:
    """The platform that a call traced now runs on: the default device's, else the default backend."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    name = getattr(device, "platform", device) if device is not None else jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(str(name), str(name))


def choose(call: Call, implementation: str | None = None) -> Implementation:
    """The first implementation that supports `call`; a named one that can't raises ValueError with its reason."""
    if implementation is not None:
        named = load(implementation)
        reason = named.supports(call)
        if reason is not None:
            raise ValueError(
                f"implementation {implementation!r} can't serve this call: {reason}; pass None to choose one"
            )
        return named
    for entry in REGISTRY:
        if call.platform in entry.platforms:
            candidate = load(entry.name)
            if candidate.supports(call) is None:
                return candidate
    raise AssertionError("the reference supports every call")


def init_pages(
    num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: DTypeLike, *, platform: str | None = None
) -> LayerKV:
    """Zeroed pages of one layer, page 0 included; int8 and fp8 pages come with scales."""
    shapes = abstract_pages(num_pages, kv_heads, page_size, head_dim, dtype, platform=platform)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def abstract_pages(
    num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: DTypeLike, *, platform: str | None = None
) -> LayerKV:
    """The shapes of `init_pages`, without memory and without tracing."""
    stored = storage_dtype(dtype, platform or current_platform())
    shape = (num_pages, 2, kv_heads, page_size, head_dim)
    scales = jax.ShapeDtypeStruct(shape[:-1], jnp.float32) if needs_scales(dtype) else None
    return LayerKV(jax.ShapeDtypeStruct(shape, stored), scales)  # type: ignore[arg-type]


def zeros(shapes: Tree, *, platform: str | None = None) -> Tree:
    """Arrays of zeros for a tree of ShapeDtypeStructs, within a program; on CPU memory that nobody has touched yet."""
    leaves, tree = jax.tree.flatten(shapes)
    if (platform or current_platform()) != "cpu" or not untouched.supported() or not native.builds(untouched.NAME):
        return jax.tree.unflatten(tree, [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves])
    sizes = np.array([leaf.dtype.itemsize for leaf in leaves], np.int32)
    return jax.tree.unflatten(tree, jax.ffi.ffi_call(native.ensure(untouched.NAME), leaves)(sizes))


def write_kv(
    kv: LayerKV,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> LayerKV:
    """Write token t's k[t], v[t] ([T, K, D]) to page page_ids[t] at offsets[t]; in place when the caller donates `kv`.

    Values are rounded, or quantised with a scale per token and head, to what `kv` holds. Padding tokens write to
    page 0; which of two tokens with one destination wins is undefined.
    """
    here = platform or current_platform()
    names = (
        [entry.name for entry in REGISTRY if here in entry.platforms] if implementation is None else [implementation]
    )
    own = next((write for write in (load(name).write for name in names) if write is not None), pages.write_kv)
    with jax.named_scope("write_kv"):
        return own(kv, k, v, page_ids, offsets)


def paged_attention(
    q: jax.Array,
    kv: LayerKV,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_prefills: jax.Array,
    *,
    decode_rows: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Causal attention of a ragged batch over paged keys and values; [T, H, D] in q's dtype.

    q [T, H, D]: tokens 0..R-1 (R = decode_rows) are one token each of sequences 0..R-1; the others are prefill tokens
    of sequences R..N-1, packed without gaps. page_table int32 [N, W]. kv_lens int32 [N] counts the keys of each
    sequence including this step's tokens, which `write_kv` has already written; 0 marks an empty row. cu_q_lens int32
    [N-R+1]: half-open offsets of each prefill sequence within q[R:]; num_prefills int32 []: how many of the N-R are
    real. Query i of a prefill sequence sits at position kv_len - q_len + i. Rows and tokens beyond are padding and
    give zeros.

    sliding_window w: a query at position p sees keys p-w+1..p. soft_cap c: logits become c·tanh(logits/c). sinks
    float32 [H]: one more logit per head that takes part in the softmax and carries no value.
    """
    assert q.shape[1] % kv.kv_heads == 0, f"{q.shape[1]} query heads are no multiple of {kv.kv_heads} kv heads"
    assert page_table.shape[0] == kv_lens.shape[0] == decode_rows + cu_q_lens.shape[0] - 1, (
        f"page_table {page_table.shape}, kv_lens {kv_lens.shape} and cu_q_lens {cu_q_lens.shape} disagree "
        f"with {decode_rows} decode rows"
    )
    call = Call(
        platform=platform or current_platform(),
        tokens=q.shape[0],
        decode_rows=decode_rows,
        sequences=kv_lens.shape[0],
        heads=q.shape[1],
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        page_size=kv.page_size,
        table_width=page_table.shape[1],
        q_dtype=q.dtype,
        kv_dtype=kv.dtype,
        storage=kv.pages.dtype,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
    )
    chosen = choose(call, implementation)
    with jax.named_scope(f"paged_attention_{chosen.name}"):
        return chosen.attention(
            q,
            kv,
            page_table,
            kv_lens,
            cu_q_lens,
            num_prefills,
            decode_rows=decode_rows,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
