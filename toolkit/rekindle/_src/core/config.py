"""What a user can set: `Sampling` for one request, `EngineConfig` for a session. Validated once, here."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from rekindle._src.core import html
from rekindle._src.core.bounds import bounded, bounded_stops, check_n
from rekindle.errors import ConfigError, InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 300
MAX_PROCESSORS = 64  # names in one request; a session has at most 16 of them


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known are: {', '.join(sorted(known))}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sampling(html.Record):
    """How one request chooses its tokens.

    The logits of a position pass, in this order: `logit_bias`, repetition, presence and frequency penalties, the
    `min_tokens` mask, `temperature`, `top_k`, `top_p`, `min_p`. The defaults are greedy.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in transformers
    presence_penalty: float = 0.0  # over the output, as in OpenAI's API and vLLM
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None  # None draws one, which the completion reports
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # k most likely tokens beside the chosen one; True means 1
    prompt_logprobs: int | None = None
    priority: int = 0  # larger runs first under policy="priority"
    processors: tuple[str, ...] = ()  # names of LogitsProcessors given to open(); they see the logits first

    def __post_init__(self) -> None:
        put = object.__setattr__
        self._bound_sizes()
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        put(self, "stop", tuple(self.stop))
        put(self, "stop_token_ids", tuple(self.stop_token_ids))
        put(self, "processors", (self.processors,) if isinstance(self.processors, str) else tuple(self.processors))
        put(self, "logit_bias", dict(self.logit_bias))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                put(self, name, 1 if value else None)
        for name in ("max_tokens", "min_tokens", "top_k", "n", "priority"):
            self._whole(name)
        for name in ("seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos", self.ignore_eos, "is neither True nor False", "Pass one of them")
        for name in _FLOATS:
            self._number(name)
        self._within("max_tokens", 1, None)
        self._within("min_tokens", 0, self.max_tokens)
        self._within("temperature", 0.0, None)
        self._within("top_k", 0, None)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest("top_p", self.top_p, "must be above 0 and at most 1", "Use 1.0 to turn it off")
        self._within("min_p", 0.0, 1.0)
        if not self.repetition_penalty > 0.0:
            raise InvalidRequest(
                "repetition_penalty", self.repetition_penalty, "must be above 0", "Use 1.0 to turn it off"
            )
        self._within("presence_penalty", -2.0, 2.0)
        self._within("frequency_penalty", -2.0, 2.0)
        self._within("n", 1, None)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._within(name, 0, MAX_LOGPROBS)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InvalidRequest("seed", self.seed, "must be at least 0 and below 2**63", "Use a smaller seed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest("stop", self.stop, "holds something other than non-empty strings", "Remove it")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                "stop_token_ids", self.stop_token_ids, f"has more than {MAX_STOP_TOKEN_IDS} ids", "Use fewer"
            )
        for token in (*self.stop_token_ids, *self.logit_bias):
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                field = "logit_bias" if token in self.logit_bias else "stop_token_ids"
                raise InvalidRequest(field, token, "is not a token id", "Use whole numbers from 0")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "logit_bias", f"{len(self.logit_bias)} entries", f"is over {MAX_LOGIT_BIAS}", "Bias fewer tokens"
            )
        for token, bias in self.logit_bias.items():
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or math.isnan(bias):
                raise InvalidRequest("logit_bias", {token: bias}, "is not a number", "Use a float, or ±inf")

    def _bound_sizes(self) -> None:
        """Refuse what is too much before it is copied; what is of a wrong type is left to the checks after this one."""
        put = object.__setattr__
        check_n(self.n)
        if isinstance(self.stop, Iterable):
            put(self, "stop", bounded_stops(self.stop))
        for name, most in (
            ("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_LOGIT_BIAS), ("processors", MAX_PROCESSORS)
        ):  # fmt: skip
            if isinstance(getattr(self, name), Iterable) and not isinstance(getattr(self, name), str):
                put(self, name, bounded(name, getattr(self, name), most))

    def _whole(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidRequest(name, value, "must be a whole number", "Pass an int")
        object.__setattr__(self, name, value.__index__())

    def _number(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
            raise InvalidRequest(name, value, "must be a finite number", "Pass a float")
        object.__setattr__(self, name, float(value))

    def _within(self, name: str, low: float, high: float | None) -> None:
        value = getattr(self, name)
        if value < low or (high is not None and value > high):
            bound = f"must be at least {low}" if high is None else f"must be between {low} and {high}"
            default = type(self).__dataclass_fields__[name].default
            raise InvalidRequest(name, value, bound, f"Leave it out for {default}")

    @classmethod
    def of(cls, base: Sampling | None, options: Mapping[str, Any]) -> Sampling:
        """`base` with keyword options on top; an unknown option raises and names the nearest known one."""
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise InvalidRequest(
                    name, options[name], "is not a sampling option", _suggest(name, cls.__dataclass_fields__)
                )
        return dataclasses.replace(base if base is not None else cls(), **options)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


_FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip

Policy = Literal["fcfs", "sjf", "priority", "lpm", "dfs-weight", "lof", "random"]
POLICIES: tuple[str, ...] = ("fcfs", "sjf", "priority", "lpm", "dfs-weight", "lof", "random")
DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
QUANTIZE: tuple[str | None, ...] = (None, "int8", "int8-weight")
PRECOMPILE: tuple[str, ...] = ("auto", "all", "lazy", "background")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineConfig(html.Record):
    """Everything `open()` takes beside the model. `None` and "auto" are resolved once, when the session opens."""

    dtype: str = "auto"  # weights: the checkpoint's on GPU and TPU, bfloat16 on CPU
    kv_dtype: str = "auto"  # pages: follows dtype
    quantize: str | None = None
    max_requests: int = 16  # sequences that run at once
    max_tokens_per_step: int = 512  # budget that decode rows and prefill chunks share
    max_model_len: int | None = None  # None: the model's own, at most 4096
    page_size: int | None = None  # tokens per KV page; None: what the platform's kernels like
    device_pages: int | None = None  # None: from device_memory
    device_memory: int | None = None  # bytes for KV pages; None: a tenth of RAM on CPU, what is free on GPU and TPU
    host_memory: int = 1 << 30  # bytes of host memory for pages that left the device; 0 turns the tier off
    disk_memory: int = 4 << 30  # bytes of disk for pages and snapshots; 0 turns the tier off
    cache_dir: str | None = None  # None: $REKINDLE_CACHE, else the user's cache folder
    restore: str | None = None  # a snapshot's name, or "auto"
    policy: Policy = "fcfs"  # order of admission; "sjf" keeps short prompts fast during floods of long ones
    precompile: str = "auto"  # "background" in notebooks, else "lazy"
    max_queue: int = 1024  # requests that wait; submit() waits beyond, or raises QueueFull
    prefix_cache: bool = True
    prompt_lookup: int = 0  # tokens that a request may guess from its own text, checked beside the next one; 0 is off
    kernels: str | None = None  # a rekindle_kernels implementation; None picks the first that fits
    seed: int | None = None  # seeds the draw of per-request seeds and policy="random"
    log_every: int = 0  # steps between two log lines; 0 is quiet
    step_timeout: float = 60.0  # seconds after which a step is reported as slow
    quiet: bool = False

    def __post_init__(self) -> None:
        for name, low in _WHOLE:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ConfigError(name, value, "must be a whole number", "Pass an int")
            if value < low:
                raise ConfigError(name, value, f"must be at least {low}", "Raise it")
        for name, known in (
            ("dtype", DTYPES),
            ("kv_dtype", (*DTYPES, "int8")),
            ("quantize", QUANTIZE),
            ("policy", POLICIES),
            ("precompile", PRECOMPILE),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    name, getattr(self, name), "is not known", f"Use one of {', '.join(map(repr, known))}"
                )
        for name in ("prefix_cache", "quiet"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "is neither True nor False", "Pass one of them")
        if self.page_size is not None and self.page_size & (self.page_size - 1):
            raise ConfigError("page_size", self.page_size, "is not a power of two", "Use 16, 32, 64 or 128")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """From keyword options; an unknown one raises and names the nearest known one."""
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise ConfigError(
                    name, options[name], "is not an option of open()", _suggest(name, cls.__dataclass_fields__)
                )
        return cls(**options)


_WHOLE = (
    ("max_requests", 1), ("max_tokens_per_step", 1), ("max_model_len", 2), ("page_size", 8), ("device_pages", 2),
    ("device_memory", 0), ("host_memory", 0), ("disk_memory", 0), ("max_queue", 1), ("seed", 0), ("log_every", 0),
    ("prompt_lookup", 0),
)  # fmt: skip


def cache_folder(cache_dir: str | None = None) -> Path:
    """Where programs, pages, snapshots and weights persist: `cache_dir`, $REKINDLE_CACHE or the user's cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if os.environ.get("REKINDLE_CACHE"):
        return Path(os.environ["REKINDLE_CACHE"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rekindle"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "rekindle"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rekindle"
