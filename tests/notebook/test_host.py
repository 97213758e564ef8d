"""Views in a page that knows nothing of Jupyter: what any host of anywidgets does, VS Code and Colab among them.

The page imports the script as a module from a blob and gives it a model and an element, under a policy that forbids
everything else. What the model sends comes back to the real widget, and what the widget changes goes to the model.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browsing import blank_page
from helpers.sessions import opened
from rekindle._src.notebook.live import SCRIPT, STYLE, Live

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
sync_api = pytest.importorskip("playwright.sync_api")

SHOTS = Path(os.environ.get("REKINDLE_SCREENSHOTS", Path(__file__).parent.parent.parent / "build" / "screenshots"))
TRAITS = ("html", "note", "controls", "values", "kept", "heard")
PAGE = """<!doctype html>
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'">
<body style="font-family:sans-serif"><div id="first"></div><div id="second"></div>
<script>
class Model {
  constructor(state) { this.state = state; this.heard = {}; }
  get(name) { return this.state[name]; }
  send(content) { fromPage(content); }
  on(event, react) { (this.heard[event] ??= new Set()).add(react); }
  off(event, react) { this.heard[event]?.delete(react); }
  tell(name) { for (const react of this.heard[`change:${name}`] ?? []) react(); }
  receive(change) { for (const [name, value] of Object.entries(change)) { this.state[name] = value; this.tell(name); } }
}
async function show(script, style, state) {
  const view = (await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })))).default;
  window.model = new Model(state);
  window.ends = ["first", "second"].map((id) => {
    const place = document.getElementById(id);
    const root = id === "first" ? place.attachShadow({ mode: "open" }) : place;
    root.innerHTML = `<style>${style}</style><div></div>`;
    return view.render({ model: window.model, el: root.lastChild });
  });
}
</script>
"""


class Hosted:
    """A view in a bare page, drawn twice from one model: first in a shadow root, then without."""

    def __init__(self, page: Any, view: Live) -> None:
        self.page, self.view = page, view
        self._changes: queue.Queue[dict[str, Any]] = queue.Queue()
        widget = view.widget
        for name in TRAITS:
            widget.observe(self._changed, name)
        page.expose_function("fromPage", widget.hear)
        state = {name: getattr(widget, name) for name in TRAITS}
        page.evaluate("([script, style, state]) => show(script, style, state)", [SCRIPT, STYLE, state])

    def _changed(self, change: Any) -> None:
        self._changes.put({change["name"]: change["new"]})

    def until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(600):
            while not self._changes.empty():
                self.page.evaluate("change => model.receive(change)", self._changes.get())
            if condition():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"{what}: {self.first.inner_text()}")

    @property
    def first(self) -> Any:
        return self.page.locator("#first .rekindle-panel")

    @property
    def second(self) -> Any:
        return self.page.locator("#second .rekindle-panel")

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        for theme, ground, ink in (("light", "#fff", "#111"), ("dark", "#111", "#ddd")):
            colours = f"Object.assign(document.body.style, {{ background: '{ground}', color: '{ink}' }})"
            self.page.evaluate(colours)
            self.page.screenshot(path=SHOTS / f"bare-{name}-{theme}.png")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright, blank_page(playwright) as page:
        yield page.context.browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page, wrong = browser.new_page(viewport={"width": 900, "height": 900}), []
    page.set_default_timeout(120_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.set_content(PAGE)
    yield page
    page.close()
    assert wrong == []


@contextlib.contextmanager
def chatting(page: Any) -> Iterator[tuple[Live, Hosted]]:
    """Show a chat in the page while the block runs."""
    with opened() as session:
        view = session.view.chat(template="{{ messages[0].content }}")
        yield view, Hosted(page, view)
        view.stop()
        view.join(60)


def test_a_stream_and_its_button(page: Any) -> None:
    with opened(step_seconds=0.01) as session:
        view = session.view.stream("hello", max_tokens=400)
        hosted = Hosted(page, view)
        hosted.until(lambda: "tokens so far" in hosted.second.inner_text(), "text comes")
        hosted.second.get_by_role("button", name="Stop").click()
        hosted.until(lambda: "stopped after" in hosted.first.inner_text(), "the button stops it")
        view.join(60)
        hosted.until(lambda: hosted.first.get_by_role("button").count() == 0, "no button of what is over")
        assert hosted.first.inner_text() == hosted.second.inner_text()


def test_a_chat_is_talked_to_and_forked(page: Any) -> None:
    with opened() as session:
        session.chat = lambda messages, overflow=None, **options: session.generate(messages[-1]["content"], **options)  # type: ignore[method-assign]
        view = session.view.chat(max_tokens=30)
        hosted = Hosted(page, view)
        line = hosted.first.get_by_placeholder("Say something")
        line.fill("hello")
        hosted.until(lambda: view.widget.value("say") == "hello", "typing reaches the kernel")
        assert hosted.second.get_by_placeholder("Say something").input_value() == "hello", "both show one model"
        line.press("Enter")
        hosted.until(lambda: hosted.first.locator("[data-token]").count() > 5 and not view.answering, "it answers")
        hosted.until(lambda: line.input_value() == "", "what was sent is cleared")
        line.focus()
        hosted.first.locator("[data-token='3']").click()
        fork = hosted.first.locator(".rekindle-fork").get_by_role("button", name="Fork")
        hosted.until(lambda: fork.count() == 1, "a token can be marked")
        hosted.until(lambda: hosted.first.locator("[data-row]").count() >= 2, "and what could stand there is shown")
        hosted.first.locator("[data-row]").nth(1).click()
        taken = hosted.first.get_by_placeholder("what should come there")
        hosted.until(lambda: taken.input_value() != "", "and taken")
        hosted.first.get_by_placeholder("what should come there").fill(" XYZ")
        hosted.shot("chat")
        fork.click()
        hosted.until(lambda: "XYZ" in hosted.second.inner_text(), "it goes on from there")
        view.stop()
        view.join(60)


def test_lines_settings_and_copies(page: Any) -> None:
    with opened() as session:
        session.chat = lambda messages, overflow=None, **options: session.generate(messages[-1]["content"], **options)  # type: ignore[method-assign]
        view = session.view.chat(max_tokens=30)
        hosted = Hosted(page, view)
        hosted.first.get_by_role("button", name="Settings").click()
        hosted.until(lambda: hosted.first.get_by_role("slider").count() == 3, "sliders come")
        assert hosted.first.get_by_label("max tokens").input_value() == "30"
        hosted.first.get_by_label("max tokens").fill("7")
        hosted.first.get_by_placeholder("System prompt").fill("Be kind")
        line = hosted.first.get_by_placeholder("Say something")
        line.fill("one")
        line.press("Shift+Enter")
        page.keyboard.type("two")
        hosted.until(lambda: view.widget.value("say") == "one\ntwo", "Shift+Enter is a new line")
        assert view.messages == []
        line.press("Enter")
        hosted.until(lambda: view.handle is not None and view.handle.done, "Enter sends")
        assert len(view.answer_ids) == 7
        assert [message["content"] for message in view.messages] == ["Be kind", "one\ntwo"]
        hosted.until(lambda: hosted.first.get_by_role("button", name="Copy").count() == 2, "each can be copied")
        hosted.first.get_by_role("button", name="Copy").nth(0).click()
        copied = hosted.first.locator("[data-label=Copied]")
        hosted.until(lambda: copied.count() == 1, "it was")
        page.evaluate("model.receive({ html: `${model.get('html')}<p>more</p>` })")
        assert copied.count() == 1, "a new picture still says so"
        hosted.shot("settings")
        view.stop()
        view.join(60)


def test_a_chat_by_keyboard_alone_and_for_a_screen_reader(page: Any) -> None:
    with opened(step_seconds=0.002) as session:
        session.chat = lambda messages, overflow=None, **options: session.generate(messages[-1]["content"], **options)  # type: ignore[method-assign]
        view = session.view.chat(max_tokens=30, suggestions=["hello"])
        hosted = Hosted(page, view)
        page.evaluate("document.getElementById('second').remove()")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        hosted.until(lambda: view.handle is not None and view.handle.done, "a suggestion is sent")
        hosted.until(lambda: hosted.first.get_by_role("button", name="Send").count() == 1, "it can be talked to again")
        reached = []
        for _ in range(14):
            page.keyboard.press("Tab")
            focus = "document.getElementById('first').shadowRoot.activeElement"
            reached.append(page.evaluate(f"{focus}?.getAttribute('aria-label') ?? {focus}?.textContent ?? ''"))
            if reached[-1].startswith("tokens of the answer"):
                page.keyboard.press("ArrowRight")
                page.keyboard.press("ArrowRight")
                page.keyboard.press("Enter")
                hosted.until(lambda: hosted.first.locator("[aria-current]").count() == 1, "a token is marked by keys")
                assert hosted.first.locator("[aria-current]").get_attribute("data-token") == "2"
        assert {"Copy", "Edit", "Again", "Fork", "Say something", "Settings", "Send"} <= set(reached), reached
        snapshot = hosted.first.aria_snapshot()
        for words in ('log "Conversation"', 'article "You"', 'article "Answer"', 'textbox "Say something"'):
            assert words in snapshot, snapshot
        view.stop()
        view.join(60)


def test_a_growing_answer_leaves_what_is_selected_focused_and_unfolded(page: Any) -> None:
    with chatting(page) as (view, hosted):
        view.messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "hello"}]
        view.refresh()
        hosted.until(lambda: hosted.first.get_by_text("system prompt").count() == 1, "it is folded")
        hosted.first.get_by_text("system prompt").click()
        copy = hosted.first.get_by_role("button", name="Copy").first
        copy.focus()
        view.messages.append({"role": "assistant", "content": "# You\n\n```python\nx = 1\n```"})
        view.refresh()
        hosted.until(lambda: hosted.first.locator("pre").count() == 1, "more comes")
        assert hosted.first.get_by_text("Be kind").is_visible()
        active = "document.getElementById('first').shadowRoot.activeElement.dataset.press"
        assert page.evaluate(active) == "copy"
        hosted.first.locator("pre").hover()
        hosted.first.locator(".rekindle-code").get_by_role("button", name="Copy").click()
        assert hosted.first.locator(".rekindle-code [data-label=Copied]").count() == 1
        line = hosted.first.get_by_placeholder("Say something")
        before = line.bounding_box()["height"]
        line.fill("one\ntwo\nthree\nfour")
        assert line.bounding_box()["height"] > before + 30, "it grows with what is typed"


def test_a_long_answer_is_drawn_without_a_stall(page: Any) -> None:
    """Changing what differs takes no longer than drawing all of it anew, which this machine may be too slow for."""
    with chatting(page) as (_, hosted):
        changed, anew = page.evaluate("""() => {
          const tokens = Array.from({ length: 2000 }, (_, at) => `<span data-token="${at}">word </span>`);
          const other = document.body.appendChild(document.createElement("div")), times = [[], []];
          const timed = (kept, action) => {
            const began = performance.now();
            action();
            kept.push(performance.now() - began);
          };
          for (let count = 1910; count <= 2000; count += 10) {
            const html = `<div role="log"><div data-tokens="">${tokens.slice(0, count).join("")}</div></div>`;
            timed(times[0], () => model.receive({ html }));
            timed(times[1], () => { other.innerHTML = html; other.scrollTop = other.scrollHeight; });
          }
          return times.map((all) => all.sort((one, other) => one - other)[4]);
        }""")
        print(f"{changed / 2:.1f} ms for a picture of 2,000 tokens, and {anew:.1f} ms anew")
        assert changed / 2 < max(50, 2 * anew), "two are shown"
        assert hosted.first.locator("[data-token]").count() == 2000


def test_typing_keeps_focus_and_caret_when_controls_change(page: Any) -> None:
    with chatting(page) as (view, hosted):
        hosted.first.get_by_placeholder("Say something").focus()
        page.keyboard.type("ac")
        page.keyboard.press("ArrowLeft")
        view.press("settings")
        hosted.until(lambda: hosted.first.get_by_role("slider").count() == 3, "controls come")
        page.keyboard.type("b")
        view.press("settings")
        hosted.until(lambda: hosted.first.get_by_role("slider").count() == 0, "and go")
        page.keyboard.type("b")
        hosted.until(lambda: view.widget.value("say") == "abbc", "the keys arrive where they did before")


def test_keys_that_the_kernel_does_not_know_yet_stay(page: Any) -> None:
    """A kernel that is busy writes into one field, and knows of the others what was there before."""
    with chatting(page) as (view, hosted):
        line = hosted.first.get_by_placeholder("Say something")
        line.focus()
        page.keyboard.type("a")
        hosted.until(lambda: view.widget.value("say") == "a", "the kernel knows the first key")
        hosted.first.get_by_role("button", name="Settings").click()
        line.focus()
        page.keyboard.type("bc")
        hosted.until(lambda: hosted.first.get_by_role("slider").count() == 3, "it answers")
        assert line.input_value() == "abc"
        hosted.first.get_by_placeholder("System prompt").fill("Be kind")
        hosted.until(lambda: view.widget.value("system") == "Be kind", "another field is filled")
        assert view.widget.value("say") == line.input_value() == "abc"
        assert hosted.second.get_by_placeholder("Say something").input_value() == "abc"
        view.widget.fill("say", "other")
        hosted.until(lambda: line.input_value() == "other", "what the kernel writes comes")


def test_two_windows_that_keep_their_keys_agree_in_the_end(page: Any) -> None:
    """The same chat in another window, whose field has the focus of its document as well, writes its text back, too."""
    with chatting(page) as (view, hosted):
        line = hosted.first.get_by_placeholder("Say something")
        line.focus()
        page.keyboard.type("ab")
        hosted.until(lambda: view.widget.value("say") == "ab", "the kernel knows both keys")
        view.widget.observe(lambda change: view.widget.fill("say", "a"), "values")
        view.widget.fill("say", "a")
        hosted.until(lambda: line.input_value() == "a", "one of them gives in")


def test_the_tree_and_the_dashboard(page: Any) -> None:
    with opened() as session:
        session.generate_sync("hello " * 20, max_tokens=2)
        view = session.view.tree()
        hosted = Hosted(page, view)
        hosted.first.get_by_placeholder("What would this prompt hit?").fill("hello " * 9)
        hosted.until(lambda: "prompt tokens are cached" in hosted.first.inner_text(), "it answers")
        assert hosted.first.locator("svg rect[role=button]").count() > 0
        hosted.shot("tree")


def test_a_dashboard_is_closed(page: Any) -> None:
    with opened() as session:
        view = session.watch()
        hosted = Hosted(page, view)
        for index in range(8):
            session.generate_sync(f"hello {index}", max_tokens=20)
        hosted.until(lambda: hosted.first.locator("svg rect").count() > 5, "steps are drawn")
        hosted.shot("dashboard")
        hosted.first.get_by_role("button", name="Close").click()
        hosted.until(lambda: hosted.first.get_by_role("button").count() == 0, "it ends")
        view.join(60)


def test_a_page_that_is_left_hears_no_more(page: Any) -> None:
    with opened() as session:
        view = session.watch()
        hosted = Hosted(page, view)
        page.evaluate("ends.forEach((end) => end())")
        assert page.evaluate("Object.values(model.heard).every((set) => set.size === 0)")
        view.stop()
        view.join(60)
        assert hosted.first.count() == 1
