"""Users' questions are answered within two clicks of README, which is the site's first page, and of *Start here*."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from project.test_links import ROOT, links

GUIDE, COURSE = "tutorials/guide", "tutorials/course"
STARTS = ("README.md", f"{GUIDE}/start.md")


class Question(NamedTuple):
    """A user's question, the page that answers it, and words of the answer."""

    asked: str
    page: str
    words: str


QUESTIONS = (
    Question("How do I install it?", f"{GUIDE}/install.md", "pip install ."),
    Question("How do I use my GPU?", f"{GUIDE}/troubleshooting.md#one-gpu", 'pip install "rekindle[cuda]"'),
    Question("How do I open my GGUF file?", f"{GUIDE}/checkpoints.md", ".gguf"),
    Question("It is out of memory: what now?", f"{GUIDE}/troubleshooting.md#out-of-memory", "quantize="),
    Question("The model is gated", f"{GUIDE}/troubleshooting.md#gated-models-tokens-and-proxies", "HF_TOKEN"),
    Question("How do I stream in FastAPI?", f"{GUIDE}/server.md#into-a-web-application", "StreamingResponse"),
    Question("How does the model call my functions?", f"{GUIDE}/features.md", "tools="),
    Question("How do I get JSON?", f"{GUIDE}/features.md", "schema="),
    Question("How do I train or load a LoRA?", f"{GUIDE}/adapters.md", "session.tune("),
    Question("How do I run many prompts at once?", f"{GUIDE}/api.md", "session.map("),
    Question("How do I serve it over HTTP?", f"{GUIDE}/server.md", "rekindle serve"),
    Question("How do I get back what a restarted kernel had?", f"{COURSE}/07_warm_restarts.ipynb", "restore="),
    Question("Why is the first answer slow?", f"{GUIDE}/troubleshooting.md#the-first-second-is-slow", "rekindle warm"),
    Question("Which sampling options are there?", f"{GUIDE}/sampling.md", "`top_p`"),
    Question("I come from vLLM, Ollama or transformers", f"{GUIDE}/coming-from.md", "gpu_memory_utilization"),
)


def targets(page: Path) -> Iterator[str]:
    """The files of the repository that a page links, each with its heading and without."""
    for link in links(page):
        path, _, heading = link.target.partition("#")
        if path and ":" not in path:
            target = (page.parent / path).resolve()
            if target.is_relative_to(ROOT):
                yield str(target.relative_to(ROOT))
                yield f"{target.relative_to(ROOT)}#{heading}"


def near(start: str) -> set[str]:
    """The pages within two clicks of a page."""
    first = set(targets(ROOT / start))
    pages = {one for one in first if one.endswith(".md")}
    return first.union(*(targets(ROOT / page) for page in pages))


@pytest.mark.parametrize("start", STARTS)
def test_two_clicks_lead_to_the_answer_of_each_question(start: str) -> None:
    reached = near(start)
    assert not [one.asked for one in QUESTIONS if one.page not in reached]


def test_the_pages_have_the_answers() -> None:
    texts = {one: (ROOT / one.page.partition("#")[0]).read_text() for one in QUESTIONS}
    assert not [one.asked for one, text in texts.items() if one.words not in text]


def test_a_page_that_nothing_links_is_far() -> None:
    assert f"{COURSE}/00_the_map.ipynb" not in near(f"{GUIDE}/sampling.md")
