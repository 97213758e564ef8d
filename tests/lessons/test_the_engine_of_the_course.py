"""The engine that readers of the course build says what rekindle says, token for token, at each of its seven steps."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rekindle
from helpers import small
from helpers.thorough import by_default
from rekindle import tiny
from rekindle.models import LoadedModel, load

FILE = Path(__file__).parents[2] / "tutorials" / "course" / "engine.py"
COUNT = 20
PROMPTS = [[521, 576, 260], [260, 521], [300, 301, 302, 300, 301, 302, 300, 301], [521, 576, 260, 300, 310]]
START = [*range(300, 340)]  # two whole pages and a half

Says = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def engine() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("engine_of_the_course", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny.folder(), dtype="float32")


@pytest.fixture(scope="module")
def says() -> Iterator[Says]:
    with rekindle.open_sync("tiny", **{**small.TINY, "dtype": "float32"}) as session:

        def tokens(prompts: list[list[int]], **options: Any) -> list[list[int]]:
            done = session.generate_sync(prompts, max_tokens=COUNT, ignore_eos=True, **options)
            return [list(one.token_ids) for one in done]

        yield tokens


@pytest.mark.parametrize("step", ["plain_loop", "cached_loop"])
def test_loops(engine: ModuleType, model: LoadedModel, says: Says, step: str) -> None:
    assert getattr(engine, step)(model, PROMPTS[0], COUNT) == says(PROMPTS[:1])[0]


@pytest.mark.parametrize("step", by_default(["Engine", "Shared", "Batch", "Paged", "Sampled"], 2))
def test_classes(engine: ModuleType, model: LoadedModel, says: Says, step: str) -> None:
    """With fewer rows than texts, and prompts of several chunks."""
    prompts = [*PROMPTS, START]
    one = getattr(engine, step)(model, rows=2, context=64)
    assert one.generate(prompts, COUNT) == says(prompts)
    assert one.rows == [None, None] and not one.waiting
    if step == "Engine":
        assert one.steps < -(-len(prompts) // 2) * COUNT, "no guess was right"


def test_pages_are_found_given_up_and_never_lost(engine: ModuleType, model: LoadedModel, says: Says) -> None:
    prompts = [START + prompt for prompt in PROMPTS]
    expected = says(prompts)
    for pages in (64, 6, 5):  # a text takes four or five
        one = engine.Shared(model, rows=2, context=80, pages=pages)
        assert one.generate(prompts, COUNT) == expected
        assert one.last[1].found == 32
        assert one.generate([START[:20]], COUNT) == says([START[:20]]) and one.last[0].found == 16
        assert sorted([*one.free, *one.tree.values()]) == list(range(1, pages + 1)), "a page is lost, or in two places"
        assert not any(one.users.values())


@pytest.mark.parametrize("step", by_default(["Engine", "Sampled"]))
@pytest.mark.parametrize("options", [{"temperature": 1.3}, {"temperature": 0.8, "top_p": 0.6}], ids=str)
def test_draws(engine: ModuleType, model: LoadedModel, says: Says, step: str, options: dict[str, float]) -> None:
    one = getattr(engine, step)(model, rows=4, context=64)
    assert one.generate(PROMPTS, COUNT, seed=5, **options) == says(PROMPTS, seed=5, **options)
    assert one.generate(PROMPTS, COUNT, seed=6, **options) != says(PROMPTS, seed=5, **options)


def test_the_file_has_300_lines_of_code() -> None:
    lines = [line.strip() for line in FILE.read_text().splitlines()]
    assert len([line for line in lines if line and not line.startswith(("#", '"""'))]) <= 310


def test_the_file_is_made_of_the_cells_of_its_page() -> None:
    sys.path.append(str(FILE.parents[1] / "source"))
    import course

    assert course.ENGINE == FILE and FILE.read_text() == course.engine(), "run python tutorials/source/course.py"
