"""The views' widget, without a browser: what its script may use, and what it brings along for each kind of viewer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers.sessions import opened
from rekindle._src.notebook import live
from rekindle._src.notebook.live import Panel, button, field, file
from rekindle._src.views import style

SCRIPT = live.SCRIPT
CODE = re.sub(r"^\s*//.*$", "", SCRIPT, flags=re.MULTILINE)


def test_the_script_needs_nothing_but_the_model_and_a_dom() -> None:
    """VS Code, Colab, marimo and Notebook 7 give a widget these two things; anything else is one notebook's own."""
    assert set(re.findall(r"\bmodel\.(\w+)", CODE)) == {"get", "on", "off", "send"}
    for foreign in ("import ", "import(", "require", "fetch", "window", "Jupyter", "localStorage", "eval("):
        assert foreign not in CODE, foreign
    assert set(re.findall(r"https?://[^\"]+", CODE)) == {"http://www.w3.org/2000/svg"}
    assert re.search(r"export default \{ render \};\s*$", CODE)


def test_the_style_fits_every_theme_and_touches_nothing_else() -> None:
    bare = re.sub(r"@media \([^)]+\) ", "", live.STYLE)
    for rule in re.findall(r"^\{?\s*([^{}\n]+)\{", bare, flags=re.MULTILINE):
        assert all(selector.strip().startswith(".rekindle-") for selector in rule.split(",")), rule
    rules = live.STYLE.removeprefix(style.SHEET)
    assert rules != live.STYLE
    assert not re.search(r"#[0-9a-f]{3}|rgba?\(|hsla?\(", rules), "a colour is a token"
    used = set(re.findall(r"var\(--rk-([\w-]+)\)", live.STYLE + SCRIPT))
    assert used - {"series-"} <= set(style.VARIABLES)


def test_script_and_style_are_installed_with_the_package() -> None:
    static = Path(rekindle.__file__).parent / "_src" / "notebook" / "static"
    names = {path.name for path in static.iterdir()}
    assert names == {"pieces.js", "fields.js", "panel.js", "figures.js", "controls.css", "panel.css"}


def test_every_control_has_a_name_the_script_knows() -> None:
    used = set(re.findall(r"function \w+\(\{ ([^}]+) \}\)", CODE))
    known = {name.strip() for names in used for name in names.split(",")}
    for control in (button("a", "A", title="x"), field("b", "B"), file("c", "C", kinds="image/*")):
        assert set(control) - {"kind", "group", "spot"} <= known, "and these are where it stands"


def test_traits_are_what_the_script_reads() -> None:
    made = Panel([button("a", "A")], lambda *_: None)
    assert set(re.findall(r'model\.get\("(\w+)"\)', CODE)) <= set(made.keys)
    made.fill("b", "x")
    assert made.value("b") == "x"
    assert made.value("nothing") == ""


def test_viewers_find_what_they_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as session:
        view = session.watch()
        data, metadata = view._repr_mimebundle_()
        assert {"text/html", "text/plain", "application/vnd.jupyter.widget-view+json"} == set(data)
        assert metadata == {}
        colab: dict[str, Any] = {"application/vnd.jupyter.widget-view+json": {"colab": {"custom_widget_manager": {}}}}
        monkeypatch.setattr(Panel, "_repr_mimebundle_", lambda self, **_: ({}, colab))
        assert view._repr_mimebundle_()[1] == colab, "without it Colab does not find the widget"
        view.stop()
        view.join(60)


def test_views_do_not_pile_up_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A widget that is not closed is kept for as long as the kernel lives."""
    pytest.importorskip("IPython")

    class Output:
        def update(self, data: Any, *, raw: bool) -> None: ...

    monkeypatch.setattr("IPython.display.display", lambda *_, **__: Output())
    with opened() as session:
        for _ in range(3):
            view = session.view.stream("hello", max_tokens=4)
            view._ipython_display_()
            view.handle.result_sync()
            view.join(60)
            assert view.widget.comm is None
        late = session.view.stream("hello", max_tokens=1)
        late.handle.result_sync()
        late.join(60)
        late._ipython_display_()
        assert late.widget.comm is None
