"""Expressions over names: they match what `re` matches, in time that grows with their length times that of the name."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import adapters
from helpers.driving import tiny_model
from helpers.families import FAMILY_CASES
from rekindle._src.models.adapters.budget import Budget, TooMuchWork
from rekindle._src.models.adapters.expressions import Expression, UnsupportedExpression
from rekindle._src.models.adapters.patterns import ModuleNames
from rekindle._src.models.adapters.peft import Targets
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.registry import config_from_hf
from rekindle.errors import CheckpointError, RequestAborted

WORDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NAMES = [
    *(f"model.layers.{layer}.self_attn.{word}" for layer in (0, 1, 12, 23, 103) for word in WORDS[:4]),
    *(f"model.layers.{layer}.mlp.{word}" for layer in (0, 1, 12, 23, 103) for word in WORDS[4:]),
    *(f"model.language_model.layers.3.mlp.experts.{expert}.up_proj" for expert in (0, 31)),
    "model.visual.blocks.0.attn.qkv", "visual.blocks.0.mlp.up_proj", "visual.merger.mlp.0", "lm_head", "q_proj",
    "transformer.h.7.attn.c_attn", "backbone.layers.4.mixer.in_proj", "model.layers.5.linear_attn.in_proj_qkv",
]  # fmt: skip
ANY = "|".join(WORDS)
WRITTEN = (
    r".*\.(q_proj|v_proj)", r".*\.[qv]_proj", r"(?:.*\.)?q_proj", r".*\.\d+\.(self_attn\.[qv]|mlp\.up)_proj",
    r"^model\.layers\.0\..*", r".*layers\.(1[0-9]|2[0-3])\..*", r".*layers\.\d{1,2}\.mlp\.(?:up|down)_proj$",
    r"model\.layers\.(?!0\.)\d+\..*", "layers.3.q_proj", "layers.1.*.k_proj", r"0\.mlp\.up_proj", "down_proj", "",
    # LLaMA-Factory, ms-swift, unsloth
    rf"^(?!.*visual).*(?:{ANY}).*", rf"^(?!.*(?:visual|merger)).*(?:{ANY}).*",
    rf"^(model\.language_model.*\.({ANY})|(?!(visual.merger))visual.*\.(qkv|up_proj|0))$",
    rf"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|ffn|dense).*?(?:{ANY}).*?)|"
    rf"(?:\bmodel\.layers\.[\d]{{1,}}\.(?:self_attn|attention|attn|mlp|ffn|dense)\.(?:(?:{ANY})))",
)  # fmt: skip


def same(expression: str, name: str) -> None:
    """Both answers are those of PEFT's own calls of `re`."""
    mine = Expression(expression, ModuleNames(Budget()))
    assert mine.matches(name) == (re.fullmatch(expression, name) is not None), (expression, name)
    end = re.match(rf"(.*\.)?({expression})$", name) is not None
    assert mine.matches_end(name) == end, (expression, name)


@pytest.mark.parametrize("expression", WRITTEN)
def test_what_trainers_write_means_the_same_modules(expression: str) -> None:
    for name in NAMES:
        same(expression, name)


_LETTERS = "ab1_."
_SINGLES = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        "1",
        "_",
        r"\.",
        ".",
        r"\d",
        r"\w",
        r"\W",
        r"\S",
        r"\D",
        "[a-b]",
        "[^a]",
        r"[\d_]",
        "[a.-]",
        r"[^\w]",
    ]
)
_PLACES = st.sampled_from(["^", "$", r"\b", r"\A", r"\Z"])
_REPEATS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{1,}"])


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.sampled_from(["(%s)", "(?:%s)"])
    grouped = st.builds(lambda form, text: form % text, groups, inner)
    looks = st.builds(lambda form, text: form % text, st.sampled_from(["(?!%s)", "(?=%s)"]), inner)
    repeated = st.builds(lambda text, count: text + count, grouped, _REPEATS)
    choices = st.lists(inner, min_size=2, max_size=3).map("|".join)
    return st.lists(st.one_of(grouped, repeated, looks, inner), max_size=4).map("".join) | choices


EXPRESSIONS = st.recursive(
    st.one_of(
        _SINGLES, _PLACES, st.builds(lambda one, count: one + count, _SINGLES.filter(lambda s: s != "ab"), _REPEATS)
    ),
    _larger,
    max_leaves=8,
)


