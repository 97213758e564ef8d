"""Resolves options left open by the user: takes an `EngineConfig` and returns a `ResolvedConfig`, without "auto".

Deterministic steps, in which a token's numbers are the same to the last bit in any batch, are resolved here, too: not
all models can have them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import NamedTuple, cast

import jax

from rekindle._src.core import memory, words
from rekindle._src.core.config import EngineConfig, ResolvedConfig
from rekindle._src.core.dtypes import DType, KVDType
from rekindle._src.data_shards.sizes import evenly, in_each
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.kvcache.side import Keying
from rekindle._src.models.base import ALONE, Graph, Placement
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.precision import resolve_dtype
from rekindle._src.models.registry import family
from rekindle._src.programs.buckets import SMALLEST_ROWS
from rekindle._src.programs.kv_layout import page_bytes
from rekindle._src.programs.side_caches import KINDS
from rekindle.errors import ConfigError, OutOfMemory
from rekindle_kernels import PACKED, chooses_pages, implementation_names, unavailable_reason

log = logging.getLogger("rekindle.engine")
LONGEST_DEFAULT = 4096
PAGE_SIZES = {"cpu": 32, "gpu": 64, "tpu": 128}
CPU_SHARE = 0.1  # of RAM
DEVICE_SHARE = 0.9  # of the free memory
LEAST_PAGES = 2  # the scratch page, and another one
LEAST_CHOSEN = 2  # pages of an attention budget
# Tokens of a page that is chosen by its bounds. A fact in SmolLM2-135M's 4,096 tokens with a budget of 1,024: -1.45
# log-probability with pages of 32, -0.08 with 16 as without a budget.
CHOSEN_SIZE = 16
ROBUST = 4096  # a hidden size; keys of four bits, published: 13.5 -> 47.8 perplexity of Qwen3 0.6B, 7.23 -> 7.38 of 8B
CACHED_CONTEXTS = 4  # the default keeps at most this many full contexts per running request


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    *,
    weight_bytes: int = 0,
    placement: Placement = ALONE,
    more_bytes: Callable[[ResolvedConfig], int] = lambda config: 0,
) -> ResolvedConfig:
    """Return the config for this model and platform. `weight_bytes` per device stay free for weights to load; with a
    resolved config, each page has `more_bytes` in addition.
    """
    platform = jax.default_backend()
    dtype = resolve_dtype(config.dtype, model)
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    length = min(config.max_model_len or LONGEST_DEFAULT, model.max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            "max_model_len",
            config.max_model_len,
            f"is beyond the {model.max_position_embeddings} positions of the model",
            f"Use at most {model.max_position_embeddings}",
        )
    if model.is_bidirectional:  # a text is computed in one step
        least = length * placement.data
        config = dataclasses.replace(config, max_tokens_per_step=max(config.max_tokens_per_step, least))
    config = evenly(config, placement.data)
    if config.max_tokens_per_step < config.max_requests:
        raise ConfigError(
            "max_tokens_per_step",
            config.max_tokens_per_step,
            f"is below max_requests={config.max_requests}, so not every running request could decode in a step",
            f"Use at least {max(config.max_requests, SMALLEST_ROWS)}",
        )
    if config.kernels is not None and config.kernels not in implementation_names():
        known = ", ".join(map(repr, implementation_names()))
        raise ConfigError("kernels", config.kernels, "is not an implementation", f"Use one of {known}, or None")
    missing = unavailable_reason("cpu") if config.kernels == "native" else None
    if missing is not None:
        raise ConfigError("kernels", config.kernels, f"can't serve here: {missing}", "Use None")
    if model.is_recurrent:
        _check_recurrent(config, model, placement)
    if config.attention_budget is not None:
        _check_budget(config, config.attention_budget, model, placement)
    rows = max(config.max_requests // placement.data, SMALLEST_ROWS)
    if config.prompt_lookup >= rows:
        raise ConfigError(
            "prompt_lookup",
            config.prompt_lookup,
            f"is beyond what fits a step: max_requests={config.max_requests} makes {rows} rows"
            f"{in_each(placement.data)}, one is the request's",
            f"Use at most {rows - 1}, or raise max_requests",
        )
    usual = PAGE_SIZES.get(_kind(platform), 64)
    page_size = config.page_size or (usual if config.attention_budget is None else CHOSEN_SIZE)
    if config.attention_budget is not None and config.attention_budget < LEAST_CHOSEN * page_size:
        raise ConfigError(
            "attention_budget",
            config.attention_budget,
            f"is below {LEAST_CHOSEN} pages of {page_size} tokens, of which one is always a token's own",
            f"Use at least {LEAST_CHOSEN * page_size}, better thousands, or a smaller page_size",
        )
    config = dataclasses.replace(
        config,
        dtype=cast(DType, dtype),
        kv_dtype=cast(KVDType, kv_dtype),
        prefix_cache=config.prefix_cache and not model.is_bidirectional and _shareable(model, length),
        mesh=config.mesh if placement.divided else None,
    )
    # The size of a page does not depend on how many there are.
    smallest = ResolvedConfig.with_sizes(
        config, max_model_len=length, page_size=page_size, device_pages=LEAST_PAGES, device_memory=0
    )
    if kv_dtype == "int4" and model.hidden_size < ROBUST:
        log.warning(
            "kv_dtype='int4': models as small as this one (hidden size %d) can lose much of their quality by keys in "
            "four bits; kv_dtype='int8-int4' keeps keys in eight",
            model.hidden_size,
        )
    pages = _pages(config, smallest, model, platform, weight_bytes, placement, more_bytes(smallest))
    return dataclasses.replace(smallest, device_pages=pages.number, device_memory=pages.nbytes)


def _check_recurrent(config: EngineConfig, model: ModelConfig, placement: Placement) -> None:
    """Raise ConfigError for options that models with states do not have yet."""
    what = f"the states of this {model.model_type} model"
    if not placement.one_pool:
        raise ConfigError(
            "mesh",
            config.mesh,
            f"has several data shards or processes, which {what} can't be divided over",
            "Use devices of one process, with one data shard",
        )


def _check_budget(config: EngineConfig, budget: int, model: ModelConfig, placement: Placement) -> None:
    """Raise ConfigError for kernels and meshes that can't keep an attention budget."""
    if config.kernels is not None and not chooses_pages(config.kernels):
        raise ConfigError(
            "attention_budget", budget, f"can't be kept by kernels={config.kernels!r}, which read all pages",
            "Leave one of the two out",
        )  # fmt: skip
    limited = [layer for layer, spec in enumerate(model.attention) if spec.budget is not None]
    heads = min((model.pages_of(layer).heads for layer in limited), default=placement.size)
    if placement.size > heads:
        # Such devices have copies of a head of keys for some of its queries, and would choose by these alone.
        raise ConfigError(
            "attention_budget", budget,
            f"can't be kept by {placement.size} devices that share {words.count(heads, 'head')} of keys",
            f"Use at most {words.count(heads, 'device')} for a model, or leave it out",
        )  # fmt: skip


