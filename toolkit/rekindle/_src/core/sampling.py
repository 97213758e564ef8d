"""`Sampling`: the options of one request. Each is declared and validated once, here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack

from rekindle._src.core import foreign_names
from rekindle._src.core.captured import Captured
from rekindle._src.core.drawable import Record
from rekindle._src.core.options import (
    MAX_BAD_WORDS,
    MAX_STOPS,
    Flag,
    Place,
    Real,
    Refusal,
    Validator,
    Whole,
    Word,
    bounded,
    bounded_stops,
    check_n,
    check_options,
    check_salt,
    check_words,
    door,
    option,
    refuse_unknown,
)
from rekindle._src.core.samplers import (
    ADAPTIVE,
    BREAKERS,
    MAX_BREAKERS,
    MAX_DRY_WINDOW,
    ORDER,
    PENALTIES,
    TEMPERATURE,
    Draw,
    check_breakers,
    read_mirostat,
    read_samplers,
)
from rekindle._src.core.taps import Capture, Steer, SteerLike
from rekindle.errors import InvalidRequest

ANSWER_TOKENS = 2048  # `max_tokens` of a chat without one; the end of the context may come before
MAX_LOGPROBS = 20  # that every step program gives
MAX_VOCABULARY = 1 << 24
MAX_LOGPROB_IDS = 4096
MAX_REPEATS = 1_000
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 300
MAX_CHOICES = 65_536
MAX_ALLOWED_TOKENS = 1 << 19
MAX_ADAPTERS = 8  # of one request
MAX_STEERS = 256
MAX_PROCESSORS = 64  # names in one request; a session has at most 16 of them
MAX_STRUCTURE = 1 << 19  # characters of a regular expression, a grammar, all choices or a schema as text
STRUCTURES = ("schema", "regex", "choice", "grammar", "json")


LogprobsOf = Literal["raw", "sampled"]


class WeightOptions(TypedDict, total=False):
    """Options that choose the weights for a prompt."""

    adapter: str | Mapping[str, float] | None


class PageOptions(WeightOptions, total=False):
    """Options that name the pages of a prompt in the cache."""

    salt: str | None


class SamplingOptions(TypedDict, total=False):
    """Keyword options of one request except `n`, which decides the type of the result; see `Sampling`."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    typical_p: float | None
    top_n_sigma: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: str | Sequence[str] | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    adaptive_target: float | None
    adaptive_decay: float | None
    samplers: str | Sequence[str] | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    until: Callable[[str, Sequence[int]], bool] | None
    stop_repeats: int | None
    include_stop: bool | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_start: int | None
    logprob_token_ids: Sequence[int] | None
    logprobs_of: LogprobsOf | None
    capture: Capture | Mapping[str, object] | None
    steer: SteerLike | Sequence[SteerLike] | None
    patch: Captured | None
    taps: str | Sequence[str] | None
    priority: int | None
    processors: str | Sequence[str] | None
    adapter: str | Mapping[str, float] | None
    salt: str | None
    schema: object | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    json: bool | None
    lenient: bool | None
    whitespace_flexible: bool | None


# Checks of single options; checks of several together follow in `__post_init__`.


class Several(NamedTuple):
    """A tuple of at most `most` entries. Its size is checked before it is copied."""

    entries: str  # the plural of an entry's type
    most: int
    check: Callable[[str, tuple[Any, ...]], None] = lambda name, values: None
    may_be_empty: bool = True

    def __call__(self, name: str, value: Any, error: Refusal, /) -> tuple[Any, ...]:
        if isinstance(value, Iterable) and not isinstance(value, str):
            value = bounded(name, value, self.most)
        values = self._as_tuple(name, value, error)
        if not (values or self.may_be_empty):
            raise error(name, [], "is empty, so that no text is possible", "Name some, or leave it out")
        self.check(name, values)
        return values

    def _as_tuple(self, name: str, value: Any, error: Refusal) -> tuple[Any, ...]:
        if type(value) is tuple:
            return value
        if isinstance(value, str) and not name.endswith("token_ids"):
            return (value,)
        if not isinstance(value, (str, bytes, Mapping)):
            with contextlib.suppress(Exception):
                return tuple(value)
        fix = f"Pass a list of {self.entries}, or leave it out"
        raise error(name, value, f"is not a list of {self.entries}", fix)


