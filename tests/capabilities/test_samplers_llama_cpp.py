"""The samplers against llama.cpp's own, through llama-cpp-python: the same tokens, probabilities and numbers of draws.

`pip install llama-cpp-python`, then `pytest -m slow` this file. REKINDLE_LLAMA_VOCABULARY, a GGUF file, adds DRY's
breakers in its vocabulary.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from capabilities.test_sampler_chain import MANY, VOCAB, breakers_of, made, numbers, on_device, shares
from rekindle._src.capabilities.samplers import chain
from rekindle._src.capabilities.samplers.breakers import BreakerTables
from rekindle._src.capabilities.samplers.repetition import Breakers, Dry, Window
from rekindle._src.capabilities.samplers.repetition import penalties as dry_penalties
from rekindle._src.core.sampling import Sampling

pytestmark = pytest.mark.slow
llama_cpp = pytest.importorskip("llama_cpp")

BREAKERS = [[], [[5]], [[5], [4, 3, 2], [3, 1]]]
AS_TOKENS: list[dict[int, list[tuple[int, ...]]]] = [{}, {5: [()]}, {5: [()], 4: [(3, 2)], 3: [(1,)]}]
FILE = os.environ.get("REKINDLE_LLAMA_VOCABULARY", "")


class Candidates:
    """Logits as llama.cpp takes them."""

    def __init__(self, logits: np.ndarray) -> None:
        self._data = (llama_cpp.llama_token_data * len(logits))()
        for token, logit in enumerate(logits.tolist()):
            self._data[token].id, self._data[token].logit = token, logit
        self._array = llama_cpp.llama_token_data_array(self._data, len(logits), -1, False)
        self._size = len(logits)

    def apply(self, sampler: Any) -> int:
        """Apply a sampler. Return the token that it has selected, or -1."""
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(self._array))
        chosen = self._array.selected
        return -1 if chosen < 0 else int(self._array.data[chosen].id)

    @property
    def logits(self) -> np.ndarray:
        result = np.full(self._size, -np.inf)
        for place in range(self._array.size):
            entry = self._array.data[place]
            result[entry.id] = entry.logit
        return result


class Sampled:
    """A sampler that is freed with this object."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __enter__(self) -> Any:
        return self.sampler

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_sampler_free(self.sampler)


def theirs(sampling: Sampling) -> Iterator[Callable[[], Any]]:
    """llama.cpp's samplers of a request, in its order."""
    reach, exponent = sampling.dynatemp_range, sampling.dynatemp_exponent
    makers = {
        "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(sampling.top_n_sigma),
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(sampling.top_k),
        "typical_p": lambda: llama_cpp.llama_sampler_init_typical(sampling.typical_p, 0),
        "top_p": lambda: llama_cpp.llama_sampler_init_top_p(sampling.top_p, 0),
        "min_p": lambda: llama_cpp.llama_sampler_init_min_p(sampling.min_p, 0),
        "xtc": lambda: llama_cpp.llama_sampler_init_xtc(1.0, sampling.xtc_threshold, 0, 1),
        "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(sampling.temperature, reach, exponent),
    }
    for name in sampling.order:
        yield makers[name]


@pytest.mark.parametrize("seed", range(5))
def test_every_chain_keeps_llama_cpps_tokens_with_its_probabilities(seed: int) -> None:
    # XTC acts in each row here, as llama.cpp's generator is another one; a tiny temperature is infinite there.
    chosen = [options | ({"xtc_probability": 1.0} if "xtc_probability" in options else {}) for options in MANY]
    samplings = [made(options) for options in chosen if options.get("temperature") != 1e-30]
    logits = (np.random.default_rng(seed).standard_normal((len(samplings), VOCAB)) * (1 + seed)).astype(np.float32)
    found = shares(on_device(logits, samplings))
    for row, sampling in enumerate(samplings):
        candidates = Candidates(logits[row])
        for make in theirs(sampling):
            with Sampled(make()) as sampler:
                candidates.apply(sampler)
        expected = shares(candidates.logits)
        assert ((found[row] > 0) == (expected > 0)).all(), sampling
        np.testing.assert_allclose(found[row], expected, atol=1e-5, err_msg=str(sampling))


