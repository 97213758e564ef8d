"""The widget and the base of all views, the methods that they use, and the simplest view: a text while it is generated.

A view is redrawn from a thread, at a bounded rate, and replaced by static HTML at its end.

The widget, a picture in HTML with buttons, text fields and a note, is one anywidget instead of a tree of ipywidgets,
since each ipywidget is two or three models that the kernel announces. Making it takes 0.8 ms instead of 2.0. The
session waits meanwhile, since both hold the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import anywidget
import ipywidgets
import traitlets

from rekindle._src.core import words
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.records import Completion, TextDelta
from rekindle._src.core.sampling import Sampling
from rekindle._src.notebook import fields
from rekindle._src.notebook.bubbles import Action
from rekindle._src.views import html, style
from rekindle._src.views.icicle import HitCounts, RunLike
from rekindle.errors import RekindleError


class RequestLike(Protocol):
    """A request, submitted or not."""

    @property
    def id(self) -> str: ...
    @property
    def prompt(self) -> str | None: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def deltas(self) -> tuple[TextDelta, ...]: ...
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...
    @property
    def sampling(self) -> Sampling: ...
    def so_far(self) -> Completion: ...
    def submit(self) -> None: ...
    def cancel(self) -> None: ...
    def wait_for_more(self, count: int) -> int:
        """Block this thread until there are more than `count` deltas or the request ends. Return their number."""
        ...

    def _repr_html_(self) -> str: ...


class NodeLike(RunLike, Protocol):
    """A run of pages of the prefix tree; see `NodeView`."""

    @property
    def key(self) -> int: ...
    @property
    def first_key(self) -> int: ...


class PrefixLike(Protocol):
    """The pages that a prompt would hit; see `PrefixExplanation`. Its words are `str` of it."""

    @property
    def cached_tokens(self) -> int: ...
    @property
    def keys(self) -> tuple[int, ...]: ...


class TreeLike(Protocol):
    """The prefix tree; see `CacheTree`."""

    @property
    def nodes(self) -> Sequence[NodeLike]: ...
    @property
    def total_pages(self) -> int: ...
    @property
    def shown_pages(self) -> int: ...
    def rest(self) -> Sequence[str]: ...


class TierSizes(HitCounts, Protocol):
    """Cached pages by tier, and their use; see `CacheStats`."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def host(self) -> Any: ...
    @property
    def disk(self) -> Any: ...
    @property
    def device_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...


class CacheLike(Protocol):
    """`session.cache`. Everything raises `ConfigError` in a session without a prefix cache."""

    def tree(self, *, limit: int, restored: bool) -> TreeLike: ...
    def stats(self) -> TierSizes: ...
    def explain(self, prompt: str) -> PrefixLike: ...
    def text(self, node: Any) -> str: ...
    def pin(self, node: Any) -> int: ...
    def unpin(self, node: Any) -> int: ...
    def drop(self, node: Any) -> int: ...


class FiguresLike(Protocol):
    def as_dict(self) -> Mapping[str, Any]: ...


