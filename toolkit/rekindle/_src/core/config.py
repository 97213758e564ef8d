"""`EngineConfig`: the options of a session. Each is declared and validated once, here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

from rekindle._src.core import foreign_names
from rekindle._src.core.drawable import Record
from rekindle._src.core.dtypes import (
    DTYPES,
    KV_DTYPES,
    DType,
    DTypeLike,
    KVDType,
    KVDTypeLike,
    Quantize,
    checked_dtype,
    checked_quantize,
)
from rekindle._src.core.foreign_calls import CONFIG, ForeignNames
from rekindle._src.core.mesh_shape import Mesh, check_processes, checked_mesh, parsed_mesh
from rekindle._src.core.options import (
    Flag,
    Refusal,
    Size,
    Text,
    TextForm,
    Whole,
    Word,
    check_options,
    door,
    option,
    refuse_unknown,
)
from rekindle._src.core.rope_scaling import checked_rope_scaling
from rekindle.errors import ConfigError

Policy = Literal["fcfs", "sjf", "priority", "lpm", "dfs-weight", "lof", "random"]
Precompile = Literal["auto", "all", "lazy", "background"]
GenerationConfig = Literal["auto", "greedy"]
DraftSource = Literal["auto", "none", "suffix", "mtp"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


class OpenOptions(TypedDict, total=False):
    """Keyword options of `open()` and `open_sync()`; see `EngineConfig`."""

    dtype: DTypeLike | None
    kv_dtype: KVDTypeLike | None
    quantize: Quantize | None
    max_requests: int | None
    max_tokens_per_step: int | None
    max_model_len: int | None
    rope_scaling: str | Mapping[str, object] | None
    page_size: int | None
    device_pages: int | None
    device_memory: int | str | None
    host_memory: int | str | None
    disk_memory: int | str | None
    capture_memory: int | str | None
    projector: str | os.PathLike[str] | None
    cache_dir: str | os.PathLike[str] | None
    shared_cache: str | os.PathLike[str] | None
    restore: str | None
    policy: Policy | None
    precompile: Precompile | None
    max_queue: int | None
    attention_budget: int | None
    max_adapters: int | None
    max_adapter_rank: int | None
    prefix_cache: bool | None
    prompt_lookup: int | None
    drafts: DraftSource | str | os.PathLike[str] | None
    deterministic: bool | None
    kernels: str | None
    seed: int | None
    log_every: int | None
    step_timeout: float | None
    quiet: bool | None
    generation_config: GenerationConfig | None
    reply_format: str | None
    structured: bool | None
    mesh: Mesh | None
    processes: int | None
    coordinator: str | None


def _dtype(name: str, value: Any, error: Refusal) -> str:
    return checked_dtype(name, value, DTYPES)


def _kv_dtype(name: str, value: Any, error: Refusal) -> str:
    return checked_dtype(name, value, KV_DTYPES)


def _quantize(name: str, value: Any, error: Refusal) -> str | None:
    return checked_quantize(value)


def _mesh(name: str, value: Any, error: Refusal) -> Any:
    return checked_mesh(value)


def _page_size(name: str, value: Any, error: Refusal) -> int:
    size = _PAGE_SIZE(name, value, error)
    if size & (size - 1):
        raise error(name, size, "is not a power of two", "Use 16, 32, 64 or 128")
    return size


def _seconds(name: str, value: Any, error: Refusal) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise error(name, value, "is not a number of seconds", "Pass a float")
    if not value >= 0:
        raise error(name, value, "must be at least 0", "Use a number of seconds, such as 60")
    return value


def _address(name: str, value: Any, error: Refusal) -> Any:
    return value  # checked together with `processes`


_PAGE_SIZE = Whole(8)


@door(ConfigError, "an option of open()", "Pass it to open(): open(…, {name}=…)", foreign_names.OPEN)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineConfig(ForeignNames, Record):
    """How a session runs: the keyword options of `open()`. `None` for an option means its default.

    "auto" and None are resolved once, when the session opens; `session.config` has the result. Bytes may be text with a
    unit, too: "512MiB", "2GB".

    Options:
        dtype ("auto"): dtype of the weights, as text or as numpy's or JAX's dtype; "auto" is a loaded
            model's own, else the checkpoint's on GPU and TPU, bfloat16 on CPU.
        kv_dtype ("auto"): dtype of cached keys and values; "auto" follows dtype. "int8" and "float8_e4m3fn" take about
            half of 16 bits, with a scale for each token and head. "int8-int4" keeps keys in eight bits and values in
            four, both rotated, in about two fifths; "int4" keeps four bits of both, which small models lose much by.
        quantize (None): "int8" for weights and activations, "int8-weight" for weights alone, "int4" for four bits with
            embedding and head in eight; "int4-32" and -128 choose the group. A dict says it by part: "attention",
            "mlp", "experts", "embedding" and "head"; other parts are not quantised. None keeps the groups of a
            quantised checkpoint as they are.
        max_requests (16): sequences that run at once. A draft takes the place of one, so where all run there are none.
        max_tokens_per_step (512): tokens that decoding and prefill chunks share in one step.
        max_model_len (None): tokens of prompt and completion together; None is the model's own, at most 4096.
        rope_scaling (None): a stretch of the positions beyond the model's own context: "yarn:4", "linear:2", or a dict
            as transformers' rope_scaling. The session is one of another model then; max_model_len may be as much more.
        page_size (None): tokens per KV page, a power of two; None suits the platform's kernels, and
            16 with an attention_budget.
        device_pages (None): KV pages on the device; None follows device_memory.
        device_memory (None): bytes for KV pages; None is a tenth of RAM on CPU, all free memory on GPU and TPU.
        host_memory (1 GiB): bytes of host memory for pages that left the device; 0 turns the tier off.
        disk_memory (4 GiB): bytes of disk for pages and snapshots; 0 turns the tier off.
        capture_memory (256 MiB): bytes of host memory for captures with keep=True; 0 keeps none.
        projector (None): GGUF file (mmproj) that reads pictures for a model in GGUF; None is the only one next to it.
        cache_dir (None): where programs, pages and weights persist; None is $REKINDLE_CACHE, else the user's cache,
            where compiled kernels, which all sessions share, always are.
        shared_cache (None): a folder or URL (s3://…, gs://…) that machines share as a second cache, after cache_dir;
            None is $REKINDLE_SHARED_CACHE, if it is set.
        restore (None): name of a snapshot to restore; "auto" for all pages that earlier sessions kept, the likeliest of
            them read ahead; or "none". By default a notebook's session finds pages on disk when a prompt needs them.
        policy ("fcfs"): order of admission: "fcfs", "sjf", "priority", "lpm", "dfs-weight", "lof" or "random".
            A server's callers take turns under "fcfs", and under "priority" where it is equal.
        precompile ("auto"): when programs compile: "all", "lazy" or "background"; "auto" is "background" in notebooks.
            Those of prompts' log-probabilities compile at their first use, whatever it is.
        max_queue (1024): requests that may wait; beyond, generate() waits and submit() raises QueueFull.
        attention_budget (None): keys that a token being decoded attends to in each layer and head, on its own page and
            on those that can have the most of its attention; layers with a window keep that. None is all of them, and
            so is a budget that all fit in. Prompts attend to all.
        max_adapters (8): adapters (LoRA) on the device at once; others wait in host memory. 0 is a session without.
        max_adapter_rank (64): rank that each of them may have; together they share the room of all.
        prefix_cache (True): share the pages of equal beginnings of prompts.
        prompt_lookup (0): tokens that a request may draft from its own text, checked along with the next one; 0 is off.
        drafts ("auto"): where drafts come from: "suffix" is all texts of the session, 7 tokens at a time unless
            prompt_lookup says how many; "mtp" is the model's own head, if it has one, up to 7 tokens before a step;
            a folder, a GGUF file, a hub id or "tiny" is a small model with the same tokenizer, the assistant of a
            Gemma 4 model, or a head of EAGLE-3 or DFlash; "auto" is prompt_lookup and what grammars force; "none" is no
            drafts at all.
        deterministic (False): the same prompt and seed give the same tokens, whatever runs alongside (CPU only).
        kernels (None): a rekindle_kernels implementation of attention; None picks the first that fits.
        seed (None): seeds the draw of per-request seeds and policy="random".
        log_every (0): steps between two log lines; 0 is quiet.
        step_timeout (60.0): seconds after which a step is reported as slow.
        quiet (False): no progress bars.
        generation_config ("auto"): "auto" samples as the checkpoint's generation_config.json asks, and draws
            answers of chats where it says nothing; "greedy" does neither.
        reply_format ("auto"): the syntax of the model's calls and reasoning, such as "hermes" or "gemma4"; "auto" is
            the checkpoint's response_template, else what its chat template shows.
        structured (False): precompile also the programs of structured output; otherwise its first request does.
        mesh (None): devices that share the model: 4, {"model": 4, "expert": 2} or a jax.sharding.Mesh; None is one.
            {"data": 2, "model": 4} has two such groups, each with its own pages, which share the requests.
        processes (1): processes that share the model, each with as many devices of `mesh`; the others run
            `rekindle follow`.
        coordinator (None): "host:port" at which this process waits for the others.
    """

    _foreign = CONFIG

    dtype: DType = option("auto", _dtype, also=("command",), text=TextForm("DTYPE"))
    kv_dtype: KVDType = option("auto", _kv_dtype, text=TextForm("DTYPE"))
    quantize: str | None = option(None, _quantize, also=("command",), text=TextForm("KIND|PART=KIND,..."))
    max_requests: int = option(16, Whole(1), also=("command",))
    max_tokens_per_step: int = option(512, Whole(1))
    max_model_len: int | None = option(None, Whole(2), also=("command",))
    rope_scaling: str | None = option(
        None, checked_rope_scaling, also=("command",), text=TextForm("KIND:FACTOR[,original=N]")
    )
    page_size: int | None = option(None, _page_size, text=TextForm("N", int))
    device_pages: int | None = option(None, Whole(2))
    device_memory: int | None = option(None, Size())
    host_memory: int = option(1 << 30, Size())
    disk_memory: int = option(4 << 30, Size())
    capture_memory: int = option(256 << 20, Size())
    projector: str | None = option(None, Text(path=True))
    cache_dir: str | None = option(None, Text(path=True), also=("command",))
    shared_cache: str | None = option(None, Text(path=True), also=("command",))
    restore: str | None = option(None, Text())
    policy: Policy = option("fcfs", Word(POLICIES), also=("command",))
    precompile: Precompile = option("auto", Word(get_args(Precompile)))
    max_queue: int = option(1024, Whole(1))
    attention_budget: int | None = option(None, Whole(1), also=("command",))
    max_adapters: int = option(8, Whole(0))
    max_adapter_rank: int = option(64, Whole(1))
    prefix_cache: bool = option(True, Flag())
    prompt_lookup: int = option(0, Whole(0), also=("command",))
    drafts: DraftSource | str = option("auto", Text(path=True), also=("command",))
    deterministic: bool = option(False, Flag())
    kernels: str | None = option(None, Text())
    seed: int | None = option(None, Whole(0))
    log_every: int = option(0, Whole(0))
    step_timeout: float = option(60.0, _seconds, text=TextForm("SECONDS", float))
    quiet: bool = option(False, Flag())
    generation_config: GenerationConfig = option("auto", Word(get_args(GenerationConfig)))
    reply_format: str = option("auto", Text())
    structured: bool = option(False, Flag())
    mesh: Mesh | None = option(None, _mesh, also=("command",), text=TextForm("N|AXIS=N,...", parsed_mesh))
    processes: int = option(1, Whole(1), also=("command",))
    coordinator: str | None = option(None, _address, also=("command",), text=TextForm("HOST:PORT"))

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[OpenOptions]) -> None: ...

    @property
    def asks_for_drafts(self) -> bool:
        """True if an option asks for drafts, in addition to the ones that any session may have."""
        return self.prompt_lookup > 0 or self.drafts not in ("auto", "none")

    @property
    def restores(self) -> str | None:
        """The snapshot that is restored while the session opens, or "auto"; None for none."""
        return None if self.restore == "none" else self.restore

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        check_processes(self.processes, self.coordinator, self.mesh)

    @classmethod
    def of(cls, options: Mapping[str, object]) -> EngineConfig:
        """Return a config of keyword options; an unknown one raises and names the likely one."""
        refuse_unknown(cls, options)
        values: dict[str, Any] = dict(options)  # which the config checks
        return cls(**values)

    @property
    def cache_folder(self) -> Path:
        """The folder of programs, pages, snapshots and weights, where `cache_dir` says or by default."""
        return cache_folder(self.cache_dir)


class ResolvedConfig(EngineConfig):
    """The options that a session runs with: each size that may be left open is decided. See `opening.resolve`."""

    __slots__ = ()

    if TYPE_CHECKING:
        max_model_len: int
        page_size: int
        device_pages: int
        device_memory: int

    @classmethod
    def with_sizes(
        cls, config: EngineConfig, *, max_model_len: int, page_size: int, device_pages: int, device_memory: int
    ) -> ResolvedConfig:
        """Return a config with these sizes."""
        values: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        values |= {"max_model_len": max_model_len, "page_size": page_size}
        values |= {"device_pages": device_pages, "device_memory": device_memory}
        return cls(**values)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, EngineConfig.__name__, 1)  # as users write it


def spare_places(places: int) -> int:
    """Return how many more sequences a session takes than it has places, of a server's callers with few of them."""
    return places // 8


def cache_folder(cache_dir: str | None = None) -> Path:
    """Return the folder of programs, pages, snapshots and weights: `cache_dir`, $REKINDLE_CACHE or the user's cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if os.environ.get("REKINDLE_CACHE"):
        return Path(os.environ["REKINDLE_CACHE"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rekindle"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "rekindle"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rekindle"
