"""`Sampling`: the options of one request. Validated once, here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rekindle._src.core import foreign_names, html
from rekindle._src.core.bounds import MAX_BAD_WORDS, bounded, bounded_stops, check_n, check_salt, check_words
from rekindle._src.core.option_checks import advice, defaults_of
from rekindle._src.core.options import OpenOptions
from rekindle._src.core.structure_checks import check_structure
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from typing import Unpack

    from rekindle._src.core.options import SamplingOptions

ANSWER_TOKENS = 2048  # `max_tokens` of a chat without one; the end of the context may come before
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 300
MAX_CHOICES = 65_536
MAX_ALLOWED_TOKENS = 1 << 19
MAX_PROCESSORS = 64  # names in one request; a session has at most 16 of them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sampling(html.Record):
    """How one request chooses its tokens. Greedy by default; `None` for an option means its default.

    A request without a `Sampling` begins with the options of the checkpoint's generation_config.json, if that
    asks for sampling; `open(..., generation_config="greedy")` turns this off.

    The logits of a position pass, in this order: processors, `logit_bias`, repetition, presence and frequency
    penalties, the `min_tokens` mask, the mask of `allowed_token_ids`, `bad_words` and a schema or grammar,
    `temperature`, `top_k`, `top_p`, `min_p`.

    Options:
        max_tokens (256): new tokens at most, 2048 in a chat; 0 only scores the prompt, see prompt_logprobs.
        min_tokens (0): new tokens before an end of sequence or a stop token is allowed.
        temperature (0.0): 0 is greedy; 1 draws from the model's own distribution.
        top_k (0): draw from the k most likely tokens only; 0 is off.
        top_p (1.0): draw from the most likely tokens that have this probability together; 1 is off.
        min_p (0.0): draw from tokens at least this share as likely as the most likely one; 0 is off.
        repetition_penalty (1.0): divides the logits of tokens in prompt and output, as in transformers; 1 is off.
        presence_penalty (0.0): taken off the logits of tokens in the output, as in OpenAI's API; -2 to 2.
        frequency_penalty (0.0): the same, for each time that the token occurred; -2 to 2.
        logit_bias ({}): added to the logits of these token ids; at most 300.
        allowed_token_ids (None): only these tokens are allowed; name an end token too if the text may end by itself.
        bad_words (()): forbidden words, as the tokenizer spells them alone and behind a space.
        seed (None): makes the draws repeatable; None draws one, which the completion reports.
        n (1): completions of the same prompt. Above 1 the result is a list.
        stop (()): strings that end the text, which they are not part of; one, or several.
        stop_token_ids (()): token ids that end it; at most 16.
        include_stop (False): leave the stop string, or the stop token's text, at the end of the text.
        ignore_eos (False): go on after the model's own end of sequence.
        logprobs (None): log-probabilities of the output, with the k most likely tokens; True means 1; at most 20.
        prompt_logprobs (None): the same for the prompt's tokens.
        priority (0): larger runs first in a session with policy="priority".
        processors (()): names of `LogitsProcessor`s passed to `open()`.
        salt (None): cached pages are shared only among requests with the same salt, such as those of one user.
        schema (None): the text is JSON of this schema: a dict, or a type such as a pydantic model or a dataclass.
        regex (None): the whole text matches this regular expression.
        choice (None): the text is one of these strings.
        grammar (None): the text is derived from this grammar, in Lark's or llama.cpp's (GBNF) notation.
        json (False): the text is a JSON object.
        lenient (False): leave out parts of a schema that a grammar can't check, rather than refuse the schema.
        whitespace_flexible (False): with a schema or json, allow spaces and line breaks between the parts.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    processors: tuple[str, ...] = ()
    salt: str | None = None
    schema: Any = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json: bool = False
    lenient: bool = False
    whitespace_flexible: bool = False

    if TYPE_CHECKING:

        def __init__(self, *, n: int | None = None, **options: Unpack[SamplingOptions]) -> None: ...

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, default in _SAMPLING_DEFAULTS:
            if getattr(self, name) is None:
                put(self, name, default)
        self._bound_sizes()
        for name, entries in _LISTS:
            if getattr(self, name) is not None:
                put(self, name, self._several(name, entries))
        for name in ("choice", "allowed_token_ids"):
            if getattr(self, name) == ():
                raise InvalidRequest(name, [], "is empty, so that no text is possible", "Name some, or leave it out")
        put(self, "logit_bias", self._biases())
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                put(self, name, 1 if value else None)
        for name in ("max_tokens", "min_tokens", "top_k", "n", "priority"):
            self._whole(name)
        for name in ("seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name)
        for name in ("include_stop", "ignore_eos", "json", "lenient", "whitespace_flexible"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(
                    name, getattr(self, name), "must be True or False", f"Pass {name}=True, or leave it out"
                )
        for name in _FLOATS:
            self._number(name)
        self._within("max_tokens", 0, None, "Use a number such as 256; 0 only scores the prompt")
        self._within("min_tokens", 0, None, "Use a number such as 16; 0 is off")
        if self.min_tokens > self.max_tokens:
            problem = f"is above max_tokens, which is {self.max_tokens}"
            raise InvalidRequest("min_tokens", self.min_tokens, problem, "Raise max_tokens, or lower min_tokens")
        self._within("temperature", 0.0, None, "Use 0 for greedy text, or a value such as 0.7 to sample")
        self._within("top_k", 0, None, "Use a number such as 50; 0 is off")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(
                "top_p", self.top_p, "must be above 0 and at most 1", "Use a share such as 0.95; 1 is off"
            )
        self._within("min_p", 0.0, 1.0, "Use a share such as 0.05; 0 is off")
        if not self.repetition_penalty > 0.0:
            raise InvalidRequest(
                "repetition_penalty", self.repetition_penalty, "must be above 0", "Use a value such as 1.1; 1 is off"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            self._within(name, -2.0, 2.0, "Use a value such as 0.5; 0 is off")
        self._within("n", 1, None, "Use the number of completions that you want")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._within(name, 0, MAX_LOGPROBS, "Use the number of alternatives to see, such as 5")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InvalidRequest("seed", self.seed, "must be at least 0 and below 2**63", "Use a number such as 1")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest("stop", self.stop, "holds something other than non-empty strings", "Remove it")
        check_words(self.bad_words)
        check_structure(self)
        for text in self.processors:
            if not isinstance(text, str):
                raise InvalidRequest(
                    "processors", text, "is not a processor's name", "Give processors to open() and name them here"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                "stop_token_ids", self.stop_token_ids, f"has more than {MAX_STOP_TOKEN_IDS} ids", "Use fewer"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _check_token(name, token)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "logit_bias", f"{len(self.logit_bias)} entries", f"is over {MAX_LOGIT_BIAS}", "Bias fewer tokens"
            )
        for token, bias in self.logit_bias.items():
            _check_token("logit_bias", token)
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or abs(bias) > 1e30 or math.isnan(bias):
                if isinstance(bias, float) and math.isinf(bias):
                    continue
                raise InvalidRequest("logit_bias", {token: bias}, "is not a number", "Use a float, or ±inf")

    def _bound_sizes(self) -> None:
        """Refuse values that are too large before they are copied; later checks refuse wrong types."""
        put = object.__setattr__
        check_n(self.n)
        check_salt(self.salt)
        if isinstance(self.stop, Iterable):
            put(self, "stop", bounded_stops(self.stop))
        for name, most in (
            ("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_LOGIT_BIAS), ("processors", MAX_PROCESSORS),
            ("choice", MAX_CHOICES), ("allowed_token_ids", MAX_ALLOWED_TOKENS), ("bad_words", MAX_BAD_WORDS),
        ):  # fmt: skip
            if isinstance(getattr(self, name), Iterable) and not isinstance(getattr(self, name), str):
                put(self, name, bounded(name, getattr(self, name), most))

    # Any object may arrive here, so that conversions may raise anything.

    def _several(self, name: str, entries: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if type(value) is tuple:
            return value
        if isinstance(value, str) and not name.endswith("token_ids"):
            return (value,)
        if not isinstance(value, (str, bytes, Mapping)):
            with contextlib.suppress(Exception):
                return tuple(value)
        raise InvalidRequest(name, value, f"is not a list of {entries}", f"Pass a list of {entries}, or leave it out")

    def _biases(self) -> dict[int, float]:
        try:
            return dict(self.logit_bias)
        except Exception:
            raise InvalidRequest(
                "logit_bias", self.logit_bias, "does not map token ids to numbers", "Pass a dict such as {464: -100.0}"
            ) from None

    def _whole(self, name: str) -> None:
        value = getattr(self, name)
        if type(value) is int:
            return
        try:
            if isinstance(value, bool):
                raise TypeError
            whole = value.__index__()
        except Exception:
            raise InvalidRequest(name, value, "must be a whole number", "Pass an int") from None
        object.__setattr__(self, name, whole)

    def _number(self, name: str) -> None:
        value = getattr(self, name)
        if type(value) is float and math.isfinite(value):
            return
        number = math.nan
        if not isinstance(value, (bool, str)):
            with contextlib.suppress(Exception):
                number = float(value)
        if not math.isfinite(number):
            raise InvalidRequest(name, value, "must be a finite number", "Pass a float")
        object.__setattr__(self, name, number)

    def _within(self, name: str, low: float, high: float | None, fix: str) -> None:
        value = getattr(self, name)
        if value < low or (high is not None and value > high):
            bound = f"must be at least {low:g}" if high is None else f"must be from {low:g} to {high:g}"
            raise InvalidRequest(name, value, bound, fix)

    @classmethod
    def of(cls, base: Sampling | None, options: Mapping[str, Any]) -> Sampling:
        """Return `base` with keyword options on top; an unknown option raises and names the likely one."""
        known = cls.__dataclass_fields__
        for name in options:
            if name not in known:
                elsewhere = f"Pass it to open(): open(…, {name}=…)" if name in OpenOptions.__annotations__ else ""
                fix = advice(name, known, foreign_names.SAMPLING, elsewhere)
                raise InvalidRequest(name, options[name], "is not a sampling option", fix)
        if base is not None and not isinstance(base, Sampling):
            raise InvalidRequest("sampling", base, "is not a Sampling", "Pass rekindle.Sampling(…), or only keywords")
        return cls(**options) if base is None else dataclasses.replace(base, **options)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def structured(self) -> bool:
        """True if the text must follow a schema, an expression, a grammar or a list of choices."""
        return self.schema is not None or bool(self.regex or self.choice or self.grammar or self.json)

    @property
    def restricted(self) -> bool:
        """True if some tokens are forbidden."""
        return bool(self.allowed_token_ids or self.bad_words)

    @property
    def penalised(self) -> bool:
        """True if any of the three penalties is on."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _check_token(field: str, token: object) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        raise InvalidRequest(field, token, "is not a token id", "Use whole numbers from 0")


_SAMPLING_DEFAULTS = defaults_of(Sampling)
_LISTS = (
    ("stop", "strings"), ("stop_token_ids", "token ids"), ("processors", "names"), ("choice", "strings"),
    ("allowed_token_ids", "token ids"), ("bad_words", "strings"),
)  # fmt: skip
_FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