def test_xtc_acts_as_often_as_llama_cpps() -> None:
    logits = np.array([2.0, 1.9, 1.8, -3.0], np.float32)
    with Sampled(llama_cpp.llama_sampler_init_xtc(0.3, 0.1, 0, 7)) as sampler:
        acted = 0
        for _ in range(4_000):
            candidates = Candidates(logits)
            candidates.apply(sampler)
            acted += candidates.logits[0] == -np.inf
    padded = np.full((4_000, VOCAB), -np.inf, np.float32)
    padded[:, :4] = logits
    ours = (on_device(padded, [made({"xtc_probability": 0.3})] * 4_000)[:, 0] == -np.inf).sum()
    assert abs(int(ours) - int(acted)) < 5 * (4_000 * 0.3 * 0.7 * 2) ** 0.5


@pytest.mark.parametrize(
    "options", [{"mirostat": 2, "mirostat_tau": 3.0}, {"adaptive_target": 0.2}], ids=["mirostat", "adaptive"]
)
def test_carried_numbers_follow_llama_cpps_draws(options: dict[str, Any]) -> None:
    """Each of llama.cpp's draws is possible here, by the numbers that follow its earlier ones, and as frequent."""
    sampling = made(options | {"mirostat_eta": 0.3, "adaptive_decay": 0.8})
    mirostat, ours = bool(sampling.mirostat), numbers([sampling])
    if mirostat:
        make = llama_cpp.llama_sampler_init_mirostat_v2(11, sampling.mirostat_tau, sampling.mirostat_eta)
        carried = jnp.array([[2 * sampling.mirostat_tau, 0.0]], jnp.float32)
    else:
        make = llama_cpp.llama_sampler_init_adaptive_p(sampling.adaptive_target, sampling.adaptive_decay, 11)
        carried = jnp.array([[sampling.adaptive_target / 0.2, 1 / 0.2]], jnp.float32)
    rng, total, expected, spread = np.random.default_rng(1), 0, 0.0, 0.0
    with Sampled(make) as sampler:
        for _ in range(400):
            logits = (rng.standard_normal((1, VOCAB)) * 2.5).astype(np.float32)
            candidates = Candidates(logits[0])
            token = candidates.apply(sampler)
            llama_cpp.llama_sampler_accept(sampler, token)
            found = shares(np.asarray(chain.last(jnp.asarray(logits), ours, carried, deterministic=False)))[0]
            theirs_now = shares(candidates.logits)
            assert ((found > 0) == (theirs_now > 0)).all()
            np.testing.assert_allclose(found, theirs_now, atol=1e-5)
            likely = int(found.argmax())
            total, expected = total + (token == likely), expected + found[likely]
            spread += found[likely] * (1 - found[likely])
            carried = chain.carry_on(jnp.asarray(logits), ours, carried, jnp.array([token]), deterministic=False)
    assert abs(total - expected) < 5 * spread**0.5 + 1


class Vector(ctypes.Structure):
    """A `std::vector` that its caller keeps alive."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p))

    @classmethod
    def of(cls, array: Any) -> Vector:
        start = ctypes.addressof(array)
        return cls(start, start + ctypes.sizeof(array), start + ctypes.sizeof(array))


def dry_of_tokens(sampling: Sampling, breakers: Sequence[Sequence[int]]) -> Any:
    """llama.cpp's DRY with breakers as tokens, which its own tests use; it has no vocabulary."""
    make = llama_cpp.llama_cpp._lib["_Z30llama_sampler_init_dry_testingffiiRKSt6vectorIS_IiSaIiEESaIS1_EE"]
    make.restype = ctypes.c_void_p
    inner = [(ctypes.c_int * len(breaker))(*breaker) for breaker in breakers]
    outer = (Vector * len(inner))(*(Vector.of(array) for array in inner))
    window = ctypes.c_int(sampling.dry_penalty_last_n)
    pointer = make(
        ctypes.c_float(sampling.dry_multiplier), ctypes.c_float(sampling.dry_base),
        ctypes.c_int(sampling.dry_allowed_length), window, ctypes.byref(Vector.of(outer)),
    )  # fmt: skip
    return ctypes.cast(pointer, llama_cpp.llama_sampler_p_ctypes)


