"""The operations of a transformer's step for JAX on CPU, GPU and TPU, each as one call that picks a kernel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle_kernels.native.mask_gate import MaskGate, gated_masks, has_mask_gates
    from rekindle_kernels.ops.added_keys import AddKeysCall, AttentionSums, add_keys
    from rekindle_kernels.ops.attention import (
        AttentionCall,
        AttentionInputs,
        AttentionOptions,
        RopeCall,
        WriteCall,
        chooses_pages,
        implementation_names,
        paged_attention,
        rope,
        write_kv,
    )
    from rekindle_kernels.ops.implementations import OPERATIONS
    from rekindle_kernels.ops.linear import (
        AdaptedTokens,
        AdapterCall,
        GatedCall,
        GroupedCall,
        LinearCall,
        LinearOptions,
        NormCall,
        activate,
        add_adapters,
        gated,
        grouped_linear,
        linear,
        rms_norm,
    )
    from rekindle_kernels.ops.memory import abstract_pages, fill_pages, give_up_zeros, init_pages, zeros
    from rekindle_kernels.ops.page_bounds import BoundCall, bound_pages
    from rekindle_kernels.ops.programs import (
        BackgroundBuild,
        Traits,
        build_kernels,
        configure,
        ensure_kernels,
        environment,
        fuse,
        gpu_path,
        kernel_being_compiled,
        kernels_for,
        kernels_in,
        kernels_origin,
        traits,
        unavailable_reason,
    )
    from rekindle_kernels.ops.recurrence import (
        EDGE,
        ChannelDeltaOptions,
        ConvolutionOptions,
        DeltaOptions,
        DeltaWeights,
        RaggedBatch,
        ScanOptions,
        ScanWeights,
        causal_convolution,
        channel_delta,
        gated_delta,
        selective_scan,
    )
    from rekindle_kernels.ops.registry import Implementation, Registry, current_platform
    from rekindle_kernels.ops.sampling import (
        SMALL_TOP_K,
        Choice,
        SamplingCall,
        Wanted,
        draw,
        draws_in_one_call,
        greedy,
        top_k,
    )
    from rekindle_kernels.packed_pages import PACKED, PackedDtype
    from rekindle_kernels.pages import LayerKV, gather_pages, scatter_pages, storage_dtype
    from rekindle_kernels.xla.linear import exact_precision, narrow_dtype, quantize_rows

_HOMES = {  # modules and their public names; loaded at first use, since they import JAX
    "native.mask_gate": "MaskGate gated_masks has_mask_gates",
    "ops.added_keys": "AddKeysCall AttentionSums add_keys",
    "ops.attention": (
        "AttentionCall AttentionInputs AttentionOptions RopeCall WriteCall chooses_pages implementation_names "
        "paged_attention rope write_kv"
    ),
    "ops.implementations": "OPERATIONS",
    "ops.linear": (
        "AdaptedTokens AdapterCall GatedCall GroupedCall LinearCall LinearOptions NormCall activate add_adapters "
        "gated grouped_linear linear rms_norm"
    ),
    "ops.memory": "abstract_pages fill_pages give_up_zeros init_pages zeros",
    "ops.page_bounds": "BoundCall bound_pages",
    "ops.programs": (
        "BackgroundBuild Traits build_kernels configure ensure_kernels environment fuse gpu_path kernel_being_compiled "
        "kernels_for kernels_in kernels_origin traits unavailable_reason"
    ),
    "ops.recurrence": (
        "ChannelDeltaOptions ConvolutionOptions DeltaOptions DeltaWeights EDGE RaggedBatch ScanOptions ScanWeights "
        "causal_convolution channel_delta gated_delta selective_scan"
    ),
    "ops.registry": "Implementation Registry current_platform",
    "ops.sampling": "Choice SMALL_TOP_K SamplingCall Wanted draw draws_in_one_call greedy top_k",
    "packed_pages": "PACKED PackedDtype",
    "pages": "LayerKV gather_pages scatter_pages storage_dtype",
    "xla.linear": "exact_precision narrow_dtype quantize_rows",
}
_MODULES = {name: f"rekindle_kernels.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = [  # noqa: RUF022  in the order of `sorted`, as every package's
    "AdaptedTokens", "AdapterCall", "AddKeysCall", "AttentionCall", "AttentionInputs", "AttentionOptions",
    "AttentionSums", "BackgroundBuild", "BoundCall", "ChannelDeltaOptions", "Choice", "ConvolutionOptions",
    "DeltaOptions", "DeltaWeights", "EDGE", "GatedCall", "GroupedCall", "Implementation", "LayerKV", "LinearCall",
    "LinearOptions", "MaskGate", "NormCall", "OPERATIONS", "PACKED", "PackedDtype", "RaggedBatch", "Registry",
    "RopeCall", "SMALL_TOP_K", "SamplingCall", "ScanOptions", "ScanWeights", "Traits", "Wanted", "WriteCall",
    "abstract_pages", "activate", "add_adapters", "add_keys", "bound_pages", "build_kernels", "causal_convolution",
    "channel_delta", "chooses_pages", "configure", "current_platform", "draw", "draws_in_one_call", "ensure_kernels",
    "environment", "exact_precision", "fill_pages", "fuse", "gated", "gated_delta", "gated_masks", "gather_pages",
    "give_up_zeros", "gpu_path", "greedy", "grouped_linear", "has_mask_gates", "implementation_names", "init_pages",
    "kernel_being_compiled", "kernels_for", "kernels_in", "kernels_origin", "linear", "narrow_dtype",
    "paged_attention", "quantize_rows", "rms_norm", "rope", "scatter_pages", "selective_scan", "storage_dtype",
    "top_k", "traits", "unavailable_reason", "write_kv", "zeros",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'rekindle_kernels' has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_MODULES[name]), name))


def __dir__() -> list[str]:
    return [*__all__]
