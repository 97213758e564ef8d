"""The course's words agree with its outputs, and one extra brings all that its pages import."""

from __future__ import annotations

import ast
import html
import importlib.metadata
import json
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rekindle._src.cli.commands import learn
from rekindle._src.views import style

ROOT = Path(__file__).parents[2]
PAGES = {path.name[:2]: path for path in sorted((ROOT / "tutorials/course").glob("[0-9]*.ipynb"))}
Numbers = list[tuple[str, ...]]


class Claim(NamedTuple):
    """Words of a page, and what they say of the numbers that its outputs have."""

    page: str
    words: str  # that stand in its prose
    output: str  # a pattern whose groups are the numbers
    holds: Callable[[Numbers], bool]


def numbers(found: Numbers) -> list[float]:
    return [float(one.replace(",", "")) for match in found for one in match]


CLAIMS = [
    Claim(
        "05", "nowhere to put what leaves", r"(\d+) tokens on (?:disk|the host)", lambda found: not any(numbers(found))
    ),
    Claim(
        "10", "have fewer bytes still", r"(\d+) MB, speed", lambda found: numbers(found) == sorted(numbers(found))[::-1]
    ),
    Claim("15", "only its last layers say so", r"leads from layer (\d+) of (\d+)", lambda found: _last(found) <= 2),
    Claim("15", "Up to layer 14 the vector changes little", r"[{ ](\d+): (-?[\d.]+)", lambda found: _steered(found)),
    Claim("18", "often end in loops", r"temperature 0: (\d) of (\d)", lambda found: _last(found) <= 2),
    Claim(
        "22", "the drawn one included", r"(?:of )?(\d+) draft(?:s,| tokens were)", lambda found: _drafts(numbers(found))
    ),
    Claim("25", "still gets more than that", r"affinity.*busiest ([\d.]+) of", lambda found: numbers(found)[0] > 1.25),
    Claim("25", "slowest hundredth waits longest", r"slowest hundredth +(\d+)", lambda found: _largest_last(found)),
    Claim("28", "left to kernels and formats", r"(?:this page|the file) +(\d+)", lambda found: _largest_last(found)),
    Claim(
        "30", "Above the capacity no scheduler helps", r"tenth waited ([\d.]+) times", lambda found: _last_of(found) > 1
    ),
]


def _last_of(found: Numbers) -> float:
    return numbers(found)[-1]


def _last(found: Numbers) -> float:
    (at, of) = numbers(found)
    return of - at


def _steered(found: Numbers) -> bool:
    moved = {int(layer): float(by) for layer, by in found}
    low, high = [by for layer, by in moved.items() if layer <= 14], [by for layer, by in moved.items() if layer > 14]
    return max(map(abs, low)) * 5 < min(high)


def _drafts(found: list[float]) -> bool:
    """The page's last number of drafts is that of all texts, of which the first three say theirs."""
    return found[-1] >= sum(found[:2])


def _largest_last(found: Numbers) -> bool:
    return max(numbers(found)) == numbers(found)[-1]


@cache
def cells(page: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(PAGES[page].read_text())["cells"]
    return loaded


def words(page: str) -> str:
    """The page's prose and the messages of its assertions."""
    texts = ("".join(cell["source"]) for cell in cells(page))
    return " ".join(" ".join(texts).split())


def printed(page: str) -> str:
    """What its cells show, as text."""
    outputs = [output for cell in cells(page) for output in cell.get("outputs", ())]
    return "\n".join(map(shown, outputs))


def shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    tags = re.sub(r"<style.*?</style>|<[^>]+>", " ", "".join(data.get("text/html", "")), flags=re.DOTALL)
    text = "".join(output.get("text", "")) + "".join(data.get("text/plain", ""))
    return f"{text}\n{' '.join(html.unescape(tags).split())}"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}: {claim.words[:30]}")
def test_words_agree_with_the_outputs_of_their_page(claim: Claim) -> None:
    assert claim.words in words(claim.page), "the claim is gone: take it off the list"
    found = [match if isinstance(match, tuple) else (match,) for match in re.findall(claim.output, printed(claim.page))]
    assert found or claim.page == "05", "its output is gone"
    assert claim.holds(found), f"{claim.words!r} contradicts {found}"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("nowhere to put", [("240",)]),
        ("have fewer bytes", [("269",), ("97",), ("135",)]),
        ("only its last layers", [("16", "30")]),
        ("Up to layer 14", [("2", "-0.5"), ("14", "4.3"), ("17", "8.5")]),
        ("the drawn one", [("59",), ("14",), ("60",)]),
        ("still gets more", [("1.12",)]),
        ("slowest hundredth", [("80",), ("91",), ("85",)]),
    ],
)
def test_a_contradiction_is_found(words: str, found: Numbers) -> None:
    (claim,) = [one for one in CLAIMS if one.words.startswith(words)]
    assert not claim.holds(found)


