"""What Tab and `?` offer in a real Jupyter kernel, for options, results and errors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from helpers.kernels_under_test import Kernel, kernel
from helpers.thorough import by_default


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as running:
        running.ok("import rekindle\nfrom helpers.sessions import fake_session\nsession = fake_session()")
        yield running
        running.ok("session.close()")


def tab(notebook: Kernel, code: str) -> set[str]:
    """What Tab at the end of `code` offers."""
    content = notebook.client.complete(code, len(code), reply=True, timeout=60)["content"]
    return {match.removesuffix("=").rpartition(".")[2] for match in content["matches"]}


@pytest.mark.parametrize(
    ("code", "name"),
    by_default(
        [
            ('session.generate("x", tem', "temperature"),
            ('await session.generate("x", max_to', "max_tokens"),
            ('session.stream("x", see', "seed"),
            ('session.submit("x", logp', "logprobs"),
            ("session.chat([], temp", "template"),
            ("session.chat([], temp", "temperature"),
            ("rekindle.open(max_req", "max_requests"),
            ('rekindle.open_sync("tiny", quan', "quantize"),
            ("rekindle.Sampling(top", "top_p"),
            ("rekindle.Promp", "PromptTooLong"),
            ("session.stats().runn", "running"),
            ("session.generate('x').result_s", "result_sync"),
        ],
    ),
)
def test_tab_offers(notebook: Kernel, code: str, name: str) -> None:
    assert name in tab(notebook, code)


PARSED = """
from jedi.inference import InferenceState
whole, parsed = InferenceState.parse_and_get_code, set()
def noted(self, *args, **options):
    found = whole(self, *args, **options)
    file = options.get("file_io")
    parsed.add(str(options.get("path") or file and file.path))
    return found
InferenceState.parse_and_get_code = noted
"""


def test_the_first_tab_reads_few_files(notebook: Kernel) -> None:
    """A file costs a tenth of a second of a core when it is parsed for the first time, and others want the cores.

    All of the standard library's collections were among them, and `types`, for the type of a decorator.
    """
    notebook.ok(PARSED)
    assert "temperature" in tab(notebook, 'session.generate("x", tem')
    parsed = notebook.ok("InferenceState.parse_and_get_code = whole\nprint(*sorted(parsed), sep='\\n')").splitlines()
    assert not [path for path in parsed if "collections" in path or path.endswith(("/types.pyi", "/types.py"))]
    assert len([path for path in parsed if "rekindle" in path and not path.endswith("__init__.py")]) <= 12, parsed


def test_tab_offers_what_is_public_and_nothing_else(notebook: Kernel) -> None:
    offered = tab(notebook, "rekindle.")
    assert {"open", "Sampling", "QueueFull", "models"} <= offered
    assert not {"importlib", "annotations", "TYPE_CHECKING", "VERSION"} & offered
    notebook.ok("handle = session.stream('x')")
    assert not {"send", "throw", "close"} & tab(notebook, "handle.")


@pytest.mark.parametrize(
    ("asked", "names"),
    [("session.generate", ("temperature", "stop", "n")), ("rekindle.open", ("max_requests", "dtype", "processors"))],
)
def test_the_question_mark_names_every_option(notebook: Kernel, asked: str, names: tuple[str, ...]) -> None:
    content = notebook.client.inspect(asked, len(asked), reply=True, timeout=60)["content"]
    text = re.sub(r"\x1b\[[0-9;]*m", "", content["data"]["text/plain"])
    signature, table = text.split("Docstring:")
    for name in names:
        assert f"{name}:" in signature
        assert name in table
