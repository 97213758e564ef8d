"""Expressions over names: they match what `re` matches, in time that grows with their length times that of the name."""

from __future__ import annotations

import re
import statistics
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle._src.models.adapters.expressions import MAX_STEPS, Budget, Expression, UnsupportedExpression

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
    mine = Expression(expression, Budget())
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
        Expression(expression, Budget())


HOSTILE = (
    "(?:[a-z_.0-9]|[a-z_.0-9])*!?", ".*" * 500 + "b", "(a?){255}(a?){255}b?", "(?:a*){200}c?", "(?:.*a){255}",
    "(?:a|a|a|aa)*c?", "(?=.*a.*b.*c)(?!.*a.*a.*a.*!).*", "(?:.*?a){30}.*?",
)  # fmt: skip


@pytest.mark.parametrize("expression", HOSTILE)
def test_no_expression_costs_more_than_its_length_times_the_names(expression: str) -> None:
    def cost(length: int) -> int:
        budget = Budget()
        Expression(expression, budget).matches("a" * length)
        return MAX_STEPS - budget.left

    assert cost(1024) <= 2.1 * cost(512) <= 5 * 512 * len(expression)


@pytest.mark.clock
def test_time_grows_no_faster_than_the_steps() -> None:
    def seconds(length: int) -> float:
        expression, times = Expression("(?:a|a|a|aa)*c?", Budget()), []
        for _ in range(5):
            start = time.process_time()
            for _ in range(4):
                expression.matches("a" * length)
            times.append(time.process_time() - start)
        return statistics.median(times)

    seconds(64)
    assert seconds(1024) < 4 * seconds(512) + 0.05


def test_all_expressions_of_an_adapter_share_their_steps() -> None:
    budget = Budget(1000)
    many = [Expression(f"(?:.|{number})*!?", budget) for number in range(20)]
    with pytest.raises(UnsupportedExpression, match="too many steps"):
        sum(expression.matches("a" * 500) for expression in many)