def test_the_shade_that_a_page_names_is_the_one_it_shows() -> None:
    at = next(index for index, cell in enumerate(cells("01")) if "logprobs=4" in "".join(cell["source"]))
    named = set(re.findall(r"\b(?:orange|green|red|blue)\b", "".join(cells("01")[at - 1]["source"])))
    red, green, blue = (int(style.ORANGE[start : start + 2], 16) for start in (1, 3, 5))
    shades = re.findall(r"background:rgba\((\d+),(\d+),(\d+)", str(cells("01")[at]["outputs"]))
    assert set(shades) == {(str(red), str(green), str(blue))} and named == {"orange"}


def test_the_index_says_how_long_pages_take() -> None:
    index = (ROOT / "tutorials/README.md").read_text()
    seconds = {page: json.loads(path.read_text())["metadata"]["seconds"] for page, path in PAGES.items()}
    longest = [page for page, taken in seconds.items() if taken >= 120]
    assert not longest, "a page of the course is built in two minutes"
    assert f"{len(PAGES)} of {len(PAGES)} pages ran in less than two minutes" in index


def test_speeds_of_the_real_model_are_those_of_readme_within_a_factor_of_two() -> None:
    """A page that was built on a busy machine tells its readers nothing about their own."""
    (stated,) = re.findall(r"\[(\d+) tokens/s\]", readme_table())
    (measured,) = re.findall(r"^(\d+) tokens/s;", printed("18"), re.MULTILINE)
    assert 0.5 <= int(measured) / int(stated) <= 2


def readme_table() -> str:
    return (ROOT / "README.md").read_text().partition("<!-- figures: real files -->")[2]


def test_one_page_does_not_show_a_fraction_of_the_speed_that_another_one_measures() -> None:
    speeds = {page: max(map(float, re.findall(r"([\d.]+) tokens/s", printed(page)))) for page in ("01", "03")}
    assert 0.5 <= speeds["01"] / speeds["03"] <= 2, speeds


def test_the_real_model_is_as_fast_on_one_page_as_on_the_other() -> None:
    """Page 28 times twelve tokens with their prompt, page 18 a longer text: the speeds are alike."""
    (measured,) = re.findall(r"^(\d+) tokens/s;", printed("18"), re.MULTILINE)
    (other,) = re.findall(r"^rekindle, the file +(\d+)", printed("28"), re.MULTILINE)
    assert 0.5 <= int(other) / int(measured) <= 2


def closure(extra: str) -> set[str]:
    """The distributions that `rekindle[extra]` brings, as far as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left = [*project["dependencies"], f"rekindle[{extra}]"]
    seen: set[tuple[str, str]] = set()
    while left:
        requirement = Requirement(left.pop())
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            seen.add((name, wanted))
            if name == "rekindle":
                left += project["optional-dependencies"][wanted] if wanted else []
                continue
            for line in _requirements(name):
                inner = Requirement(line)
                if inner.marker is None or inner.marker.evaluate({"extra": wanted}):
                    left.append(str(inner).partition(";")[0])
    return {name for name, _ in seen}


def _requirements(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # the tests need no JupyterLab; it brings the kernel
        return ["ipykernel"] if name == "jupyterlab" else []


def test_one_extra_brings_what_all_pages_need() -> None:
    """A page leaves out its part with Ray or transformers where they are missing; all run to their end."""
    brought = closure("notebook")
    packages = importlib.metadata.packages_distributions()
    missing: dict[str, set[str]] = {}
    for page in PAGES:
        code = "\n".join("".join(cell["source"]) for cell in cells(page) if cell["cell_type"] == "code")
        tree = compile(code, page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        tops = {name.partition(".")[0] for name in names} - learn.OPTIONAL
        needed = {canonicalize_name(packages[top][0]) for top in tops if top in packages and top != "rekindle"}
        modules = {module for module, calls in learn.FEATURES.items() if any(call in code for call in calls)}
        needed |= {canonicalize_name(packages[module][0]) for module in modules}
        if needed - brought:
            missing[page] = needed - brought
    assert not missing
    assert 'pip install ".[notebook]"' in (ROOT / "tutorials/README.md").read_text()