class SessionLike(Protocol):
    """A session. Calls that make requests are declared only by their results: their options are the session's."""

    @property
    def config(self) -> ResolvedConfig: ...
    @property
    def tokenizer(self) -> TokenizerLike: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def chat_sampling(self) -> Sampling: ...
    @property
    def model(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def reads_pictures(self) -> bool: ...
    @property
    def cache(self) -> CacheLike: ...
    @property
    def generate(self) -> Callable[..., Awaitable[Completion]]: ...
    @property
    def submit(self) -> Callable[..., RequestLike]: ...
    @property
    def chat(self) -> Callable[..., RequestLike]: ...
    @property
    def fork(self) -> Callable[..., RequestLike]: ...
    def stats(self) -> FiguresLike: ...


_STATIC = Path(__file__).parent / "static"
SCRIPT = "".join((_STATIC / name).read_text() for name in ("pieces.js", "fields.js", "panel.js"))
STYLE = style.SHEET + "".join((_STATIC / name).read_text() for name in ("controls.css", "panel.css"))
Control = dict[str, Any]
# Ten pictures a second at most. Drawing one takes 0.5 ms, and sending it about as much in the kernel's output thread
# and in the notebook server, all on cores that the engine uses.
INTERVAL = 0.1
# A picture has all of a view, so the cost of one grows with what is shown. The pause after it grows likewise: drawing
# takes a fifth of the time at most, however long a conversation is.
PAUSE = 4.0
# The static copy, which outlives the kernel, may lag behind the view by this much. Each update goes to the notebook.
KEEP_SECONDS = 2.0
# Names for subclasses, the page and tests, which completion by Tab leaves out.
_MACHINERY = frozenset(
    (
        "draw",
        "press",
        "act",
        "token",
        "file",
        "wait",
        "start",
        "refresh",
        "epitaph",
        "keep",
        "interval",
        "picture",
        "pictures",
    )
)
_BESIDE = html.line("A live view. When its kernel is gone, what it showed last is the picture above.")


def button(
    name: str, label: str, *, title: str = "", disabled: bool = False, look: str = "", group: str = "", spot: str = ""
) -> Control:
    """Return a button. `look` is "main", "quiet" or "on" (a switch that is on).

    Controls of a `group` stand together in an area of their own. A control that takes the place of another one of the
    same `spot` takes its focus.
    """
    control = {"kind": "button", "name": name, "label": label, "title": title, "disabled": disabled}
    return control | {"look": look, "group": group, "spot": spot}


def field(
    name: str, label: str, *, width: str = "20em", rows: int = 1, grows: bool = False, group: str = ""
) -> Control:
    """Return a text field. It shows its label while empty. Enter presses `{name}:enter`; Shift+Enter is a new line.

    One that `grows` is as high as its text.
    """
    return {
        "kind": "text", "name": name, "label": label, "width": width, "rows": rows, "grows": grows, "group": group,
    }  # fmt: skip


def slider(name: str, label: str, *, low: float, high: float, step: float, title: str = "", group: str = "") -> Control:
    """Return a slider for a number from `low` to `high`. Its value is text, as in every control."""
    return {
        "kind": "slider", "name": name, "label": label, "title": title, "least": low, "most": high, "step": step,
        "group": group,
    }  # fmt: skip


def choice(name: str, label: str, choices: Sequence[str], *, title: str = "", group: str = "") -> Control:
    """Return a list to choose from. A choice presses `name`; the value is the chosen text."""
    return {"kind": "choice", "name": name, "label": label, "title": title, "choices": [*choices], "group": group}


def file(name: str, label: str, *, kinds: str, title: str = "", group: str = "") -> Control:
    """Return a button that opens files of these kinds, as HTML names them; see `Panel.files`."""
    return {"kind": "file", "name": name, "label": label, "title": title, "accept": kinds, "group": group}


@functools.cache
def _layout() -> Any:
    """Return the layout of all panels. One for each would be another model for the kernel to announce and keep."""
    return ipywidgets.Layout()


class Panel(anywidget.AnyWidget):
    """Calls `hears(event, name, value)`: "press" when a control is pressed, "act" when something in the picture is,
    with its place as the value, "token" when a token is clicked, "file" for each file dropped, pasted or chosen.
    """

    _esm = traitlets.Unicode(SCRIPT).tag(sync=True)
    _css = traitlets.Unicode(STYLE).tag(sync=True)
    html = traitlets.Unicode().tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)
    controls: Any = traitlets.List().tag(sync=True)
    values: Any = traitlets.Dict().tag(sync=True)  # contents of fields, by name; pages change them by their messages
    kept = traitlets.Unicode().tag(sync=True)  # class of the static copies, hidden while this is shown
    gone = traitlets.Unicode(  # the page's note after its kernel is gone
        "Its kernel was restarted or is gone: this is the last picture. Run the cell again to go on."
    ).tag(sync=True)
    files = traitlets.Int(-1).tag(sync=True)  # most bytes of a file that the page sends; -1: it takes no files at all
    # The page and the number of the message that was read last, and the texts of its fields since then: pages see that
    # the kernel answers, and what it knows.
    heard: Any = traitlets.List(["", 0, {}]).tag(sync=True)

    def __init__(self, controls: list[Control], hears: Callable[[str, str, Any], None]) -> None:
        super().__init__(controls=controls, layout=_layout(), kept=f"rekindle-kept-{uuid.uuid4().hex}")
        self._hears = hears
        self.on_msg(lambda widget, content, buffers: self.hear(content))

    def hear(self, content: Any) -> None:
        """Handle a message from the page, which brings contents of fields; messages of unknown form are dropped."""
        if isinstance(content, dict) and isinstance(content.get("event"), str):
            number, typed = content.get("number"), fields.texts(content.get("fields"), self.controls, self.values)
            self.heard = [str(content.get("page", "")), number if isinstance(number, int) else 0, typed]
            self.values = {**self.values, **typed}
            self._hears(content["event"], str(content.get("name", "")), content.get("value"))

    def value(self, name: str) -> str:
        return str(self.values.get(name, ""))

    def fill(self, name: str, value: str) -> None:
        self.values = {**self.values, name: value}