def _stop(name: str, value: Any, error: Refusal) -> tuple[str, ...]:
    if isinstance(value, Iterable):
        value = bounded_stops(value)
    texts = _STOPS(name, value, error)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise error(name, texts, "holds something other than non-empty strings", "Remove it")
    return texts


def _until(name: str, value: Any, error: Refusal) -> Callable[[str, Sequence[int]], bool]:
    if not callable(value):
        raise error(name, value, "is not a function", "Pass a function of the text and the token ids so far")
    check: Callable[[str, Sequence[int]], bool] = value
    return check


def _repeats(name: str, value: Any, error: Refusal) -> int:
    times = Whole(0, MAX_REPEATS, "Use a number such as 4; 0 is off")(name, value, error)
    if times == 1:
        raise error(name, value, "would end every text", "Use a number such as 4; 0 is off")
    return times


def _words(name: str, words: tuple[Any, ...]) -> None:
    check_words(words)


def _breakers(name: str, breakers: tuple[Any, ...]) -> None:
    check_breakers(name, breakers, InvalidRequest)


def _named(kind: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Return a check of names that were passed to `open()`."""

    def check(name: str, names: tuple[Any, ...]) -> None:
        for text in names:
            if not isinstance(text, str):
                raise InvalidRequest(name, text, f"is not a {kind}'s name", f"Give {name} to open() and name them here")

    return check


def _capture(name: str, value: Any, error: Refusal) -> Capture:
    return value if isinstance(value, Capture) else Capture(value)


def _steers(name: str, value: Any, error: Refusal) -> tuple[SteerLike, ...]:
    if isinstance(value, Steer | Mapping):
        value = (value,)
    changes: tuple[Any, ...] = _STEERS(name, value, error)
    return tuple(_steer(name, change, error) for change in changes)


def _steer(name: str, change: Any, error: Refusal) -> SteerLike:
    if isinstance(change, Steer) or (isinstance(change, str) and change):
        return change
    if not isinstance(change, Mapping) or not change:
        fix = "Pass rekindle.Steer(layer=…, vector=…), or a name of open(steering={…})"
        raise error(name, change, "is neither a Steer nor the name of one", fix)
    return _weighted(name, change, error, 'Pass {"name": 0.5}')


def _patch(name: str, value: Any, error: Refusal) -> Captured:
    if not isinstance(value, Captured):
        raise error(name, value, "is nothing that was captured", "Pass done.captured, or a part of it by select()")
    value.steers()
    return value


def _tokens(name: str, tokens: Iterable[Any]) -> None:
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidRequest(name, token, "is not a token id", "Use whole numbers from 0")


def _biases(name: str, value: Any, error: Refusal) -> dict[int, float]:
    if isinstance(value, Iterable) and not isinstance(value, str):
        value = bounded(name, value, MAX_LOGIT_BIAS)
    try:
        biases = dict(value)
    except Exception:
        raise error(name, value, "does not map token ids to numbers", "Pass a dict such as {464: -100.0}") from None
    if len(biases) > MAX_LOGIT_BIAS:
        raise error(name, f"{len(biases)} entries", f"is over {MAX_LOGIT_BIAS}", "Bias fewer tokens")
    _tokens(name, biases)
    for token, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or abs(bias) > 1e30 or math.isnan(bias):
            if isinstance(bias, float) and math.isinf(bias):
                continue
            raise error(name, {token: bias}, "is not a number", "Use a float, or ±inf")
    return biases


def _count(name: str, value: Any, error: Refusal) -> int:
    check_n(value)
    return _COUNT(name, value, error)


def _alternatives(most: int) -> Validator:
    """Return a check of how many likely tokens to see; True means 1."""
    number = Whole(0, most, "Use the number of alternatives to see, such as 5")

    def check(name: str, value: Any, error: Refusal) -> int | None:
        return (1 if value else None) if isinstance(value, bool) else number(name, value, error)

    return check


def _adapter(name: str, value: Any, error: Refusal) -> str | dict[str, float]:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, Mapping) or not value or len(value) > MAX_ADAPTERS:
        problem = f"is neither a name nor a mapping of at most {MAX_ADAPTERS} names to weights"
        raise error(name, value, problem, 'Pass the name of an adapter, or {"first": 0.5, "second": 1.0}')
    return _weighted(name, value, error, 'Pass {"name": 0.5}')


def _weighted(name: str, value: Mapping[Any, Any], error: Refusal, fix: str) -> dict[str, float]:
    """Return names and their weights."""
    for key, weight in value.items():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        number = number and abs(weight) <= sys.float_info.max  # an int beyond it is no float
        if not (isinstance(key, str) and key and number):
            raise error(name, {key: weight}, "is not a name with a finite weight", fix)
    return {key: float(weight) for key, weight in value.items()}


def _salt(name: str, value: Any, error: Refusal) -> str:
    check_salt(value)
    salt: str = value
    return salt


def _schema(name: str, value: Any, error: Refusal) -> Any:
    if not (isinstance(value, Mapping) or is_type(value)):
        fix = "Pass a dict, a dataclass or a pydantic model"
        raise error(name, value, "is neither a JSON schema nor a type", fix)
    return value


def _structure_text(name: str, value: Any, error: Refusal) -> str:
    if not isinstance(value, str) or not value:
        raise error(name, value, "is not text, or is empty", "Pass a str, or leave it out")
    check_size(name, len(value))
    return value


def _choices(name: str, choices: tuple[Any, ...]) -> None:
    for text in choices:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(name, choices, "holds something other than non-empty strings", "Remove it")
    check_size(name, sum(map(len, choices)))


_STEERS = Several("rekindle.Steer", MAX_STEERS)
_STOPS = Several("strings", MAX_STOPS)
_COUNT = Whole(1, fix="Use the number of completions that you want")
_PENALTY = Real(-2.0, 2.0, "Use a value such as 0.5; 0 is off")
_SAMPLER: tuple[Place, ...] = ("http", "checkpoint")
_ALL_OFF = (1.0, 0.0, 0.0, 0.0, 0.0, 0, -1.0, None)  # the options that switch samplers on, in `Sampling.extended`


@door(
    InvalidRequest, "a sampling option", "Pass it with the request: session.generate(prompt, {name}=…)",
    foreign_names.SAMPLING,
)  # fmt: skip
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sampling(Record):
    """How one request chooses its tokens. Greedy by default; `None` for an option means its default.

    A request without a `Sampling` begins with the options of the checkpoint's generation_config.json, if that asks for
    sampling. A chat is drawn if the checkpoint says nothing: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05.
    `open(..., generation_config="greedy")` turns both off.

    The logits of a position pass, in this order: processors, `logit_bias`, repetition, presence and frequency
    penalties, the `min_tokens` mask, the mask of `allowed_token_ids`, `bad_words` and a schema or grammar,
    `temperature`, `top_k`, `top_p`, `min_p`.

    With one of the samplers that llama.cpp has besides these, from `typical_p` to `samplers` in the table, the order
    after the masks is llama.cpp's: DRY, `top_n_sigma`, `top_k`, `typical_p`, `top_p`, `min_p`, XTC, `temperature`,
    `adaptive_target`. `samplers` sets another one. `mirostat` replaces all of these but `temperature`.

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
        typical_p (1.0): draw from the tokens with a surprise next to the expected one that have this probability
            together; 1 is off.
        top_n_sigma (0.0): draw from tokens with a logit within so many standard deviations of the largest; 0 is off.
        xtc_probability (0.0): how often all but the least likely of the tokens above xtc_threshold are left out.
        xtc_threshold (0.1): the probability from which XTC leaves tokens out; above 0.5 it is off.
        dynatemp_range (0.0): the temperature may differ by so much: lower where the model is sure; 0 is off.
        dynatemp_exponent (1.0): how the temperature follows the entropy, with a dynatemp_range.
        dry_multiplier (0.0): DRY takes multiplier * base ** (length - allowed) off tokens that would continue a
            repetition of this length; 0 is off.
        dry_base (1.75): its base, at least 1.
        dry_allowed_length (2): repetitions below this length are free.
        dry_penalty_last_n (64): the latest tokens of prompt and output that it reads, at most 4,096; -1 is all of them.
        dry_sequence_breakers (('\\n', ':', '"', '*')): texts that no repetition passes; at most 16.
        mirostat (0): 2 keeps the surprise of tokens near mirostat_tau, in place of the other samplers; 0 is off.
        mirostat_tau (5.0): the surprise that mirostat aims at, in bits.
        mirostat_eta (0.1): how fast it adapts.
        adaptive_target (-1.0): prefer tokens with a probability near this one, on average; below 0 is off.
        adaptive_decay (0.9): how long adaptive_target remembers earlier tokens; 0 to 0.99.
        samplers (None): the samplers to apply, in this order; those left out are off. "penalties" come first.
        logit_bias ({}): added to the logits of these token ids; at most 300.
        allowed_token_ids (None): only these tokens are allowed; name an end token too if the text may end by itself.
        bad_words (()): forbidden words, as the tokenizer spells them alone and after a space.
        seed (None): makes the draws repeatable; None draws one, which the completion reports.
        n (1): completions of the same prompt. Above 1 the result is a list.
        stop (()): strings that end the text, which they are not part of; one, or several.
        stop_token_ids (()): token ids that end it; at most 16.
        until (None): a function of the text and the token ids so far; once it returns True, the text ends there. It is
            called after each token, and other requests wait meanwhile.
        stop_repeats (0): end the text once a block of at most 64 tokens has come this many times in a row; 0 is off.
        include_stop (False): leave the stop string, or the stop token's text, at the end of the text.
        ignore_eos (False): go on after the model's own end of sequence was chosen, up to max_tokens; what follows is
            often no text any more. With `min_tokens` no end is chosen before that, and the text goes on.
        logprobs (None): log-probabilities of the output, with the k most likely tokens; True means 1. For more than 20,
            up to the vocabulary, programs are compiled as needed.
        prompt_logprobs (None): the same for the prompt's tokens; at most 20.
        logprob_start (0): the first token of the prompt that has them; what lies before may come from the cache.
        logprob_token_ids (()): log-probabilities of these tokens at each place, too.
        logprobs_of ('raw'): "raw", the model's own distribution, or "sampled", the one that a token was drawn from,
            after penalties, masks, temperature, top_k, top_p and min_p, with the tokens that were possible.
        capture (None): numbers inside the model to return, such as {"residual": [4, 8]}; see `Capture`.
        steer (()): changes of the residual stream: `Steer`s, in their order, or names passed to `open(steering={…})`.
        patch (None): residuals that another request captured, put where they came from: done.captured.select(…).
        taps (()): names of `Tap`s passed to `open()`.
        priority (0): larger runs first in a session with policy="priority".
        processors (()): names of `LogitsProcessor`s passed to `open()`.
        adapter (None): the name of an adapter (LoRA) of the session, or several with their weights, {"a": 0.5, "b": 1}.
        salt (None): cached pages and pictures are shared only among requests with the same salt, as of one user.
        schema (None): the text is JSON of this schema: a dict, or a type such as a pydantic model or a dataclass.
        regex (None): the whole text matches this regular expression.
        choice (None): the text is one of these strings.
        grammar (None): the text is derived from this grammar, in Lark's or llama.cpp's (GBNF) notation.
        json (False): the text is a JSON object.
        lenient (False): leave out parts of a schema that a grammar can't check, rather than refuse the schema.
        whitespace_flexible (False): with a schema or json, allow spaces and line breaks between the parts.
    """

    max_tokens: int = option(256, Whole(0, fix="Use a number such as 256; 0 only scores the prompt"), also=("command",))
    min_tokens: int = option(0, Whole(0, fix="Use a number such as 16; 0 is off"), also=("http",))
    temperature: float = option(
        0.0, Real(0.0, fix="Use 0 for greedy text, or a value such as 0.7 to sample"),
        also=("command", "http", "checkpoint"),
    )  # fmt: skip
    top_k: int = option(0, Whole(0, fix="Use a number such as 50; 0 is off"), also=("command", "http", "checkpoint"))
    top_p: float = option(
        1.0, Real(0.0, 1.0, "Use a share such as 0.95; 1 is off", above=True), also=("command", "http", "checkpoint")
    )
    min_p: float = option(
        0.0, Real(0.0, 1.0, "Use a share such as 0.05; 0 is off"), also=("command", "http", "checkpoint")
    )
    repetition_penalty: float = option(
        1.0, Real(0.0, fix="Use a value such as 1.1; 1 is off", above=True), also=("command", "http", "checkpoint")
    )
    presence_penalty: float = option(0.0, _PENALTY, also=("http",))
    frequency_penalty: float = option(0.0, _PENALTY, also=("http",))
    typical_p: float = option(1.0, Real(0.0, 1.0, "Use a share such as 0.95; 1 is off", above=True), also=_SAMPLER)
    top_n_sigma: float = option(0.0, Real(-1.0, fix="Use a number such as 1.5; 0 is off"), also=_SAMPLER)
    xtc_probability: float = option(0.0, Real(0.0, 1.0, "Use a share such as 0.5; 0 is off"), also=_SAMPLER)
    xtc_threshold: float = option(0.1, Real(0.0, 1.0, "Use a share such as 0.1"), also=_SAMPLER)
    dynatemp_range: float = option(0.0, Real(0.0, fix="Use a number such as 0.5; 0 is off"), also=_SAMPLER)
    dynatemp_exponent: float = option(1.0, Real(0.0, fix="Use a number such as 1"), also=_SAMPLER)
    dry_multiplier: float = option(0.0, Real(0.0, fix="Use a number such as 0.8; 0 is off"), also=_SAMPLER)
    dry_base: float = option(1.75, Real(1.0, fix="Use a number such as 1.75"), also=_SAMPLER)
    dry_allowed_length: int = option(2, Whole(0, 2**31 - 1, "Use a number such as 2"), also=_SAMPLER)
    dry_penalty_last_n: int = option(
        64, Whole(-1, MAX_DRY_WINDOW, f"Use a number of tokens; -1 is all of them, up to {MAX_DRY_WINDOW:,}"),
        also=_SAMPLER,
    )  # fmt: skip
    dry_sequence_breakers: tuple[str, ...] = option(
        BREAKERS, Several("strings", MAX_BREAKERS, _breakers), also=_SAMPLER
    )
    mirostat: int = option(0, read_mirostat, also=_SAMPLER)
    mirostat_tau: float = option(5.0, Real(0.0, fix="Use a number such as 5"), also=_SAMPLER)
    mirostat_eta: float = option(0.1, Real(0.0, fix="Use a number such as 0.1"), also=_SAMPLER)
    adaptive_target: float = option(-1.0, Real(-1.0, 1.0, "Use a share such as 0.5; -1 is off"), also=_SAMPLER)
    adaptive_decay: float = option(0.9, Real(0.0, 0.99, "Use a number such as 0.9"), also=_SAMPLER)
    samplers: tuple[str, ...] | None = option(None, read_samplers, also=_SAMPLER)
    logit_bias: Mapping[int, float] = option(dict, _biases, also=("http",))
    allowed_token_ids: tuple[int, ...] | None = option(
        None, Several("token ids", MAX_ALLOWED_TOKENS, _tokens, may_be_empty=False), also=("http",)
    )
    bad_words: tuple[str, ...] = option((), Several("strings", MAX_BAD_WORDS, _words), also=("http",))
    seed: int | None = option(
        None, Whole(0, 2**63 - 1, "Use a number such as 1", "must be at least 0 and below 2**63"),
        also=("command", "http"),
    )  # fmt: skip
    n: int = option(1, _count, also=("http",))
    stop: tuple[str, ...] = option((), _stop, also=("command", "http"))
    stop_token_ids: tuple[int, ...] = option((), Several("token ids", MAX_STOP_TOKEN_IDS, _tokens), also=("http",))
    until: Callable[[str, Sequence[int]], bool] | None = option(None, _until)
    stop_repeats: int = option(0, _repeats, also=("http",))
    include_stop: bool = option(False, Flag(), also=("http",))
    ignore_eos: bool = option(False, Flag(), also=("http",))
    logprobs: int | None = option(None, _alternatives(MAX_VOCABULARY))
    prompt_logprobs: int | None = option(None, _alternatives(MAX_LOGPROBS))
    logprob_start: int = option(0, Whole(0, fix="Use the position of a token in the prompt; 0 is the first one"))
    logprob_token_ids: tuple[int, ...] = option((), Several("token ids", MAX_LOGPROB_IDS, _tokens))
    logprobs_of: LogprobsOf = option("raw", Word(("raw", "sampled")))
    capture: Capture | None = option(None, _capture)
    steer: tuple[SteerLike, ...] = option((), _steers, also=("http",))
    patch: Captured | None = option(None, _patch)
    taps: tuple[str, ...] = option((), Several("names", MAX_PROCESSORS, _named("tap")))
    priority: int = option(0, Whole(), also=("http",))
    processors: tuple[str, ...] = option((), Several("names", MAX_PROCESSORS, _named("processor")))
    adapter: str | Mapping[str, float] | None = option(None, _adapter)
    salt: str | None = option(None, _salt, also=("http",))
    schema: object = option(None, _schema)
    regex: str | None = option(None, _structure_text)
    choice: tuple[str, ...] | None = option(None, Several("strings", MAX_CHOICES, _choices, may_be_empty=False))
    grammar: str | None = option(None, _structure_text)
    json: bool = option(False, Flag())
    lenient: bool = option(False, Flag())
    whitespace_flexible: bool = option(False, Flag())

    if TYPE_CHECKING:

        def __init__(self, *, n: int | None = None, **options: Unpack[SamplingOptions]) -> None: ...

    def __post_init__(self) -> None:
        check_options(self, InvalidRequest)
        if self.min_tokens > self.max_tokens:
            problem = f"is above max_tokens, which is {self.max_tokens}"
            raise InvalidRequest("min_tokens", self.min_tokens, problem, "Raise max_tokens, or lower min_tokens")
        structures = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(structures) > 1:
            problem = f"can't be combined with {structures[0]}"
            raise InvalidRequest(structures[1], getattr(self, structures[1]), problem, "Pass one of them")
        if self.lenient and structures != ["schema"]:
            raise InvalidRequest("lenient", True, "means nothing without a schema", "Leave it out")
        if self.whitespace_flexible and structures not in (["schema"], ["json"]):
            raise InvalidRequest("whitespace_flexible", True, "means nothing without schema or json", "Leave it out")

        if self.logprobs is None and (self.logprob_token_ids or self.logprobs_of != "raw"):
            object.__setattr__(self, "logprobs", 0)  # either asks for log-probabilities

    @classmethod
    def of(cls, base: Sampling | None, options: Mapping[str, object]) -> Sampling:
        """Return `base` with keyword options on top; an unknown option raises and names the likely one."""
        refuse_unknown(cls, options)
        if base is not None and not isinstance(base, Sampling):
            raise InvalidRequest("sampling", base, "is not a Sampling", "Pass rekindle.Sampling(…), or only keywords")
        values: dict[str, Any] = dict(options)  # which the record checks
        return cls(**values) if base is None else dataclasses.replace(base, **values)

    @property
    def greedy(self) -> bool:
        """True if no token is drawn: the likeliest one that is left is taken."""
        if self.temperature != 0.0 or not self.extended or self.mirostat:
            return self.temperature == 0.0
        return TEMPERATURE in self.order and not (self.dynatemp_range or "xtc" in self.order)

    @property
    def extended(self) -> bool:
        """True if it has a sampler beyond temperature, top_k, top_p and min_p, or an order of them."""
        switches = (
            self.typical_p, self.top_n_sigma, self.xtc_probability, self.dry_multiplier, self.dynatemp_range,
            self.mirostat, self.adaptive_target, self.samplers,
        )  # fmt: skip
        if switches == _ALL_OFF:
            return False
        return (
            self.samplers is not None
            or bool(self.mirostat)
            or self.adaptive_target >= 0.0
            or self.dynatemp_range > 0.0
            or any(map(self._extends, ORDER))
        )

    @property
    def order(self) -> tuple[str, ...]:
        """The samplers that change something, in their order, of a request that is `extended`."""
        if self.mirostat:
            return (TEMPERATURE,)
        chain = (*ORDER, ADAPTIVE) if self.samplers is None else self.samplers
        off = {
            PENALTIES: not self.penalised,
            "top_k": not self.top_k,
            "top_p": self.top_p >= 1.0,
            "min_p": self.min_p <= 0.0,
            TEMPERATURE: self.temperature == 1.0 and not self.dynatemp_range,
            ADAPTIVE: self.adaptive_target < 0.0,
        }
        return tuple(name for name in chain if not off.get(name, False) and (name in off or self._extends(name)))

    def _extends(self, name: str) -> bool:
        """True if the sampler of this name is on, and not one that every request may have."""
        match name:
            case "dry":
                return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0
            case "top_n_sigma":
                return self.top_n_sigma > 0.0
            case "typical_p":
                return self.typical_p < 1.0
            case "xtc":
                return self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5
        return False

    @property
    def whole_logprobs(self) -> bool:
        """True if its log-probabilities, if it has any, need the whole vocabulary's."""
        return (self.logprobs or 0) > MAX_LOGPROBS or bool(self.logprob_token_ids) or self.logprobs_of != "raw"

    @property
    def structured(self) -> bool:
        """True if the text must follow a schema, an expression, a grammar or a list of choices."""
        return self.schema is not None or bool(self.regex or self.choice or self.grammar or self.json)

    @property
    def restricted(self) -> bool:
        """True if some tokens are forbidden."""
        return bool(self.allowed_token_ids or self.bad_words)

    @property
    def looks_inside(self) -> bool:
        """True if it reads or changes numbers inside the model."""
        return self.capture is not None or self.patch is not None or bool(self.steer or self.taps)

    @property
    def scored(self) -> bool:
        """True if it has log-probabilities, of the output or the prompt."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def scored_from(self) -> int:
        """The first prompt position with scores to read, which are for the token after it."""
        return max(0, self.logprob_start - 1)

    @property
    def shaped(self) -> bool:
        """True if a bias, a penalty or `min_tokens` changes its logits."""
        return self.penalised or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def penalised(self) -> bool:
        """True if any of the three penalties is on."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0) and (self.samplers is None or PENALTIES in self.samplers)


def check_size(name: str, characters: int) -> None:
    """Raise InvalidRequest for a structure with a text that would take too long to compile."""
    if characters > MAX_STRUCTURE:
        raise InvalidRequest(
            name, f"{characters:,} characters", f"is over the {MAX_STRUCTURE:,} that are possible", "Use a smaller one"
        )


def check_json(name: str, value: object) -> None:
    """Raise InvalidRequest for a structure with JSON that is surely too long, before it is written as text."""
    size, values = 0, [value]
    while values:
        one = values.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping):
            size += sum(len(key) for key in one if isinstance(key, str))
            values += one.values()
        elif isinstance(one, list | tuple):
            values += one
        size += 1
        if size > MAX_STRUCTURE:
            problem = f"is over the {MAX_STRUCTURE:,} characters that are possible"
            raise InvalidRequest(name, f"a {type(value).__name__}", problem, "Use a smaller one")


def is_type(value: Any) -> bool:
    """True if `value` can be an annotation: a class, or a form such as `list[int]` or `A | B`."""
    forms = (type, types.GenericAlias, types.UnionType)
    return isinstance(value, forms) or (type(value).__module__ == "typing" and typing.get_origin(value) is not None)


def draw_of(sampling: Sampling) -> Draw:
    """Return the options of the draw: neutral ones after samplers that have applied them."""
    if sampling.extended:
        return Draw(0.0 if sampling.greedy else 1.0, 0, 1.0, 0.0)
    return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