@settings(max_examples=120, deadline=None)
@given(EXPRESSIONS, st.lists(st.text(_LETTERS, min_size=1, max_size=9), min_size=1, max_size=4))
def test_random_expressions_match_what_re_matches(expression: str, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what `re` may read in another way some day
        for name in names:
            try:
                same(expression, name)
            except UnsupportedExpression:
                return


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        (r"(a)\1", r"'\\1'"), ("(?i)a", r"'\(\?i'"), ("(?P<n>a)", r"'\(\?P'"), ("(?<=a)b", r"'\(\?<'"),
        ("(?>a)b", r"'\(\?>'"), ("a++", "a repeat of a repeat"), ("*a", "repeats nothing"), ("a|*", "repeats nothing"),
        ("(a", "without its '\\)'"), ("a)", "closes nothing"), ("[a", "without its ']'"), ("[]a]", "an empty class"),
        ("[b-a]", "does not ascend"), ("a{", "is no repeat"), ("a{3,2}", "is above"), ("a{3,999}", "more than 255"),
        ("^*", "a repeat of an anchor"), ("(?!a)*", "a repeat of an anchor"), ("a\\", "at the end"), (r"\n", r"'\\n'"),
        ("((ab)*c)*", "a repeat of a group with a repeated group"), ("(?:(?!a)b)*", "or a look-ahead in it"),
        ("(" * 17 + ")" * 17, "more than 16 groups"), ("a" * 5000, "5,000 characters"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_name(expression: str, why: str) -> None:
    with pytest.raises(UnsupportedExpression, match=why):
        Expression(expression, ModuleNames(Budget()))


HOSTILE = (
    "(?:[a-z_.0-9]|[a-z_.0-9])*!?", ".*" * 500 + "b", "(a?){255}(a?){255}b?", "(?:a*){200}c?", "(?:.*a){255}",
    "(?:a|a|a|aa)*c?", "(?=.*a.*b.*c)(?!.*a.*a.*a.*!).*", "(?:.*?a){30}.*?",
)  # fmt: skip


@pytest.mark.parametrize("expression", HOSTILE)
def test_no_expression_costs_more_than_its_length_times_the_names(expression: str) -> None:
    def cost(length: int) -> int:
        budget = Budget()
        before = budget.left
        Expression(expression, ModuleNames(budget)).matches("a" * length)
        return before - budget.left

    assert cost(1024) <= 2.1 * cost(512) <= 5 * 512 * len(expression)


RANGES = "".join(f"{chr(first)}-{chr(first + 1)}" for first in range(0x4E00, 0x4E00 + 3 * 1300, 3))
DEAREST = (
    *HOSTILE, f"[{RANGES}]*", f"(?:[^{RANGES}]{{255}}|b){{255}}", rf"[\w\d\s{RANGES}]{{255}}",
    "(?:" + "|" * 4000 + "){255}", "(?:.{255}|a){255}", "a" * 4000, "(?:" + "a|" * 2000 + "b)*c?",
    "(?=.*a)" * 500 + ".*", r"\b.*?\B" * 300, "[a-c]?" * 600, r"[\w\d\s-]*" * 400,
    "a",
)  # fmt: skip
LONG = ("a" * 1024, "a." * 512, "".join(map(chr, range(0x4E00, 0x4E00 + 340))), "".join(map(chr, range(33, 123))) * 11)


class Calls:
    """The calls of functions, of Python and of C, that a block makes."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


@contextmanager
def counted() -> Iterator[Calls]:
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("name", LONG, ids=["one-letter", "dots", "letters", "ascii"])
def test_no_step_costs_more_than_a_few_calls(name: str) -> None:
    """A step that tests every letter with 1,300 ranges took two milliseconds, and the steps of an adapter hours."""
    for expression in DEAREST:
        budget = Budget(20_000)
        with counted() as calls:
            try:
                part = Expression(expression, ModuleNames(budget))
                part.matches(name)
                part.matches_end(name)
            except TooMuchWork:
                pass
        steps = 20_000 - max(budget.left, 0)
        assert calls.count <= 12 * steps, (expression[:20], calls.count, steps)


def test_a_repeat_ends_when_nothing_is_left() -> None:
    for expression in ("(?:[b-c]{255}x){255}", "[b-c]{255}", "(?:b{2,255}c){2,255}"):
        budget = Budget()
        before = budget.left
        assert not Expression(expression, ModuleNames(budget)).matches("a" * 255)
        assert before - budget.left < 600, expression


def test_all_expressions_of_an_adapter_share_their_steps() -> None:
    names = ModuleNames(Budget(2000))
    many = [Expression(f"(?:.|{number})*!?", names) for number in range(20)]
    with pytest.raises(TooMuchWork, match="more than 2,000 steps"):
        sum(expression.matches("a" * 500) for expression in many)


CONFIG = tiny_model().config
STEPS = 1 << 16


def hostile(folder: Path, **fields: Any) -> Path:
    """An adapter of two modules, with a config of these fields."""
    adapters.write(folder, CONFIG, targets=("q_proj", "down_proj"))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


ATTACKS: dict[str, dict[str, Any]] = {
    "targets": {"target_modules": f"(?:[^{RANGES}]{{255}}|b){{255}}"},
    "ranks": {"rank_pattern": {f"{'a?' * number}[^{RANGES}]*.{{255}}": 4 for number in range(50)}},
    "repeats": {"target_modules": f"(?:{'.?' * 2000}){{255}}"},
    "choices": {"exclude_modules": "(?:" + "|" * 4000 + "){255}"},
    "layers": {"layers_to_transform": [0], "layers_pattern": [f"x{number}" for number in range(90_000)]},
    "characters": {"alpha_pattern": {f"{number:05}{'x' * 1000}": 8 for number in range(900)}},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_adapter_costs_no_more_than_its_budget(attack: str, tmp_path: Path) -> None:
    """A config of 17 kB took hours."""
    folder = hostile(tmp_path, **ATTACKS[attack])
    budget = Budget(STEPS)
    with counted() as calls, contextlib.suppress(CheckpointError):
        read_adapter(folder, "x", CONFIG, budget=budget)
    assert calls.count <= 12 * STEPS + 400_000, calls.count  # the rest reads JSON, and names that are no expressions


def test_matching_rests_and_ends_when_nobody_waits_any_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests = list[float]()
    monkeypatch.setattr("time.sleep", rests.append)
    folder = hostile(tmp_path, **ATTACKS["repeats"])
    budget = Budget(wanted=lambda: len(rests) < 3)
    before = budget.left
    with pytest.raises(RequestAborted):
        read_adapter(folder, "x", CONFIG, budget=budget)
    assert len(rests) == 3 and before - budget.left < 20_000


# What trainers write, put together at random, over the names of the modules of real families.

_WORDS = [*WORDS, "c_attn", "in_proj", "qkv_proj", "gate_up_proj", "query_key_value", "self_attn", "mlp", "experts"]
_NUMBERS = [
    r"\d+", r"[0-9]+", r"\d{1,2}", "0", "1", "(0|1)", "[01]", "(?:0|2)", "(1[0-9]|2[0-3]|[0-9])",
    r"(?!0\.)\d+", "[^.]+", r"\d*[02468]",
]  # fmt: skip
_BETWEEN = [r"\.", ".", r"\..*\.", ".*", r"\.(?:self_attn|mlp|attn|mixer)\.", r"\.[a-z_]+\.", r"\.\w+\.", "_"]


def _written() -> st.SearchStrategy[str]:
    word = st.sampled_from(_WORDS)
    choice = st.lists(word, min_size=1, max_size=4).map(lambda words: f"({'|'.join(words)})")
    ending = st.one_of(
        word, choice, choice.map(lambda text: f"(?:{text[1:]}"), st.just(r"\w+_proj"), st.just("[qkvo]_proj")
    )
    head = st.sampled_from(
        ["", ".*", r".*\.", r"(?:.*\.)?", r"(.*\.)?", r"^model\.", r"model\.layers\.", r"(?!.*visual).*"]
    )
    layers = st.sampled_from(["layers", "h", "blocks", "layers|h", "model.layers"]).map(
        lambda text: f"(?:{text})" if "|" in text else text
    )
    between = st.sampled_from(_BETWEEN)
    numbered = st.tuples(layers, st.sampled_from([r"\.", "."]), st.sampled_from(_NUMBERS), between).map("".join)
    tail = st.sampled_from(["", "$", ".*", r"\b"])
    return st.tuples(head, st.one_of(st.just(""), numbered, between), ending, tail).map("".join)


@functools.cache
def _modules() -> tuple[str, ...]:
    names = [*NAMES]
    for model_type in ("llama", "gpt2", "mixtral", "qwen3_5_text", "falcon_h1"):
        config = next(iter(FAMILY_CASES[model_type].cases.values()))
        names += sites_of(config_from_hf(config)).by_module()
    return tuple(dict.fromkeys(names))


def _peft_targets(config: dict[str, Any], module: str) -> bool:
    """PEFT's `check_target_module_exists`."""
    excluded, targets = config.get("exclude_modules"), config["target_modules"]
    if excluded and re.fullmatch(excluded, module):
        return False
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    if module in targets:
        return True
    if not any(module.endswith(f".{target}") for target in targets):
        return False
    starts = config.get("layers_pattern") or []
    patterns = [rf"(?:^|.*?\.){start}\.(\d+)\." for start in starts] or [r".*?\.[^.]*\.(\d+)\."]
    match = next((match for match in (re.match(pattern, module) for pattern in patterns) if match), None)
    return match is not None and int(match[1]) in config["layers_to_transform"]


def _peft_value(patterns: dict[str, int], module: str, default: int) -> int:
    """PEFT's `get_pattern_key`, and the value of that key."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(_written(), st.lists(st.sampled_from(WORDS), min_size=1, max_size=4)),
    st.one_of(st.none(), _written()),
    st.dictionaries(_written(), st.integers(1, 64), max_size=4),
    st.dictionaries(_written(), st.integers(1, 64), max_size=4),
    st.lists(st.sampled_from(["layers", "h", "model.layers", "blocks"]), max_size=2),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
def test_a_config_means_what_peft_makes_of_it(
    targets: str | list[str],
    excluded: str | None,
    ranks: dict[str, int],
    alphas: dict[str, int],
    starts: list[str],
    layers: list[int],
) -> None:
    config: dict[str, Any] = {
        "r": 8, "lora_alpha": 16, "target_modules": targets, "exclude_modules": excluded, "rank_pattern": ranks,
        "alpha_pattern": alphas, "layers_pattern": starts, "layers_to_transform": layers,
    }  # fmt: skip
    mine = Targets(config, "x", Budget())
    for module in _modules():
        assert mine.has(module) == _peft_targets(config, module), module
        rank = _peft_value(ranks, module, 8)
        assert (mine.rank(module), mine.scale(module)) == (rank, _peft_value(alphas, module, 16) / rank), module