class Live:
    """A view. Subclasses define its picture (`draw`) and its end (`ended`).

    A displayed view has two outputs: a static copy of the picture, which the widget hides while it is shown, and the
    widget. If the kernel is gone, JupyterLab shows an error in place of the widget, whatever HTML comes with it. The
    copy remains then, so it is kept current. When the view ends, its HTML replaces both.
    """

    interval: float = INTERVAL

    def __init__(self, *controls: Control) -> None:
        self.widget: Any = Panel(list(controls), self._handle_event)  # Any: anywidget has no types
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown: list[tuple[Any, Any]] = []  # display handles, of a widget and of its static copy
        self._timer: threading.Timer | None = None  # until the next update of the copies
        self._bundled = False  # a front end has the widget
        self._left = False  # the last picture has been drawn
        self._lock = threading.Lock()  # a view may be displayed or redrawn while it ends
        self.picture: str = ""  # the latest one
        self.pictures: int = 0  # drawn so far

    def draw(self) -> str:
        """Return the current view as static HTML."""
        raise NotImplementedError

    def press(self, name: str) -> None:
        """Handle a pressed button, or Enter in a text field. Some names mean the same in all views."""
        if name in ("close", "stop"):
            self.stop()
        elif name == "refresh":
            self.refresh()

    def act(self, name: str, at: int) -> None:
        """Handle a press on something in the picture, which has the number `at` there."""

    def token(self, index: int) -> None:
        """Handle a click on a token of the picture."""

    def file(self, value: Mapping[str, Any]) -> None:
        """Handle a file from the page: its `size`, its content as `uri` (empty if there is too much of it), and its
        place `at` in the group of files that came at once.
        """

    @property
    def ended(self) -> bool:
        """True if the view will not change any more."""
        return self._stopped.is_set()

    def wait(self) -> None:
        """Block the drawing thread until the picture may have changed."""

    def start(self) -> None:
        if self._thread is None:
            self.refresh()
            self._thread = threading.Thread(target=self._run, name="rekindle view", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop drawing, and leave the static picture."""
        self._stopped.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the last picture."""
        if self._thread is not None:
            self._thread.join(timeout)

    def refresh(self) -> None:
        """Draw now. An unchanged picture is not sent."""
        with self._lock:  # a press draws from the kernel's thread: an older picture must not come last
            self._draw()
            self.widget.html = self.picture

    def epitaph(self) -> str:
        """Return the note below the static copy's picture, for readers without a kernel."""
        return ""

    def keep(self) -> None:
        """Save the view's state. Called at most every `KEEP_SECONDS` after changes, and when the view has ended."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _MACHINERY]

    def _draw(self) -> None:
        previous, self.picture = self.picture, str(self.draw())  # not Markup: marimo's encoder takes no subclass of str
        self.pictures += 1
        if self.picture != previous and self._timer is None and not self._left:
            self._timer = threading.Timer(KEEP_SECONDS, self._keep)
            self._timer.daemon = True
            self._timer.start()

    def _keep(self) -> None:
        with contextlib.suppress(Exception):  # as in `_run`
            with self._lock:
                self._timer = None
                if self._left:
                    return
                for _, copy in self._shown:
                    copy.update(self._copy(), raw=True)
            self.keep()

    def _copy(self) -> dict[str, str]:
        """Return the static copy of a live view in the notebook."""
        markup = f'<div class="{self.widget.kept}">{self.picture}{self.epitaph()}</div>'
        return {"text/html": markup, "text/plain": repr(self)}

    def _handle_event(self, event: str, name: str, value: Any) -> None:
        try:
            if event == "press":
                self.press(name)
            elif event == "act" and isinstance(value, int):
                self.act(name, value)
            elif event == "token" and isinstance(value, int):
                self.token(value)
            elif event == "file" and isinstance(value, Mapping):
                self.file(value)
        except RekindleError as error:  # an exception in a callback would not be shown
            self.widget.note = str(html.line(f"{type(error).__name__}: {error}"))

    def _run(self) -> None:
        # Errors are dropped: the kernel's channels may close at any time, and the user can't prevent it.
        with contextlib.suppress(Exception):
            while not self.ended:
                self.wait()
                if self.ended:
                    break
                began = time.perf_counter()
                self.refresh()
                self._stopped.wait(max(self.interval, PAUSE * (time.perf_counter() - began)))
        with contextlib.suppress(Exception):
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._left = True
            self._draw()
            if self._timer is not None:
                self._timer.cancel()
            for handle, copy in self._shown:
                handle.update({"text/html": self.picture, "text/plain": repr(self)}, raw=True)
                copy.update({"text/html": "", "text/plain": ""}, raw=True)
            if not self._shown:
                self.widget.html, self.widget.controls = self.picture, []
            if self._shown or not self._bundled:
                self.widget.close()  # nothing shows it any more, and the kernel would keep it and its request for ever
        self.keep()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle: dict[str, Any] = {"text/html": self.picture, "text/plain": repr(self)}
        self._bundled = True  # before `_left` is read: `_leave` sets that one first, and reads this one after it
        if self._left:
            return bundle, {}
        # Colab reads in the metadata how to show third-party widgets.
        data, metadata = self.widget._repr_mimebundle_() or ({}, {})
        return {**data, **bundle}, metadata

    def _ipython_display_(self) -> None:
        from IPython.display import display

        self.start()
        with self._lock:
            data, metadata = self._repr_mimebundle_()
            if self._left:
                self.widget.close()
                display(data, metadata=metadata, raw=True)
                return
            copy = display(self._copy(), raw=True, display_id=True)
            handle = display(data | {"text/html": str(_BESIDE)}, metadata=metadata, raw=True, display_id=True)
            if handle is not None and copy is not None:
                self._shown.append((handle, copy))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'ended' if self.ended else 'live'}>"


class StreamView(Live):
    """`StreamView(session, prompt, **options)`. The request runs once the view is made; `handle` is its handle.

    Stop is next to the prompt, above the text: below it, every new line would move it away from the pointer.
    """

    def __init__(self, session: SessionLike, prompt: object, **options: object) -> None:
        super().__init__()
        self.handle: RequestLike = session.submit(prompt, **options)
        self._shown_deltas = 0
        self.start()

    @property
    def ended(self) -> bool:
        return self.handle.done

    def wait(self) -> None:
        """Block until there is another delta, so an idle view costs nothing."""
        self._shown_deltas = self.handle.wait_for_more(self._shown_deltas)

    def act(self, name: str, at: int) -> None:
        if name == _STOP.name:
            self.stop()

    def stop(self) -> None:
        """Cancel the request. Its text so far stays."""
        self.handle.cancel()
        super().stop()

    def draw(self) -> str:
        handle = self.handle
        prompt = html.line(words.shorten(handle.prompt, 400)) if handle.prompt else ""
        if handle.done:
            return html.block(prompt, handle._repr_html_())
        head = f'<div style="display:flex;flex-wrap:wrap;gap:2px 8px;align-items:center">{prompt}{_STOP.draw(0)}</div>'
        text = html.text(f"{handle.text} ▌")
        log = (
            f'<div role="log" aria-label="Text of {html.escape(handle.id)}" aria-busy="true" tabindex="0">{text}</div>'
        )
        tokens = len(handle.token_ids)
        state = f"{words.count(tokens, 'token')} so far" if tokens else "waits for its first token"
        return html.block(head, log, html.line(handle.id, state))


_STOP = Action("stop", "Stop", "End the request; its text stays", look="plain")