def _shareable(model: ModelConfig, length: int) -> bool:
    """True if pages of equal tokens can stand for them.

    Dynamic and longrope models rotate the keys of long prompts differently.
    """
    if model.rope_regime(length) == model.rope_regime(1):
        return True
    log.warning("no prefix cache: at prompts up to %d tokens this model rotates keys by the prompt's length", length)
    return False


def _kind(platform: str) -> str:
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


class _DevicePages(NamedTuple):
    """The pages of each device."""

    number: int
    nbytes: int


def _pages(
    options: EngineConfig,
    config: ResolvedConfig,
    model: ModelConfig,
    platform: str,
    weight_bytes: int,
    placement: Placement,
    more: int,
) -> _DevicePages:
    """Return the pages that a session asked for, or has room for. Their content has the sizes in `config`.

    Each page has `more` bytes in addition, of another model.
    """
    local, requests = placement.local_config(model), config.max_requests // placement.data
    sizes = [(kind, kind.slot_size(local, config)) for kind in KINDS if kind.slots_for(model, config, placement, 1)]
    size = page_bytes(local, config.page_size, config.kv_dtype, {kind.name: 1 for kind, _ in sizes}) + more

    def side_bytes(pages: int, *, shared: bool) -> int:
        """Return the bytes of side caches next to `pages` pages: of the caches that share `device_memory` with them, or
        of the others.
        """
        return sum(
            kind.slots_for(model, config, placement, pages) * slot
            for kind, slot in sizes
            if (kind.keying is Keying.PAGES) == shared
        )

    def nbytes(pages: int) -> int:
        """Return the bytes of so many pages, and of side caches that share their memory."""
        return pages * size + side_bytes(pages, shared=True)

    shared, others = side_bytes(1, shared=True) > 0, side_bytes(1, shared=False)

    def fitting(budget: int) -> int:
        """Return how many pages fit."""
        low, high = 0, budget // size + 1
        while shared and low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if nbytes(middle) <= budget else (low, middle)
        return low if shared else budget // size

    if options.device_pages is not None:
        return _DevicePages(options.device_pages, nbytes(options.device_pages))
    per_request = pages_for(config.max_model_len, config.page_size)
    if options.device_memory is not None:
        pages = fitting(options.device_memory - others)
    else:
        budget = _free_memory(platform, weight_bytes, placement) - others
        most = CACHED_CONTEXTS * config.max_requests // placement.data * per_request
        if model.is_bidirectional:  # nothing is cached: what two steps in flight have, and a text that waits
            most = 2 * (config.max_tokens_per_step // placement.data // config.page_size + requests) + per_request
        pages = min(fitting(budget), 1 + most)
    if pages < LEAST_PAGES:
        raise OutOfMemory(
            f"KV pages of {size:,} bytes do not fit: there is room for {pages}, and two are needed. "
            "Raise device_memory or lower page_size"
        )
    return _DevicePages(pages, nbytes(pages))


def _free_memory(platform: str, weight_bytes: int, placement: Placement) -> int:
    """Return the bytes that each device of this process has for pages; the fullest decides."""
    devices = placement.local_devices
    if platform == "cpu":
        return int(memory.total() * CPU_SHARE) // len(devices)
    free = []
    for device in devices:
        statistics = device.memory_stats() or {}
        free.append(statistics.get("bytes_limit", 0) - statistics.get("bytes_in_use", 0) - weight_bytes)
    return int(min(free) * DEVICE_SHARE)


def budgeted(graph: Graph, budget: int) -> Graph:
    """Return the graph with a budget of keys for tokens being decoded. Raise ConfigError if no layer can have one."""
    model = graph.config
    if not any(map(model.has_budgets, range(model.num_layers))):
        latent = any(pages.latent for pages in model.kinds_of_pages)
        why = "have a window or see later tokens"
        if latent:
            why = "keep latent pages, whose keys are made of them for each query"
        problem = f"can't be kept: all layers with keys of this {model.model_type} model {why}"
        raise ConfigError("attention_budget", budget, problem, "Leave it out")
    return dataclasses.replace(graph, config=model.with_budget(budget))


HEAD_DIM, PACKED_HEAD_DIM, WIDTH = (
    16,
    32,
    32,
)  # native attention, over packed pages too, and native norms take multiples of these sizes
KEYS, VALUES = 16, 32  # for native kernels of states, multiples of these


def deterministic(graph: Graph, config: EngineConfig) -> Graph:
    """Return the graph with operations that run in deterministic kernels. Raise ConfigError where there are none."""
    reason = reason_against(graph.config, config) or reason_against_norms(graph)
    if reason is not None:
        raise ConfigError("deterministic", True, f"can't be kept: {reason}", "Leave it out")
    return dataclasses.replace(graph, precision=dataclasses.replace(graph.precision, deterministic=True))


def reason_against(model: ModelConfig, config: EngineConfig) -> str | None:
    """Return why this model has no deterministic steps here; None if it has."""
    if jax.default_backend() != "cpu":
        return f"it is for CPUs, and this session runs on {jax.default_backend()}"
    if config.mesh is not None:
        return "devices that share a model add up what each of them has"
    if config.attention_budget is not None:
        return "a token that was decoded attends to other pages than one of a prompt"
    missing = unavailable_reason("cpu")
    if missing is not None:
        return f"it needs the native kernels, and {missing}"
    if config.kernels not in (None, "native"):
        return f"kernels={config.kernels!r} add in an order that depends on the batch"
    if any(model.moe):
        return "experts are multiplied in an order that depends on the batch"
    if family(model.model_type).layer_norms:  # they have other bits in another number of rows
        return "XLA computes its layer norms, for which nothing is promised"
    if any(pages.latent for pages in model.kinds_of_pages):
        return "XLA attends to latent pages, for which nothing is promised"
    if model.is_bidirectional:
        return "XLA attends to tokens after a query, for which nothing is promised"
    for state in (spec for spec in model.states if spec is not None):
        if state.channels % KEYS or state.key_size % KEYS or state.value_size % VALUES:
            sizes = f"states of {state.key_size} x {state.value_size} with {state.channels} channels"
            return f"{sizes} are not whole vectors, and XLA takes a prompt through them in another order than a token"
    whole = PACKED_HEAD_DIM if config.kv_dtype in PACKED else HEAD_DIM
    uneven = [pages.key_size for pages in model.kinds_of_pages if pages.key_size % whole]
    if uneven:
        return f"the head size {uneven[0]} is not a multiple of {whole}"
    if model.hidden_size % WIDTH:
        return f"the hidden size {model.hidden_size} is not a multiple of {WIDTH}"
    if model.layer_embedding % WIDTH:
        return f"the size {model.layer_embedding} of the layers' embeddings is not a multiple of {WIDTH}"
    return None


def reason_against_norms(graph: Graph) -> str | None:
    """Return why norms of heads are not native, which `ModelConfig` does not say; None if they are, or if there are
    none."""
    uneven = [pages.key_size for pages in graph.config.kinds_of_pages if pages.key_size % WIDTH]
    if uneven and any(".qk_norm." in path for path in graph.paths):
        return f"norms of heads of {uneven[0]}, not a multiple of {WIDTH}, are XLA's"
    return None
