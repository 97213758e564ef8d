"""Interactive figures: what they record, and that their saved form needs nothing but a page that runs scripts."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, cast

import numpy as np
import pytest

from helpers import fakes
from helpers.sessions import CONFIG, opened
from rekindle._src.notebook import figures
from rekindle._src.notebook.dashboard import StepRecord
from rekindle._src.session.stats import RowReport, StepReport
from rekindle.errors import InvalidRequest


def report(name: str, kind: str, start: int, stop: int, text: str) -> StepReport:
    row = RowReport(name, kind, start, stop, (1,), 7, text, None)
    return StepReport(0, "r1t0", (row,), (), (), 0.0, 0.0)


def record(at: float, *names: str) -> StepRecord:
    rows = tuple((slot, name, "decode") for slot, name in enumerate(names))
    return StepRecord(at, 0, rows, sampled=len(names), computed=len(names), moved=0, seconds=0.01, busy=0.01)


def recorded(figure: figures.Figure) -> Any:
    """The data in the figure's saved form, as a page reads it."""
    match = re.search(r'mount\(document\.getElementById\("[^"]+"\), "\w+", (.*)\);\n\}\)', figure.saved())
    assert match is not None
    return json.loads(match[1])


def test_the_script_needs_a_dom_alone() -> None:
    code = re.sub(r"^\s*//.*$|\s// .*$", "", figures.SCRIPT, flags=re.MULTILINE)
    for foreign in (
        "import ",
        "import(",
        "require",
        "fetch",
        "window",
        "Jupyter",
        "localStorage",
        "innerHTML",
        "eval(",
    ):
        assert foreign not in code, foreign
    assert set(re.findall(r"https?://[^\"]+", code)) == {"http://www.w3.org/2000/svg"}
    assert "export" not in figures.PLAIN
    assert set(re.findall(r"\bmodel\.(\w+)", code)) == {"get"}  # nothing is asked of a kernel


@pytest.mark.anyio
async def test_a_batch_is_recorded_step_by_step() -> None:
    with opened(dataclasses.replace(CONFIG, max_requests=2)) as session:
        async with session.paused():
            handles = [session.submit("Once upon a time", max_tokens=count, ignore_eos=True) for count in (2, 4, 2)]
            reports = []
            while not all(handle.done for handle in handles):
                reports.append(await session.step())
        figure = session.view.steps(reports)
    steps = recorded(figure)["steps"]
    assert [step["tokens"] for step in steps] == [report.tokens for report in reports]
    assert max(row["slot"] for step in steps for row in step["rows"]) == 1  # the third has a place that became free
    first = [row["text"] for step in steps for row in step["rows"] if row["id"] == handles[1].id]
    assert "".join(first) == (await handles[1]).text
    assert repr(figure) == f"<Figure: {len(reports)} steps of a batch>"


@pytest.mark.anyio
async def test_a_run_is_recorded_in_time() -> None:
    with opened(dataclasses.replace(CONFIG, max_requests=2)) as session:
        dashboard = session.watch()
        assert recorded(dashboard.recorded()) == {"names": [], "steps": []}
        done = await session.generate(["Once upon a time", "Tom", "Anna"], max_tokens=4, ignore_eos=True)
        figure = dashboard.recorded()
        dashboard.stop()
    data = recorded(figure)
    assert len(data["names"]) == len(done)
    assert sum(sampled for _, _, sampled, *_ in data["steps"]) == 12
    ends = [end for end, *_ in data["steps"]]
    assert ends == sorted(ends)
    assert data["steps"][0][0] == data["steps"][0][1]  # time begins with the first step
    assert repr(figure) == f"<Figure: 3 requests in {len(ends)} steps, as they ran>"


@pytest.mark.anyio
async def test_a_distribution_keeps_its_sum_at_any_number_of_bins() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 257)
    with opened() as session:
        data = recorded(session.view.distribution(logits))
        assert data["texts"][0] == session.tokenizer.decode([int(logits.argmax())])
    likely = np.exp(data["logits"])
    rest = sum(count * np.exp(logit) for logit, count in data["rest"])
    assert len(likely) + sum(count for _, count in data["rest"]) == 257
    assert likely.sum() + rest == pytest.approx(np.exp(logits).sum())
    assert data["logits"] == sorted(logits, reverse=True)[: len(likely)]


