"""Each option against plain numpy, statistically against the exact distribution, and reproducible by seed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import plain_sampling
from helpers.thorough import by_default
from rekindle._src.core.sampling import Sampling
from rekindle._src.programs import sampling as device
from rekindle._src.programs.logprobs import WIDTH, logprobs_of, prompt_logprobs
from rekindle._src.programs.row_option import RowFlag
from rekindle_kernels import SMALL_TOP_K, Choice, Wanted, greedy, unavailable_reason
from rekindle_kernels.xla.sampling import _kth_largest, uniforms

VOCAB = 300  # more than one block, and no multiple of one
_choose = jax.jit(device.choose, static_argnames="implementation")


@pytest.fixture(autouse=True, params=["xla", "native"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of `choose` runs on both."""
    if request.param == "native" and unavailable_reason() is not None:
        pytest.skip("numba is not installed")
    monkeypatch.setitem(globals(), "implementation", request.param)


implementation = "xla"


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def choose(logits: np.ndarray, choice: Choice) -> jax.Array:
    """With the flags that the host would send."""
    top_k = choice.top_k.max()
    wanted = RowFlag.DRAWS * bool((choice.temperature > 0).any()) | RowFlag.TOP_P * bool((choice.top_p < 1).any())
    wanted |= RowFlag.TOP_K * bool(top_k > 0) | RowFlag.LARGE_K * bool(top_k > SMALL_TOP_K)
    return _choose(logits, choice, jnp.int32(wanted), implementation=implementation)


def choice(samplings: list[Sampling], positions: list[int] | np.ndarray) -> Choice:
    seeds = np.array([[s.seed >> 32, s.seed & 0xFFFFFFFF] for s in samplings], np.uint32)
    return Choice(
        temperature=jnp.array([s.temperature for s in samplings], jnp.float32),
        top_k=jnp.array([s.top_k for s in samplings], jnp.int32),
        top_p=jnp.array([s.top_p for s in samplings], jnp.float32),
        min_p=jnp.array([s.min_p for s in samplings], jnp.float32),
        seed=jnp.array(seeds),
        position=jnp.array(positions, jnp.int32),
    )


def draws(logits: np.ndarray, sampling: Sampling, count: int) -> np.ndarray:
    """Tokens of `count` positions that all have the same logits."""
    rows = 500
    tiled = np.broadcast_to(logits, (rows, logits.shape[-1]))
    parts = [choose(tiled, choice([sampling] * rows, np.arange(at, at + rows))) for at in range(0, count, rows)]
    return np.concatenate([np.asarray(part) for part in parts])


