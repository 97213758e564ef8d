"""All views in one Chromium without a notebook or a kernel: keys, a screen reader's tree, zoom, long work, and memory.

A view's widget has its own script and a model that this page stands in for, so what is tested is what a notebook runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers import browsing, shown
from helpers.chatting import saying
from helpers.front_ends import PAGES, dress, faint
from helpers.replies import tool
from helpers.sessions import CONFIG, byte_tokenizer, parts
from rekindle import Session, tiny
from rekindle._src.notebook import bubbles, figures, live
from rekindle._src.session.cache_view import NodeView
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.views.icicle import icicle

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
sync_api = pytest.importorskip("playwright.sync_api")

STALL = 50  # milliseconds; a longer task is what a browser itself calls long
HOUR = 36_000  # pictures, ten a second
# A model as a notebook gives it to a widget: values, listeners, and the messages to the kernel.
MOUNT = """async ({script, css, state}) => {
  document.body.replaceChildren();
  document.head.append(Object.assign(document.createElement("style"), { textContent: css }));
  const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  const { default: widget } = await import(url);
  const listeners = {};
  const model = window.model = {
    sent: [], get: (name) => state[name], set: (name, value) => ((state[name] = value), model.tell(name)),
    tell: (name) => (listeners[`change:${name}`] ?? []).forEach((react) => react()),
    on: (name, react) => (listeners[name] ??= []).push(react), off() {},
    send: (message) => (model.sent.push(message), model.set("heard", [message.page, message.number, {}])),
  };
  const el = document.createElement("div");
  document.body.append(el);
  window.leave = widget.render({ model, el });
}"""


class Mounted(NamedTuple):
    """A view in the page: its widget's values, or a page of its own for a figure."""

    state: Mapping[str, Any] | None
    html: str


def state_of(view: Any) -> dict[str, Any]:
    names = ("html", "note", "controls", "values", "kept", "gone", "files", "heard")
    return {name: getattr(view.widget, name) for name in names}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    scheduler, runner = parts()
    made = Session(scheduler, runner, byte_tokenizer(), CONFIG, model="fake", chat=ChatTemplate.load(tiny.folder()))
    with made:
        for prompt in shown.PROMPTS:
            made.generate_sync(prompt, max_tokens=4)
        yield made


@pytest.fixture(scope="module")
def views(session: Session) -> Iterator[dict[str, Mounted]]:
    chat, tree, dashboard = session.view.chat(max_tokens=24), session.view.tree(), session.watch()
    for text in ("hello", "and then"):
        chat.send(text)
        chat.handle.result_sync()
    chat.press("settings")
    chat.token(3)
    tree.token(0)
    chat.refresh()
    dashboard.refresh()
    done = session.generate_sync("hello", max_tokens=12, logprobs=2)
    with session.paused():
        stream = session.view.stream("hello", max_tokens=24)
        for _ in range(4):
            session.step_sync()
        stream.refresh()
        made = {"stream": Mounted(state_of(stream), stream.picture)}
        stream.stop()
    made["reply"] = replied()
    panels = {"chat": chat, "tree": tree, "dashboard": dashboard}
    pages = shown.saved(session, dashboard, done)
    made |= {name: Mounted(state_of(view), view.picture) for name, view in panels.items()}
    made |= {name: Mounted(None, page) for name, page in pages.items()}
    yield made
    for view in (chat, dashboard):
        view.stop()
        view.join(60)