def test_a_distribution_without_scripts_ends_where_it_is_empty() -> None:
    logits = np.full(257, -30.0)
    logits[97:101] = 3.0, 2.0, 0.0, -5.0
    figure = figures.distribution(logits, fakes.ByteTokenizer())
    page = re.sub(r"<script>.*?</script>", "", figure.saved(), flags=re.DOTALL)
    assert re.findall(r"&quot;(\w)&quot;", page) == ["a", "b", "c"]
    assert "254 others" in page
    assert "70.5%" in page
    assert figures.distribution(np.arange(257.0), fakes.ByteTokenizer()).saved().count("<script") == 1


def test_bars_of_a_flat_distribution_are_seen() -> None:
    """The longest bar has the whole width, and its share is said: eleven bars of 9% would be stubs of 100%."""
    logits = np.full(257, -30.0)
    logits[97:108] = 1.0
    page = re.sub(r"<script>.*?</script>", "", figures.distribution(logits, fakes.ByteTokenizer()).saved(), flags=re.S)
    assert page.count("width:100.00%") == 11 and "The longest bar is 9.1%." in page
    logits[97] = 2.0
    page = re.sub(r"<script>.*?</script>", "", figures.distribution(logits, fakes.ByteTokenizer()).saved(), flags=re.S)
    assert page.count("width:100.00%") == 1 and page.count("width:36.79%") == 10, "lengths are shares of the longest"


def test_mistakes_are_told_by_name() -> None:
    tokenizer, objects = fakes.ByteTokenizer(), cast("Any", [object()])
    with pytest.raises(InvalidRequest, match=r"must be one row of 257 numbers. Pass captured ones"):
        figures.distribution([0.5, 0.1], tokenizer)
    with pytest.raises(InvalidRequest, match="must be one row"):
        figures.distribution(objects, tokenizer)
    with pytest.raises(InvalidRequest, match="must be a list of texts"):
        figures.prefixes("one text", 4)
    assert recorded(figures.steps([None, report("r0", "decode", 1, 2, "x"), None]))["steps"][0]["tokens"] == 1


def test_no_text_ends_the_script() -> None:
    evil = "</script><script>alert(1)</script>"
    figure = figures.prefixes([evil], page=1)
    assert figure.saved().count("</script>") == 1
    assert recorded(figure)["texts"] == [evil]


def test_a_saved_notebook_has_the_page_and_a_live_one_the_widget() -> None:
    bundle = figures.prefixes(["a b c d"], page=2)._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in data
    assert "<script>" in data["text/html"]
    assert "page that runs scripts" in data["text/html"]  # what a page that strips them still says


@pytest.mark.browser
def test_saved_figures_act_without_a_kernel() -> None:
    api = pytest.importorskip("playwright.sync_api")
    from helpers import browsing

    reports = [
        report("r0", "prefill", 0, 4, " there"),
        report("r0", "decode", 4, 5, " was"),
        report("r0", "decode", 5, 6, " a"),
    ]
    logits = np.full(257, -30.0)
    logits[:4] = 3.0, 2.0, 0.0, -5.0
    saved = [
        figures.steps(reports).saved(),
        figures.distribution(logits, fakes.ByteTokenizer()).saved(),
        figures.prefixes(["a b c d", "a b x y"], 2).saved(),
        figures.run([record(1.0, "r0"), record(1.01, "r0", "r1"), record(1.02, "r1")]).saved(),
    ]
    with api.sync_playwright() as playwright, browsing.blank_page(playwright, width=360, height=640) as page:
        page.set_content("<meta name='viewport' content='width=device-width'>" + "".join(saved))
        page.get_by_text("on", exact=True).click()
        assert page.get_by_text("step 2 of 3: 1 token in 1 row").is_visible()
        assert page.get_by_text("… there was").is_visible()
        page.get_by_label("top_p").fill("0.5")
        assert page.get_by_text("1 token can be drawn").is_visible()
        page.get_by_label("top_p").fill("1")
        assert page.get_by_text('"\\u0003"').count() == 0, "a bar that can't be seen is not drawn"
        assert page.get_by_text("254 others").is_visible()
        page.get_by_label("logarithmic").check()
        assert page.get_by_text("253 others").is_visible()
        prompt = page.get_by_label("a prompt")
        prompt.fill("a b x z")
        assert page.get_by_text("has 4 words, and 2 of them are cached").is_visible()
        prompt.press("Enter")
        assert page.get_by_text("3 prompts of 6 whole pages, 4 pages stored").is_visible()
        page.get_by_label("time in ms").fill("15")
        assert page.get_by_text("15 ms: 1 token so far").is_visible()
        assert page.get_by_text("Step 2 of 3 takes 10.0 ms: 2 positions of 2 requests. 0 of 2 requests").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360  # a phone
