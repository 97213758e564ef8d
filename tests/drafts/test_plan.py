"""The drafters of a session: which options choose which, and that nothing else asks which of them there are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from helpers.draft_heads import with_head
from rekindle._src import drafts
from rekindle._src.core.config import DraftSource, EngineConfig
from rekindle._src.drafts.checkpoint import Target
from rekindle._src.drafts.kind import DraftKind
from rekindle._src.drafts.plan import OF_CHECKPOINTS, draft_plan, of_texts
from rekindle._src.models import drafters
from rekindle._src.models.base import ALONE, graph_of, kinds_in
from rekindle._src.models.drafters.own import PREFIX, head_of, leaves_of_head, leaves_of_trunk, trunk_of
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs.drafting import NO_DRAFTS
from rekindle._src.scheduling.sequence import Limits
from rekindle.errors import ConfigError

SOURCE = Path(drafts.__file__).parents[1]
ROOT = Path(__file__).parents[2]
LIMITS = Limits(4, 64, 128, 8)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["forced"]),
        ({"drafts": "none"}, []),
        ({"prompt_lookup": 3}, ["forced", "lookup"]),
        ({"drafts": "suffix"}, ["forced", "suffix"]),
        ({"drafts": "suffix", "prompt_lookup": 3}, ["forced", "suffix"]),
    ],
)
def test_options_choose_drafters_of_texts(options: dict[str, Any], names: list[str]) -> None:
    def target() -> Target:
        raise AssertionError("they need no model")

    plan = draft_plan(EngineConfig(**options), target, str)
    found = plan.drafters(LIMITS)
    assert [one.name for one in found] == names
    assert max([one.most for one in found], default=0) == options.get("prompt_lookup", 0)
    assert (plan.programs, plan.pages, plan.device_bytes, plan.mark) == (NO_DRAFTS, (), 0, "")


def test_each_word_is_explained_and_compared_with_no_drafts() -> None:
    """A new word is in the option's own text, in the table of limits, and among the drafters that get equal tokens."""
    words = {*get_args(DraftSource)} - {"auto", "none"}
    explained, table = EngineConfig.__doc__ or "", (ROOT / "tutorials" / "guide" / "limits.md").read_text()
    assert {word for word in words if f'"{word}"' not in explained or f'`"{word}"`' not in table} == set()
    tree = ast.parse((ROOT / "tests" / "session" / "test_every_drafter.py").read_text())
    (drafters,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "DRAFTERS"
    )
    assert words <= ast.literal_eval(drafters).keys()


def test_none_and_some_are_a_contradiction() -> None:
    with pytest.raises(ConfigError, match='drafts="none" for none') as caught:
        of_texts("none", 2)
    assert caught.value.field == "prompt_lookup"


def test_an_own_head_keeps_pages_and_reads_what_it_says() -> None:
    """It takes what an option of lookups says, too, as far as a step keeps states of its rows."""
    config = config_from_hf(with_head("glm4-moe-lite"))
    graph, shapes = graph_of(config, Precision())
    plan = draft_plan(
        EngineConfig(drafts="mtp", prompt_lookup=3),
        lambda: Target(graph, shapes, ALONE, EngineConfig(drafts="mtp")),
        str,
    )
    assert config.draft_head is not None
    assert plan.pages == (config.draft_head.pages_of(0),)
    assert plan.programs.reads == () and plan.mark == ""
    assert [one.name for one in plan.drafters(LIMITS)] == ["forced", "lookup", "mtp"]
    (feature,) = plan.programs.features()
    assert feature.part.operand_shapes == leaves_of_head(graph, shapes)


def test_every_checkpoint_that_drafts_has_a_drafter() -> None:
    """Heads that are part of their model's checkpoint are the rest."""
    assert {kind for kind, module in drafters.MODULES.items() if module != "mtp"} == {*OF_CHECKPOINTS}
    for module in {*OF_CHECKPOINTS.values(), "model"}:
        assert callable(import_module(f"{drafts.__name__}.{module}").kind_of)


def test_nothing_else_reads_the_option() -> None:
    readers = [path for path in SOURCE.rglob("*.py") if re.search(r"config\.drafts\b", path.read_text())]
    assert [str(path.relative_to(SOURCE)) for path in readers] == ["drafts/plan.py"]


def test_choosing_needs_no_jax() -> None:
    """A head start asks while JAX is being imported."""
    code = "import sys; import rekindle._src.drafts.plan; assert not {'jax', 'flax'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe-lite"])
def test_a_model_and_its_head_are_the_whole(name: str, quantize: str | None) -> None:
    """Each has its own leaves in the order of its graph, in the kinds that they have in the whole."""
    whole, shapes = graph_of(config_from_hf(with_head(name)), Precision(quantize=quantize))
    trunk, head = trunk_of(whole), head_of(whole)
    kinds = {} if quantize is None else dict(kinds_in(whole))
    for graph, leaves, prefix in (
        (trunk, leaves_of_trunk(whole, shapes), ""),
        (head, leaves_of_head(whole, shapes), PREFIX),
    ):
        own, expected = graph_of(graph.config, graph.precision)
        assert own.paths == graph.paths and expected == leaves
        assert quantize is None or all(kinds[prefix + path] == kind for path, kind in kinds_in(graph))
    assert {*trunk.paths, *(PREFIX + path for path in head.paths)} == {*whole.paths}
    plain = config_from_hf({key: value for key, value in with_head(name).items() if key != "draft_head"})
    assert trunk.config == plain and trunk_of(graph_of(plain, Precision())[0]).config == plain


def test_a_kind_has_nothing_by_default() -> None:
    class Quiet(DraftKind):
        def drafter(self, limits: Limits) -> Any:
            return None

    kind = Quiet()
    assert kind.open(None) is None  # type: ignore[arg-type]
    assert (kind.page_bytes(EngineConfig()), kind.device_bytes, kind.mark, kind.fingerprint) == (0, 0, "", None)
