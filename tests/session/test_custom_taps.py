"""Taps of the user's own, and changes that have a name: exact in any batch and cache state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from helpers.sessions import engine_of
from helpers.tapping import Plain, difference
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Session, Steer, Tap
from rekindle.errors import ConfigError, InvalidRequest

pytestmark = pytest.mark.usefixtures("large_steps")
anyio_test = pytest.mark.anyio
MODEL = checkpoints.case("llama")
E, LAYERS = MODEL.config.hidden_size, MODEL.config.num_layers
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 96, "page_size": 8,
    "disk_memory": 0, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(3, 160, count).tolist() for count in (5, 41, 60)]
VECTORS = RNG.standard_normal((3, E)).astype(np.float32)
NEW = 10
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
STEERING = {"first": Steer(0, VECTORS[0], 4.0), "both": [Steer(0, VECTORS[1], 2.0), Steer(1, VECTORS[2], 3.0)]}


def wave(x: Any, context: Any) -> Any:
    """Depends on everything that a tap may read."""
    late = (context.position >= context.prompt_length).astype(jnp.float32)
    third, odd = ((number % most).astype(jnp.float32) for number, most in ((context.position, 3), (context.token, 2)))
    return x * (1 + 0.2 * third) + (1 + late + odd) * context.arrays["v"]


def clip(x: Any, context: Any) -> Any:
    return jnp.clip(x, -0.5, 0.5) if context.layer else -x


TAPS = [
    Tap(wave, "wave", layers=0, arrays={"v": VECTORS[0]}),
    Tap(clip, "clip", site="residual_before"),
    Tap(lambda x, context: jnp.zeros_like(x), "no mlp", layers=[-1], site="mlp"),
    Tap(lambda x, context: jnp.zeros_like(x), "no attention", layers=[0], site="attention"),
]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync(MODEL, **OPTIONS, taps=TAPS, steering=STEERING) as opened:
        yield opened


def without(*paths: str) -> Any:
    """The model with some matrices of zeros."""
    leaves = [leaf * 0 if path in paths else leaf for path, leaf in zip(MODEL.graph.paths, MODEL.leaves, strict=True)]
    return dataclasses.replace(MODEL, leaves=leaves)


def waved(prompt: list[int], tokens: list[int]) -> Any:
    """Return the change that `wave` makes after the first layer, for a sequence of at most 96 tokens."""
    padded = jnp.asarray([*tokens, *[0] * (96 - len(tokens))])

    def change(place: int, x: Any, positions: Any) -> Any:
        if place != 1:
            return x
        late, third, odd = (
            numbers.astype(jnp.float32) for numbers in (positions >= len(prompt), positions % 3, padded % 2)
        )
        return x * (1 + 0.2 * third)[:, None] + (1 + late + odd)[:, None] * VECTORS[0]

    return change


def clipped(place: int, x: Any, positions: Any) -> Any:
    return -x if place == 0 else jnp.clip(x, -0.5, 0.5) if place == 1 else x


def tokens_of(plain: Plain, prompt: list[int]) -> list[int]:
    return plain.generate(prompt, NEW)


@anyio_test
async def test_taps_are_those_of_a_plain_forward_whatever_runs_beside(session: Session) -> None:
    for prompt in PROMPTS[2:]:  # which is cut into chunks
        wants: dict[str, Any] = {
            "clip": "clip", "no mlp": ["no mlp"], "no attention": "no attention", "plain": (), "wave": "wave"
        }  # fmt: skip
        handles = {name: session.submit(prompt, **GREEDY, taps=taps) for name, taps in wants.items()}
        texts = {name: list((await handle).token_ids) for name, handle in handles.items()}
        assert texts["plain"] == plain_loop(MODEL, prompt, NEW, context=128), "taps change no other row"
        assert texts["clip"] == tokens_of(Plain(MODEL, clipped), prompt)
        assert texts["no mlp"] == tokens_of(Plain(without(f"layers.{LAYERS - 1}.mlp.down.weight")), prompt)
        assert texts["no attention"] == tokens_of(Plain(without("layers.0.attention.out.weight")), prompt)
        tokens = [*prompt, *texts["wave"]]
        logits = Plain(MODEL, waved(prompt, tokens)).inside(tokens).logits
        assert texts["wave"] == logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist()
        assert len({tuple(text) for text in texts.values()}) >= 4, "most of them change the text"


@pytest.mark.thorough
@anyio_test
async def test_several_taps_a_change_and_a_capture_meet_in_one_step(session: Session) -> None:
    prompt = PROMPTS[0]
    done = await session.generate(
        prompt, **GREEDY, taps=["clip", "no mlp"], steer="first", capture={"residual": "all", "mlp": LAYERS - 1}
    )

    def change(place: int, x: Any, positions: Any) -> Any:
        return clipped(place, x + 4.0 * VECTORS[0] if place == 1 else x, positions)

    other = Plain(without(f"layers.{LAYERS - 1}.mlp.down.weight"), change)
    assert list(done.token_ids) == tokens_of(other, prompt)
    allowed = list(range(40, 60))
    masked = await session.generate(prompt, **GREEDY, taps=["clip", "no mlp"], steer="first", allowed_token_ids=allowed)
    best = other.inside(prompt).logits[-1]
    assert {*masked.token_ids} <= {*allowed} and masked.token_ids[0] == max(allowed, key=lambda token: best[token])
    inside = other.inside([*prompt, *done.token_ids][:-1])
    assert done.captured is not None and not done.captured["mlp", -1].any()
    for layer in range(LAYERS):
        assert difference(done.captured["residual", layer], inside.of(("residual", layer))) < 2e-5


@pytest.mark.thorough
@anyio_test
async def test_prompts_with_different_taps_never_share_pages(session: Session) -> None:
    prompt = RNG.integers(3, 160, 60).tolist()
    kinds: list[dict[str, Any]] = [
        {}, {"taps": "clip"}, {"taps": ["clip", "no mlp"]}, {"steer": "first"}, {"steer": {"first": 0.5}},
        {"taps": "clip", "steer": "first"},
    ]  # fmt: skip
    texts = []
    for kind in kinds:
        first = await session.generate(prompt, **GREEDY, **kind)
        assert first.usage.cached_tokens == 0, kind
        texts.append(first.token_ids)
    assert len({*texts}) >= 5
    order = RNG.permutation(len(kinds) * 2) % len(kinds)
    for index, handle in [(index, session.submit(prompt, **GREEDY, **kinds[index])) for index in order]:
        done = await handle
        assert done.token_ids == texts[index] and done.usage.cached_tokens == 56
    again = await session.generate(prompt, **GREEDY, taps=["no mlp", "clip", "clip"])
    assert again.usage.cached_tokens == 56 and again.token_ids == texts[2], "the order of names means nothing"
    session.check_integrity()


@pytest.mark.thorough
@anyio_test
async def test_changes_by_name_are_the_changes_themselves(session: Session) -> None:
    prompt = PROMPTS[1]
    written = [Steer(0, VECTORS[1], 2.0), Steer(1, VECTORS[2], 3.0), Steer(0, VECTORS[0], -2.0)]
    named = await session.generate(prompt, **GREEDY, steer=["both", {"first": -0.5}])
    spelled = await session.generate(prompt, **GREEDY, steer=written)
    assert named.token_ids == spelled.token_ids
    assert spelled.usage.cached_tokens == 40, "they are the same change"
    assert named.sampling.steer == ("both", {"first": -0.5})
    forked = await session.fork(named, at=4)
    assert forked.token_ids == named.token_ids[4:]


@pytest.mark.thorough
def test_taps_are_compiled_once_and_stored(tmp_path: Path) -> None:
    texts, compiled = [], []
    for vector in VECTORS[:2]:  # other arrays, and the same programs
        tap = Tap(wave, "wave", layers=0, arrays={"v": vector})
        with rekindle.open_sync(MODEL, **{**OPTIONS, "cache_dir": str(tmp_path)}, taps=[tap]) as opened:
            texts.append(opened.generate_sync(PROMPTS[0], **GREEDY, taps="wave").token_ids)
            compiled.append(opened.stats().compilations)
    assert compiled[0] > 0 == compiled[1]
    assert texts[0] != texts[1]


def test_a_session_without_taps_has_no_column_for_them() -> None:
    with rekindle.open_sync(MODEL, **OPTIONS) as opened:
        features = engine_of(opened).runner.programs.features
        assert "x" not in {entry.part.variant for entry in features.entries}
        with pytest.raises(InvalidRequest, match=r"taps='wave': is not a tap of this session.*known: none"):
            opened.generate_sync(PROMPTS[0], taps="wave")


# -- what can't be had


@pytest.mark.parametrize(
    ("tap", "words"),
    [
        (Tap(lambda x, context: x if x[0] > 0 else -x, "branch"), "raised TracerBoolConversionError in its line 1"),
        (Tap(lambda x, context: np.sin(x), "numpy"), "raised TracerArrayConversionError"),
        (Tap(lambda x, context: x[:3], "short"), "returned shape (3,)"),
        (Tap(lambda x, context: None, "nothing"), "returned no array"),  # type: ignore[arg-type, return-value]
        (Tap(lambda x, context: x, "far", layers=9), "is not among the model's 2 layers"),
        (Tap(lambda x, context: x, "text", arrays={"v": "v"}), "has values that are not arrays"),
    ],
)
def test_a_tap_that_does_not_trace_is_refused_when_the_session_opens(tap: Tap, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        rekindle.open_sync(MODEL, **OPTIONS, taps=[tap])
    assert f"taps={tap.name!r}" in str(error.value) and words in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"taps": [wave]}, "is not a Tap"),
        ({"taps": wave}, "is not a list"),
        ({"taps": [TAPS[0], TAPS[0]]}, "contains a name twice"),
        ({"steering": [STEERING["first"]]}, "does not map names to changes"),
        ({"steering": {"first": VECTORS[0]}}, "is not a name with a Steer"),
        ({"steering": {"wide": Steer(0, np.ones(E + 1))}}, f"has {E + 1} numbers"),
        ({"steering": {"far": Steer(9, VECTORS[0])}}, "is not among the model's 2 layers"),
    ],
)
def test_wrong_taps_and_names_are_refused_when_the_session_opens(options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        rekindle.open_sync(MODEL, **OPTIONS, **options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steer": "second"}, "steer='second': is not a steering vector of this session"),
        ({"steer": {"first": "much"}}, "is not a name with a finite weight"),
        ({"steer": {"first": float("nan")}}, "is not a name with a finite weight"),
        ({"steer": [3]}, "is neither a Steer nor the name of one"),
        ({"taps": "second"}, "taps='second': is not a tap of this session"),
        ({"taps": [3]}, "is not a tap's name"),
    ],
)
def test_unknown_names_are_refused(session: Session, options: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        session.generate_sync(PROMPTS[0], **options)
    assert words in str(error.value)