def assert_drawn_from(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Nothing outside the support, and chi-square over the tokens that are frequent enough to count."""
    seen = np.bincount(tokens, minlength=len(expected))
    assert seen[expected == 0].sum() == 0, "a token that an option excludes was drawn"
    often = expected * len(tokens) >= 5
    observed = np.append(seen[often], seen[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * len(tokens)
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1] * observed[:-1].sum() / wanted[:-1].sum()
    if len(wanted) > 1:
        from scipy import stats  # it takes a second, which collecting the tests need not

        assert stats.chisquare(observed, wanted).pvalue > 1e-3


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 100},
    {"top_k": VOCAB},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.001},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 120, "top_p": 0.6},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02, "temperature": 1.5},
]


@pytest.mark.parametrize("options", by_default(OPTIONS, lambda options: OPTIONS.index(options) % 2 == 0), ids=str)
def test_draws_follow_the_exact_distribution(options: dict[str, float]) -> None:
    sampling = Sampling(**{"temperature": 1.0, "seed": 11, **options})
    logits = logits_of(3)
    assert_drawn_from(draws(logits, sampling, 6000), plain_sampling.distribution(logits[0], sampling))


def test_options_mixed_in_one_batch_do_not_touch_each_other() -> None:
    samplings = [Sampling(**{"temperature": 1.0, "seed": i, **o}) for i, o in enumerate(OPTIONS)] + [Sampling(seed=0)]
    logits = logits_of(5, rows=len(samplings))
    together = np.asarray(choose(logits, choice(samplings, list(range(len(samplings))))))
    for row, sampling in enumerate(samplings):
        alone = choose(logits[[row, row]], choice([sampling] * 2, [row, row]))
        assert together[row] == int(alone[0]) == int(alone[1])


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros((3, 70_000), np.float32)
    logits[0, [12, 400, 69_999]] = 5.0
    logits[1, 69_999] = 1.0
    chosen = jax.jit(greedy, static_argnames="implementation")(logits, implementation=implementation)
    assert np.asarray(chosen).tolist() == [12, 69_999, 0]


def test_a_greedy_row_ignores_the_filters() -> None:
    logits = logits_of(8, rows=2)
    rows = [Sampling(seed=1, top_k=5, top_p=0.5, min_p=0.5), Sampling(seed=1, temperature=1.0)]
    assert int(choose(logits, choice(rows, [0, 0]))[0]) == int(np.argmax(logits[0]))


def test_the_smallest_and_largest_temperatures_stay_numbers() -> None:
    logits = logits_of(9, rows=2)
    rows = [Sampling(seed=1, temperature=1e-30), Sampling(seed=1, temperature=1e30)]
    tokens = np.asarray(choose(logits, choice(rows, [4, 4])))
    assert tokens[0] == np.argmax(logits[0])
    assert 0 <= tokens[1] < VOCAB


def test_excluded_tokens_are_never_drawn_even_by_rounding() -> None:
    logits = np.full((1, 2000), -np.inf, np.float32)
    allowed = np.array([3, 255, 256, 1024, 1999])
    logits[0, allowed] = [0.0, -1.0, 1.0, 0.5, 0.0]
    sampling = Sampling(seed=5, temperature=1.0)
    tokens = draws(logits, sampling, 4000)
    assert set(tokens.tolist()) == set(allowed.tolist())


def test_ties_at_the_border_of_top_k_are_all_kept() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :4] = 3.0
    tokens = draws(logits, Sampling(seed=2, temperature=1.0, top_k=2), 1000)
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_seeds_positions_and_both_halves_of_a_seed_matter() -> None:
    logits = np.zeros((6, 5000), np.float32)
    seeds = [1, 1, 2, 1 + 2**32, 2**63 - 1, 1]
    rows = [Sampling(seed=seed, temperature=1.0) for seed in seeds]
    tokens = np.asarray(choose(logits, choice(rows, [7, 7, 7, 7, 7, 8])))
    assert tokens[0] == tokens[1]
    assert len(set(tokens[1:].tolist())) == 5


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_the_draw_does_not_depend_on_the_shape_of_the_batch(rows: int) -> None:
    logits = logits_of(21, rows=16)
    samplings = [Sampling(seed=100 + i, temperature=0.8, top_p=0.9, top_k=50) for i in range(16)]
    positions = list(range(50, 66))
    whole = np.asarray(choose(logits, choice(samplings, positions)))
    some = np.asarray(choose(logits[:rows], choice(samplings[:rows], positions[:rows])))
    assert whole[:rows].tolist() == some.tolist()


@pytest.mark.parametrize("k", [1, 2, 65, 150, 299, 300])
def test_the_kth_largest_is_exact(k: int) -> None:
    values = -np.abs(logits_of(30 + k, rows=4))
    values[2, :200] = -1.5
    values[3, :200] = -np.inf
    wanted = Wanted(*jnp.array([False, False, True, False]))
    found = jax.jit(_kth_largest)(values, jnp.full((4,), k, jnp.int32), wanted)
    exact = np.sort(values, axis=-1)[:, -k] if k < VOCAB else np.full(4, -np.inf)
    assert np.asarray(found).tolist() == exact.tolist()


def test_draws_use_the_words_that_jax_random_derives_from_seed_and_position() -> None:
    seeds, positions = [5, 2**40 + 3], [0, 99]
    halves = jnp.array([[s >> 32, s & 0xFFFFFFFF] for s in seeds], jnp.uint32)
    found = jax.jit(uniforms)(halves, jnp.array(positions, jnp.int32), jnp.int32(3))
    for row, position in enumerate(positions):
        key = jax.random.fold_in(jax.random.wrap_key_data(halves[row], impl="threefry2x32"), position)
        words = jax.random.key_data(jax.random.fold_in(key, 3))
        assert [float(part[row]) for part in found] == [int(word >> 8) / 2**24 for word in words]


def test_both_paths_draw_the_same_tokens() -> None:
    if unavailable_reason() is not None:
        pytest.skip("numba is not installed")
    rows = [Sampling(**{"temperature": 1.3, "seed": seed, **OPTIONS[seed % len(OPTIONS)]}) for seed in range(400)]
    rows[::40] = [Sampling(seed=0, temperature=0.0)] * 10
    logits = logits_of(8, rows=len(rows), vocab=1000)
    logits[:, 17:200] = -np.inf
    options = choice(rows, list(range(len(rows))))
    wanted = RowFlag.DRAWS | RowFlag.TOP_K | RowFlag.LARGE_K | RowFlag.TOP_P
    ours, theirs = (_choose(logits, options, jnp.int32(wanted), implementation=name) for name in ("native", "xla"))
    # Sums in another order may turn a draw that falls on a border.
    assert np.mean(np.asarray(ours) == np.asarray(theirs)) > 0.99


def test_a_row_of_nan_ends_and_leaves_the_others_alone() -> None:
    logits = logits_of(6, rows=2)
    logits[0] = np.nan
    rows = [Sampling(seed=1, temperature=1.0, top_p=0.5)] * 2
    tokens = choose(logits, choice(rows, [3, 3]))
    assert 0 <= int(tokens[0]) < VOCAB
    assert int(tokens[1]) == int(choose(logits[[1, 1]], choice(rows, [3, 3]))[0])


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    packed = np.array(packed)
    count = (WIDTH - 1) // 2
    return packed[:, :1].view(np.float32)[:, 0], packed[:, 1 : 1 + count], packed[:, 1 + count :].view(np.float32)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_of(40, rows=3)
    exact = np.asarray(logits, np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    own, ids, top = unpack(jax.jit(logprobs_of)(logits, jnp.array([0, 5, 299])))
    np.testing.assert_allclose(own, exact[[0, 1, 2], [0, 5, 299]], atol=1e-5)
    for row in range(3):
        assert ids[row].tolist() == np.argsort(-exact[row], kind="stable")[:20].tolist()
        np.testing.assert_allclose(top[row], np.sort(exact[row])[::-1][:20], atol=1e-5)


def test_a_vocabulary_below_the_most_logprobs_is_padded() -> None:
    _, ids, top = unpack(jax.jit(logprobs_of)(logits_of(1, vocab=7), jnp.array([3])))
    assert sorted(ids[0, :7].tolist()) == list(range(7))
    assert np.isneginf(top[0, 7:]).all()


@pytest.mark.parametrize("length", by_default([40, 8, 32, 100]))
def test_prompt_logprobs_of_every_chunk_size(length: int) -> None:
    hidden = logits_of(50, rows=length, vocab=12)
    weight = logits_of(51, rows=12, vocab=VOCAB)
    targets = np.arange(length, dtype=np.int32) % VOCAB
    targets[1] = -1
    packed = jax.jit(lambda h, t: prompt_logprobs(jnp.int32(RowFlag.PROMPT_LOGPROBS), h, t, lambda x: x @ weight))(
        hidden, targets
    )
    expected = logprobs_of(jnp.asarray(hidden @ weight), jnp.maximum(targets, 0))
    np.testing.assert_allclose(unpack(packed)[0], unpack(expected)[0], atol=1e-4)
    assert (unpack(packed)[1] == unpack(expected)[1]).mean() > 0.99