def replied() -> Mounted:
    """A chat whose model reasons, calls a tool, and writes what begins as a call and is none."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}</tool_call>'
    with saying(f"<think>They ask about Paris.</think>I *look*.\n{call}\n<tool_call>no") as session:
        chat = session.view.chat(max_tokens=400, tools=[tool("weather", city="string")])
        chat.messages = [
            {"role": "user", "content": "The weather?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "function": {"name": "time", "arguments": {}}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "noon " * 120},
        ]
        chat.send("And in Paris?")
        chat.handle.result_sync()
        chat.refresh()
        made = Mounted(state_of(chat), chat.picture)
        chat.stop()
        chat.join(60)
        return made


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright, browsing.blank_page(playwright) as page:
        yield page


def show(page: Any, view: Mounted) -> None:
    page.set_content("<!doctype html><meta name=viewport content='width=device-width'><body style='margin:0'>")
    if view.state is None:
        page.set_content(f"<!doctype html><body style='margin:0;font-family:sans-serif'>{view.html}")
    else:
        page.evaluate(MOUNT, {"script": live.SCRIPT, "css": live.STYLE, "state": view.state})


NAMES = ("stream", "chat", "reply", "tree", "dashboard", *shown.CELLS)
ROLES = shown.ROLES | {
    "stream": ['log "Text of r', 'button "Stop"'],
    "chat": [
        'log "Conversation"',
        'article "You"',
        'article "Answer"',
        'textbox "Say something"',
        'slider "temperature"',
    ],
    "reply": ['article "Answer"', 'group "Call of weather"', 'group "Call of time"', 'note "not read as a call"'],
    "tree": ['group "the prefix cache', 'textbox "What would this prompt hit?"', 'button "Pin"'],
    "dashboard": ['img "the last', 'button "Close"'],
}
ACTIVE = "button|textbox|slider|checkbox|link|img|combobox"


@pytest.mark.parametrize("name", NAMES)
def test_a_screen_reader_is_told_what_everything_is(page: Any, views: dict[str, Mounted], name: str) -> None:
    show(page, views[name])
    tree = page.locator("body").aria_snapshot()
    lines = [line.strip().removeprefix("- ").removeprefix("'") for line in tree.splitlines()]
    for role in ROLES.get(name, []):
        assert any(line.startswith(role) for line in lines), tree
    nameless = [line for line in lines if re.fullmatch(rf"(?:{ACTIVE})(?: \[[^\]]*\])*:?", line)]
    assert not nameless, tree


REACHED = """() => {
  const seen = window.seen ??= new Set(), at = document.activeElement;
  if (at && at !== document.body) seen.add(at);
  return seen.size;
}"""
WANTED = """() => [...document.querySelectorAll(
  "button:enabled, input:enabled:not([hidden]), textarea:enabled, summary, [tabindex='0']"
)].filter((one) => one.checkVisibility() && !window.seen?.has(one)).map((one) => one.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("name", NAMES)
def test_keys_alone_reach_all_that_can_be_pressed(page: Any, views: dict[str, Mounted], name: str) -> None:
    show(page, views[name])
    page.evaluate("() => { window.seen = new Set(); document.body.tabIndex = -1; document.body.focus(); }")
    before = -1
    for _ in range(120):
        page.keyboard.press("Tab")
        now = page.evaluate(REACHED)
        if now == before and page.evaluate("() => document.activeElement === document.body"):
            break
        before = now
    assert page.evaluate(WANTED) == []


def test_keys_act(page: Any, views: dict[str, Mounted]) -> None:
    show(page, views["chat"])
    page.locator("[data-tokens]").last.focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.get_by_role("button", name="Again").last.press("Enter")
    page.get_by_role("textbox", name="Say something").press("Enter")
    sent = page.evaluate("() => model.sent.map(({ event, name, value }) => [event, name, value ?? null])")
    assert ["token", "", 2] in sent and ["press", "say:enter", None] in sent
    assert ["act", "again", 3] in sent
    show(page, views["tree"])
    page.locator("[data-token]").nth(1).press("Enter")
    assert page.evaluate("() => model.sent.at(-1).value") == 1
    show(page, views["stream"])
    page.get_by_role("button", name="Stop").press("Enter")
    sent = page.evaluate("() => model.sent.at(-1)")
    assert {name: sent[name] for name in ("event", "name", "value", "fields")} == {
        "event": "act", "name": "stop", "value": 0, "fields": {},
    }  # fmt: skip


RINGS = """(one) => {
  const rings = [];
  for (let at = one; at && !at.classList.contains("rekindle-panel"); at = at.parentElement) {
    const look = getComputedStyle(at), blue = "rgb(61, 139, 205)";
    if (look.outlineStyle === "solid" && look.outlineWidth !== "0px") rings.push("outline of " + at.className);
    if (look.borderTopColor === blue && look.borderTopStyle === "solid") rings.push("border of " + at.className);
    if (look.boxShadow !== "none") rings.push("shadow of " + at.className);
  }
  return rings;
}"""


@pytest.mark.parametrize("label", ["Say something", "System prompt", "What would this prompt hit?"])
def test_a_focused_field_has_one_ring(page: Any, views: dict[str, Mounted], label: str) -> None:
    show(page, views["tree" if label.endswith("?") else "chat"])
    field = page.get_by_role("textbox", name=label)
    field.focus()
    assert len(field.evaluate(RINGS)) == 1


def test_a_saved_picture_does_not_say_what_only_a_live_one_can_do(page: Any, views: dict[str, Mounted]) -> None:
    show(page, views["tree"])
    hint = page.get_by_text("press a bar for its text")
    assert hint.is_visible() and page.get_by_role("button", name="aaa").count() == 1
    page.set_content(views["tree"].html)
    assert hint.count() == 1 and not hint.is_visible()
    assert page.get_by_role("button").count() == 0 and page.locator("[tabindex]").count() == 0


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_focus_stays_in_the_cell_whose_view_ends(page: Any, views: dict[str, Mounted], elsewhere: bool) -> None:
    """The button that ended the view is gone; without another place the focus would jump to the top of the page."""
    show(page, views["stream"])
    page.evaluate("""() => {
      const cell = document.createElement("div"), other = document.createElement("button");
      cell.tabIndex = -1;
      cell.id = "cell";
      other.id = "other";
      document.body.append(cell, other);
      cell.append(document.querySelector(".rekindle-panel"));
    }""")
    page.get_by_role("button", name="Stop").focus()
    if elsewhere:
        page.locator("#other").focus()
        page.wait_for_timeout(50)
    page.evaluate("() => { document.querySelector('.rekindle-panel').remove(); leave(); }")
    assert page.evaluate("() => document.activeElement.id") == ("other" if elsewhere else "cell")


def test_stop_keeps_its_place_and_its_focus_while_a_long_text_comes(page: Any, views: dict[str, Mounted]) -> None:
    """The text scrolls in its own region, which follows its end; arrow keys scroll it and do not reach the notebook."""
    show(page, views["stream"])
    stop = page.get_by_role("button", name="Stop")
    stop.focus()
    before, log = stop.bounding_box(), page.get_by_role("log")
    picture = views["stream"].html
    for count in (40, 400):
        page.evaluate("(html) => model.set('html', html)", picture.replace("▌", "a line\n" * count + "▌"))
        assert stop.bounding_box() == before
        assert stop.evaluate("(one) => one === document.activeElement")
    assert log.evaluate("(one) => one.scrollHeight - one.scrollTop - one.clientHeight") < 40
    page.keyboard.press("Tab")
    assert log.evaluate("(one) => one === document.activeElement")
    page.keyboard.press("Home")
    page.wait_for_function("() => document.querySelector('[role=log]').scrollTop === 0")


@pytest.mark.parametrize("name", NAMES)
def test_all_texts_can_be_read_on_light_and_dark(page: Any, views: dict[str, Mounted], name: str) -> None:
    """Check the contrast of each text as it is painted, on shaded backgrounds too, for the colours of eight pages."""
    show(page, views[name])
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for host, colours in PAGES.items():
        dress(page, colours)
        assert faint(page) == [], host


@pytest.mark.parametrize("width", [620, 320])  # a narrow output, and a window of 1,280 pixels at 400 %
def test_nothing_is_cut_off_where_it_is_narrow(page: Any, views: dict[str, Mounted], width: int) -> None:
    """Wide content, such as a table or code, has a scroll bar of its own; the page does not scroll sideways."""
    before = page.viewport_size
    page.set_viewport_size({"width": width, "height": 900})
    try:
        for name, view in views.items():
            show(page, view)
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width, name
            cut = page.evaluate(
                """() => [...document.querySelectorAll("button, input, textarea, summary")]
                .filter((one) => one.checkVisibility() && one.getBoundingClientRect().right > innerWidth + 1)
                .map((one) => one.outerHTML.slice(0, 100))"""
            )
            assert cut == [], name
    finally:
        page.set_viewport_size(before)


def test_a_saved_picture_is_the_same_without_scripts(page: Any, views: dict[str, Mounted], tmp_path: Path) -> None:
    scripted = page.context.browser.new_page(viewport={"width": 800, "height": 900})
    bare = page.context.browser.new_context(java_script_enabled=False, viewport={"width": 800, "height": 900})
    plain = bare.new_page()
    try:
        for name, view in views.items():
            words, shots = [], []
            for one in (scripted, plain):
                one.set_content(f"<!doctype html><body style='margin:8px;font-family:sans-serif'>{view.html}")
                words.append(one.locator("body").aria_snapshot())
                shots.append(one.screenshot())
            if "<script" in view.html:  # a figure: its first state as a picture, with the same facts
                assert plain.locator("body").inner_text().strip(), name
                assert "needs a page that runs scripts" not in words[1] or name in ("prefixes", "run"), name
            else:
                assert words[0] == words[1] and shots[0] == shots[1], name
    finally:
        bare.close()
        scripted.close()


def growing(tokens: int) -> list[str]:
    """Pictures of a conversation while an answer grows to so many tokens."""
    pieces = [(" word" if at % 12 else "\nA **new** line", 1) for at in range(tokens)]
    before = bubbles.turn("user", "Tell me a *long* story")
    steps = range(1, tokens + 1, max(1, tokens // 100))
    turns = [bubbles.turn("assistant", bubbles.answer(pieces[:at], marked=None, complete=False), at=1) for at in steps]
    turns.append(bubbles.turn("assistant", bubbles.answer(pieces, marked=None, complete=True), at=1))
    return [f'<div role="log" aria-label="Conversation">{before}{turn}</div>' for turn in turns]


def empty() -> Mounted:
    state = {"html": "", "note": "", "values": {}, "kept": "", "gone": "", "files": -1, "heard": ["", 0, {}]}
    return Mounted({**state, "controls": [live.field("say", "Say something")]}, "")


DRAW = """async (at) => {
  model.set("html", window.pictures[at]);
  document.body.offsetHeight;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
}"""


def longest(page: Any, work: str, count: int) -> float:
    """The most milliseconds of processor time that one of several pictures takes, script, layout and paint.

    Chromium counts them in ticks of its thread, since a busy machine makes any task long. The first few are left out.
    """
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = devtools.send("Performance.getMetrics")["metrics"]
        return 1e3 * next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    times, before = [], spent()
    for at in range(count):
        page.evaluate(work, at)
        now = spent()
        times.append(now - before)
        before = now
    devtools.detach()
    return sorted(times[3:])[-2]  # the longest one may have had the collector of garbage in it


def test_two_thousand_tokens_are_drawn_without_a_stall(page: Any) -> None:
    show(page, empty())
    pictures = growing(2000)[::4]
    page.evaluate("(pictures) => { window.pictures = pictures; }", pictures)
    assert longest(page, DRAW, len(pictures)) < STALL
    assert page.locator("[data-token]").count() == 2000


def test_a_tree_of_ten_thousand_nodes_is_drawn_without_a_stall(page: Any) -> None:
    """Of ten thousand runs the two hundred with most pages after them have bars; the rest is counted."""
    nodes = [
        NodeView(at % 20, f"text {at}", (at % 20) * 16, 16, 1, "device", at % 3, 1.0, False, left_out=49)
        for at in range(200)
    ]
    pictures = [str(icicle(nodes, pressed=True, marked=at, hits={at: 16})) for at in range(20)]
    show(page, empty())
    page.evaluate("(pictures) => { window.pictures = pictures; }", pictures)
    assert longest(page, DRAW, len(pictures)) < STALL
    assert page.locator("[data-token]").count() == 200


STREAM = """(turns) => {
  for (let turn = 0; turn < turns; turn += 1) for (const picture of window.pictures) model.set("html", picture);
}"""


@pytest.mark.timeout(900)
def test_an_hour_of_streaming_leaves_the_memory_as_it_was(page: Any) -> None:
    """Answers of 120 tokens, redrawn as fast as the page can. Leaking one node or 30 bytes per redraw would fail."""
    show(page, empty())
    pictures = growing(120)
    page.evaluate("(pictures) => { window.pictures = pictures; }", pictures)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")

    def measured() -> dict[str, float]:
        devtools.send("HeapProfiler.collectGarbage")
        metrics = devtools.send("Performance.getMetrics")["metrics"]
        return {one["name"]: one["value"] for one in metrics}

    page.evaluate(STREAM, 5)
    before = measured()
    for _ in range(6):  # no call longer than what is waited for one
        page.evaluate(STREAM, HOUR // 6 // len(pictures))
    after = measured()
    assert after["Nodes"] <= before["Nodes"] + 10
    assert after["JSEventListeners"] <= before["JSEventListeners"] + 2
    assert after["JSHeapUsedSize"] - before["JSHeapUsedSize"] < 1e6, json.dumps([before, after])


def test_the_figure_of_a_long_run_is_scrubbed_without_a_stall(page: Any) -> None:
    rows = tuple((slot, f"r{slot}", "decode") for slot in range(16))
    records = [figures.StepRecord(0.03 * at, at, rows, 16, 16, 0, 0.02, 0.03) for at in range(1, 241)]
    show(page, Mounted(None, figures.run(records).saved()))
    work = """async (at) => {
      const input = document.querySelector("input[type=range]");
      input.value = at * 300;
      input.dispatchEvent(new Event("input"));
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    }"""
    assert longest(page, work, 20) < STALL
