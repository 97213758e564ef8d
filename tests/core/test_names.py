"""Names and paths: what somebody else passes is one, or is refused with the field, the value and a fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.core.names import (
    MAX_NAME,
    checked_name,
    checked_path,
    name_of_model,
    name_problem,
    nearest,
    path_problem,
)
from rekindle.errors import ConfigError


@pytest.mark.parametrize("name", ["legal", "org/legal-v2", "légal", "法律", "a.b_c@1", "x" * MAX_NAME, "q=1"])
def test_usual_names_are_names(name: str) -> None:
    assert checked_name("adapter", name) == name


@pytest.mark.parametrize(
    "name",
    ["", " ", "legal ", " legal", "le gal", "le\tgal", "legal\n", "legal\0", "\ud800", "x" * (MAX_NAME + 1),
     None, 7, b"legal", "\u202elagel", "le\u200bgal", "le\u00adgal", "\u2066legal", "le\u00a0gal", "le\u3000gal",
     "\ufefflegal", "\u2028", "\ue000"],
)  # fmt: skip
def test_what_looks_like_another_name_is_none(name: object) -> None:
    for colons in (False, True):
        with pytest.raises(ConfigError, match="adapter=") as caught:
            checked_name("adapter", name, colons=colons)
        assert len(str(caught.value)) < 400


def test_a_misspelled_name_is_near_to_a_known_one() -> None:
    known = ("temperature", "top_k", "top_p")
    assert nearest("temprature", known) == "temperature"
    assert nearest("banana", known) is None
    assert nearest("top", ["top_k"], 0.9) is None
    assert nearest("x" * MAX_NAME + "y" * 10**6, ["x" * MAX_NAME]) == "x" * MAX_NAME, "no more of it is compared"


def test_only_models_have_colons() -> None:
    assert checked_name("name", "qwen3:0.6b", colons=True) == "qwen3:0.6b"
    with pytest.raises(ConfigError, match="has a colon"):
        checked_name("adapter", "tiny:legal")


@given(st.text(max_size=400))
def test_a_model_has_a_name_whatever_its_folder_is_called(text: str) -> None:
    assert name_problem(name_of_model(text), colons=True) is None
    assert name_problem(text) is not None or name_of_model(text) == text


@pytest.mark.parametrize("path", ["/a/b", "a b/c", "Ünïcode/文件", "~", ".", "e\u0301/👩\u200d🚀"])
def test_usual_paths_are_paths(path: str) -> None:
    assert checked_path("source", path) == Path(path).expanduser()


@pytest.mark.parametrize(
    "path",
    [
        "~nosuchuser",
        "~nosuchuser/x",
        "x" * 256,
        "a/" * 3000,
        "x" * 10**6,
        "a\nb",
        "a\0b",
        "a\x7fb",
        "\u202etxt.a",
        "\ud800",
    ],
)
def test_what_no_path_can_be_is_named(path: str) -> None:
    assert path_problem(path) is not None
    with pytest.raises(ConfigError, match="source=") as caught:
        checked_path("source", path)
    assert len(str(caught.value)) < 400