def our_dry(texts: Sequence[np.ndarray], samplings: Sequence[Sampling], breakers: Breakers, vocab: int) -> np.ndarray:
    width = max(map(len, texts))
    tokens = np.full((len(texts), width), -1, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text[::-1]
    lengths = [min(len(text), one.dry_penalty_last_n) for text, one in zip(texts, samplings, strict=True)]
    options = Dry(
        jnp.array([one.dry_multiplier for one in samplings], jnp.float32),
        jnp.array([one.dry_base for one in samplings], jnp.float32),
        jnp.array([one.dry_allowed_length for one in samplings]),
    )
    window = Window(jnp.asarray(tokens), jnp.array(lengths))
    return np.asarray(dry_penalties(window, breakers, options, vocab))


def their_penalties(make: Any, text: np.ndarray, vocab: int) -> np.ndarray:
    with Sampled(make) as sampler:
        for token in text.tolist():
            llama_cpp.llama_sampler_accept(sampler, token)
        candidates = Candidates(np.zeros(vocab, np.float32))
        candidates.apply(sampler)
        return -candidates.logits


@pytest.mark.parametrize("seed", range(4))
def test_dry_takes_what_llama_cpps_takes(seed: int) -> None:
    rng, vocab = np.random.default_rng(seed), 6
    texts, samplings, places = [], [], []
    for row in range(60):
        pattern = rng.integers(0, vocab, rng.integers(1, 9))
        noise = rng.integers(0, vocab, rng.integers(0, 12))
        texts.append(np.concatenate([np.tile(pattern, 12), noise, np.tile(pattern, 3)])[: int(rng.integers(1, 80))])
        samplings.append(
            Sampling(
                dry_multiplier=float(rng.uniform(0.1, 2)), dry_base=float(rng.choice([1.0, 1.2, 1.75, 9.0])),
                dry_allowed_length=int(rng.integers(0, 5)), dry_penalty_last_n=int(rng.choice([3, 20, 64])),
            )
        )  # fmt: skip
        places.append(row % len(BREAKERS))
    found = our_dry(texts, samplings, breakers_of([AS_TOKENS[place] for place in places]), vocab)
    penalised = 0
    for row, (text, sampling) in enumerate(zip(texts, samplings, strict=True)):
        expected = their_penalties(dry_of_tokens(sampling, BREAKERS[places[row]]), text, vocab)
        np.testing.assert_allclose(found[row], expected, rtol=2e-4, err_msg=f"{text} {sampling}")
        penalised += (expected > 0).any()
    assert penalised > 15


@pytest.mark.skipif(not FILE, reason="set REKINDLE_LLAMA_VOCABULARY to a GGUF file")
@pytest.mark.parametrize("breakers", [("\n", ":", '"', "*"), ("the", "\n\n", "###"), ("User:", "é"), ()], ids=repr)
def test_breakers_are_those_of_llama_cpps_vocabulary(breakers: tuple[str, ...]) -> None:
    from rekindle._src.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(FILE)
    vocab = tokenizer.vocab_size
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(FILE.encode(), options)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    sampling = Sampling(dry_multiplier=1.0, dry_allowed_length=1, dry_penalty_last_n=400)
    table = BreakerTables(tokenizer, vocab).table(breakers)
    texts = [
        "The cat.\n\nUser: the dog sat on the mat, theThe cat.\n\nUser: the dog sat on the",
        "### A *bold* way. A *bold* way. ### A *bold* way: é, caféé and café: é, caféé and",
        'one: two: one: two: one "two" one two\n\none two\none two',
    ]
    for text in texts:
        tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        one = Breakers(jnp.asarray(table.classes)[None], jnp.asarray(table.rests)[None])
        found = our_dry([tokens], [sampling], one, vocab)[0]
        spelled = (ctypes.c_char_p * max(1, len(breakers)))(*(breaker.encode() for breaker in breakers))
        make = llama_cpp.llama_sampler_init_dry(vocabulary, 1.0, 1.75, 1, 400, spelled, len(breakers))
        expected = their_penalties(make, tokens, vocab)
        np.testing.assert_allclose(found, expected, rtol=2e-4, err_msg=repr(text))
    llama_cpp.llama_model_free(model)
