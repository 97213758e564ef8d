"""Every object that a user can get from a session shows itself in a notebook: none is forgotten."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers import adapters
from helpers.small import TINY
from rekindle import Session
from rekindle._src.calls.call import Call
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.session.cache_view import CacheView
from rekindle._src.views import style
from rekindle.errors import InvalidRequest
from rekindle.tiny import folder as tiny_folder

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
EVIL = "<script>alert('x')</script>"
PLAIN = (str, bytes, int, float, bool, type(None), enum.Enum, Path, np.ndarray, np.generic, BaseException)
OPTIONS: dict[str, Any] = {name: value for name, value in TINY.items() if name != "disk_memory"}
Recipe = Callable[[Any, Path], Any]
ENDS = {"aclose", "close", "attached"}  # of a session, or its beginning: nothing comes back that has not been seen
# No session gives them to a user: types of options, and what a logits processor is called with while it is traced.
UNSEEN = {"SamplingOptions", "OpenOptions", "LogitsContext", "TapContext", "DeviceMesh"}
LIVE = {"watch", "view"}  # widgets, which tests/notebook looks at


TOOLS = "{% if tools %}<tool_call><think>{% endif %}{{ messages[0].content }}"


def abs_of(x: int) -> int:
    return abs(x)


def awaited(call: Call[Any]) -> list[Any]:
    return [call, call.result_sync()]


def adapter_folder(path: Path) -> Path:
    return adapters.write(path, load(tiny_folder()).config, targets=["q_proj"])


def served(session: Session) -> list[Any]:
    pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
    call = session.serve(name=EVIL, api_key="secret")
    server = call.result_sync()
    return [call, server, server.close(), server]


def shared(session: Session) -> list[Any]:
    call = session.cache.share(secret=EVIL)
    address = call.result_sync()
    return [call, address, address.close(), address]


def pulled(session: Session) -> list[Any]:
    address = session.cache.share(secret=EVIL).result_sync()
    return awaited(session.cache.pull(address.address, EVIL * 3, secret=EVIL))


def text_alone(session: Session) -> str:
    with pytest.raises(InvalidRequest, match="can't be read by this model") as refused:
        session.picture_cost(1, 1)
    return str(refused.value)


def tuned(session: Session) -> list[Any]:
    run = session.tune(EVIL, [(EVIL, " red.")], steps=2, rank=1, probe=EVIL, every=1)
    report = run.result_sync()
    session.unload_adapter(EVIL).result_sync()
    return [run, report, run.history[0], run.probes[0]]


def pinned(cache: CacheView) -> list[Any]:
    node = cache.tree().nodes[0]
    return [cache.pin(node), cache.unpin(node)]


def never_started(call: Call[Any]) -> Call[Any]:
    call.close()
    return call


SESSION: dict[str, Recipe] = {
    "config": lambda session, path: session.config,
    "tokenizer": lambda session, path: session.tokenizer,
    "model": lambda session, path: session.model,
    "reads_pictures": lambda session, path: session.reads_pictures,
    "gradients": lambda session, path: session.gradients(
        "Once upon", of=rekindle.logprob(0), at={"residual": [0]}
    ).result_sync(),
    "decide": lambda session, path: [
        awaited(session.decide(EVIL, {EVIL: (EVIL, bool), "which": {EVIL.strip(): EVIL, "other": ""}})),
        awaited(session.decide([EVIL, "two"], {EVIL: bool})),
    ],
    "calibrate": lambda session, path: awaited(session.calibrate([EVIL, "two"], {EVIL: bool}, {EVIL: [True, False]})),
    "rerank": lambda session, path: awaited(session.rerank(EVIL, [EVIL, "two"])),
    "tune": lambda session, path: tuned(session),
    "attribute": lambda session, path: session.attribute(
        "Once upon", of=rekindle.logprob(0), method="gradient_x_input", at={"mlp": [0]}
    ).result_sync(),
    "picture_cost": lambda session, path: text_alone(session),
    "chat_sampling": lambda session, path: session.chat_sampling,
    "weights": lambda session, path: session.weights,
    "trainable": lambda session, path: session.trainable(),
    "compiling": lambda session, path: session.compiling,
    "chat_template": lambda session, path: session.chat_template,
    "last": lambda session, path: session.submit(EVIL, max_tokens=3).so_far(),
    "closed": lambda session, path: session.closed,
    "generate": lambda session, path: [
        awaited(session.generate(EVIL, max_tokens=3, logprobs=2, prompt_logprobs=1)),
        awaited(session.generate([EVIL, "two"], max_tokens=2)),
    ],
    "stream": lambda session, path: [stream := session.stream(EVIL, max_tokens=3), aiter(stream), stream.result_sync()],
    "submit": lambda session, path: awaited(session.submit(EVIL, max_tokens=3)),
    "admit": lambda session, path: anyio.run(functools.partial(session.admit, EVIL, max_tokens=2)),
    "chat": lambda session, path: [
        *awaited(session.chat([{"role": "user", "content": EVIL}], max_tokens=3)),
        *awaited(session.chat([{"role": "user", "content": EVIL}], tools=[abs_of], template=TOOLS, max_tokens=3)),
        *awaited(
            session.chat(
                [{"role": "user", "content": EVIL}], tools=[abs_of], template=TOOLS, run_tools=True, max_tokens=3
            )
        ),
    ],
    "render": lambda session, path: session.render([{"role": "user", "content": EVIL}]),
    "chat_tokens": lambda session, path: session.chat_tokens([{"role": "user", "content": EVIL}]),
    "serve": lambda session, path: served(session),
    "sampling": lambda session, path: session.sampling,
    "conversation": lambda session, path: [chat := session.conversation(system=EVIL), *awaited(chat.say(EVIL)), chat],
    "embed": lambda session, path: awaited(session.embed([EVIL, "two"])),
    "embed_sync": lambda session, path: session.embed_sync(EVIL),
    "score": lambda session, path: awaited(session.score(EVIL, [EVIL, "two"])),
    "score_sync": lambda session, path: session.score_sync([EVIL, "two"], [EVIL]),
    "rollout": lambda session, path: awaited(session.rollout([EVIL, "two"], n=2, max_tokens=3)),
    "rollout_sync": lambda session, path: session.rollout_sync(EVIL, n=1, max_tokens=2),
    "map": lambda session, path: awaited(session.map([{"text": EVIL}, {}], "{text}", max_tokens=2)),
    "map_sync": lambda session, path: session.map_sync([{"text": EVIL}], "{text}", max_tokens=2),
    "fork": lambda session, path: awaited(session.fork(session.generate_sync(EVIL, max_tokens=4), at=2)),
    "generate_sync": lambda session, path: session.generate_sync(EVIL, max_tokens=2, n=2),
    "stream_sync": lambda session, path: list(session.stream_sync(EVIL, max_tokens=3, logprobs=1)),
    "stats": lambda session, path: session.stats(),
    "programs": lambda session, path: list(session.programs()),
    "explain": lambda session, path: session.explain(session.generate_sync(EVIL, max_tokens=2)),
    "allowed": lambda session, path: session.allowed(session.generate_sync(EVIL, choice=["<b>x</b>", EVIL]), at=0),
    "check_integrity": lambda session, path: session.check_integrity(),
    "cache": lambda session, path: session.cache,
    "save": lambda session, path: awaited(session.save("kept")),
    "pin": lambda session, path: [session.pin(EVIL * 3), session.unpin(EVIL * 3)],
    "unpin": lambda session, path: [session.pin(EVIL * 3), session.unpin(EVIL * 3)],
    "adapters": lambda session, path: session.adapters,
    "load_adapter": lambda session, path: awaited(session.load_adapter(EVIL, adapter_folder(path / "adapter"))),
    "save_adapter": lambda session, path: [
        session.load_adapter("one", adapter_folder(path / "adapter")).result_sync(),
        *awaited(session.save_adapter("one", Path(tempfile.mkdtemp(dir=path)) / "kept")),
    ],
    "unload_adapter": lambda session, path: [
        session.load_adapter("one", adapter_folder(path / "adapter")).result_sync(),
        *awaited(session.unload_adapter("one")),
    ],
    "swap_weights": lambda session, path: never_started(session.swap_weights("x")),
    "asleep": lambda session, path: session.asleep,
    "sleep": lambda session, path: [*awaited(session.sleep()), *awaited(session.wake())],
    "wake": lambda session, path: never_started(session.wake()),
    "paused": lambda session, path: session.paused(),
    "profile": lambda session, path: session.profile(path / "profile"),
    "step": lambda session, path: stepped(session, lambda: awaited(session.step())),
    "step_sync": lambda session, path: stepped(session, session.step_sync),
}
CACHE: dict[str, Recipe] = {
    "tree": lambda session, path: session.cache.tree(),
    "stats": lambda session, path: session.cache.stats(),
    "explain": lambda session, path: session.cache.explain(EVIL * 3),
    "snapshots": lambda session, path: [session.save("one").result_sync(), session.cache.snapshots()],
    "text": lambda session, path: session.cache.text(session.cache.tree().nodes[0]),
    "pin": lambda session, path: pinned(session.cache),
    "unpin": lambda session, path: pinned(session.cache),
    "drop": lambda session, path: session.cache.drop(session.cache.tree().nodes[-1]),
    "prune": lambda session, path: session.cache.prune(to=0),
    "clear": lambda session, path: awaited(session.cache.clear(tier="host")),
    "delete": lambda session, path: session.cache.delete("nothing"),
    "export_prefix": lambda session, path: awaited(session.cache.export_prefix(EVIL * 3, path / "prefix")),
    "import_prefix": lambda session, path: [
        session.cache.export_prefix(EVIL * 3, path / "prefix").result_sync(),
        *awaited(session.cache.import_prefix(path / "prefix")),
    ],
    "share": lambda session, path: shared(session),
    "pull": lambda session, path: pulled(session),
}


def stepped(session: Session, step: Callable[[], Any]) -> Any:
    with session.paused():
        handle = session.submit(EVIL, max_tokens=1)
        report = step()
    handle.result_sync()
    return report


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with rekindle.open_sync("tiny", **OPTIONS, cache_dir=str(tmp_path_factory.mktemp("cache"))) as made:
        made.generate_sync(EVIL * 3, max_tokens=2)
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


def parts(thing: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Objects of ours in a result, its fields and properties included."""
    seen = set() if seen is None else seen
    if isinstance(thing, PLAIN) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, dict):
        for value in thing.values():
            yield from parts(value, seen)
        return
    if type(thing).__module__.startswith("rekindle"):
        yield thing
    if isinstance(thing, list | tuple):
        for value in thing:
            yield from parts(value, seen)
    names = [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    names += [name for name, entry in inspect.getmembers(type(thing)) if isinstance(entry, property)]
    names = [name for name in names if name[0] != "_"]
    if isinstance(thing, Session | CacheView | rekindle.Handle | Call) or dataclasses.is_dataclass(thing):
        for name in names:
            yield from parts(getattr(thing, name), seen)


def check(thing: Any) -> str:
    """What has to hold for every object; gives its HTML."""
    kind = type(thing).__name__
    line = repr(thing)
    assert "\n" not in line, kind
    assert len(line) <= 200, line
    assert " object at 0x" not in line, line
    assert hasattr(thing, "_repr_html_"), f"{kind} has no HTML"
    made = thing._repr_html_()
    assert type(made) is str and made, f"{kind}: marimo shows nothing for a subclass of str"
    Balanced(made)
    assert EVIL not in made, kind
    # Areas and squares of an accent, which every theme can bear, are no text and have none on them.
    accents = "|".join({*style.SERIES, *style.TIERS.values()} - {"transparent"})
    plain = re.sub(rf"background:(?:{accents})([^>]*></)", r"\1", made)
    plain = re.sub(r"color:[^;\"]+([^>]*>■</)", r"\1", plain)
    for name, value in re.findall(r"(?<![-\w])(color|background):([^;\"]+)", plain):
        # Text in the theme's own colour, shades that let the theme's background through, hues that both can bear.
        readable = ("rgba(", "hsla(", "none") if name == "background" else ("hsl(", "inherit")
        assert value.startswith(readable), f"{kind}: {name}:{value} is for one theme"
    return made


class Balanced(HTMLParser):
    """Static HTML: every element that is opened is closed, nothing runs, nothing is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "style", "link", "iframe", "img", "object", "form"), tag
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "href"), f"{name}={value}"
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


LONG = {"tune": pytest.mark.thorough}  # compiles for seconds; `test_tuning.py` checks its result


def cases(kind: type, recipes: dict[str, Recipe]) -> list[Any]:
    return [pytest.param(kind, name, id=f"{kind.__name__}.{name}", marks=LONG.get(name, ())) for name in recipes]


def test_every_public_name_has_a_recipe() -> None:
    """Whoever adds a method adds what it returns here."""
    assert public(Session) - ENDS - LIVE == set(SESSION)
    assert public(CacheView) == set(CACHE)


@pytest.mark.parametrize(("kind", "name"), [*cases(Session, SESSION), *cases(CacheView, CACHE)])
def test_what_it_gives_shows_itself(session: Session, folder: Path, kind: type, name: str) -> None:
    result = (SESSION if kind is Session else CACHE)[name](session, folder)
    for thing in parts(result):
        check(thing)


def test_every_exported_class_shows_itself() -> None:
    for name in rekindle.__all__:
        kind = getattr(rekindle, name)
        if isinstance(kind, type) and not issubclass(kind, enum.Enum | BaseException) and name not in UNSEEN:
            assert hasattr(kind, "_repr_html_"), name


def test_what_is_made_before_a_session(tmp_path: Path) -> None:
    opening = rekindle.open("tiny")
    assert "await rekindle.open" in check(opening)
    check(rekindle.Sampling(stop=(EVIL,)))
    check(rekindle.EngineConfig(cache_dir=EVIL))
    check(rekindle.LogitsProcessor(lambda logits, context: logits, EVIL))
    check(rekindle.Tap(lambda x, context: x, EVIL))
    model = load(tiny_folder())
    assert "parameters" in check(model)


def test_the_walk_finds_what_is_inside(session: Session, folder: Path) -> None:
    """It would be of no use if it stopped early."""
    found = {
        type(thing).__name__
        for name, recipe in SESSION.items()
        if name not in LONG
        for thing in parts(recipe(session, folder))
    }
    found |= {type(thing).__name__ for recipe in CACHE.values() for thing in parts(recipe(session, folder))}
    assert found >= {
        "Batch", "CacheStatistics", "CacheStats", "CacheTree", "CacheView", "Completion", "Explanation", "Handle",
        "HostStatistics", "NodeView", "Once", "PausedSession", "PrefixExplanation", "ProgramRecord", "RowReport",
        "ResolvedConfig", "RunnerStatistics", "Sampling", "SaveReport", "SchedulerStatistics", "SessionStats",
        "SnapshotInfo", "Snapshots", "StepReport", "Stream", "TextDelta", "Timings", "TokenLogprobs", "Tokenizer",
        "Usage",
    }  # fmt: skip


def test_the_line_tells_what_is_unusual() -> None:
    assert repr(rekindle.Sampling(temperature=0.5, seed=3)) == "Sampling(temperature=0.5, seed=3)"
    assert repr(rekindle.Sampling()) == "Sampling()"


@pytest.mark.parametrize(
    "wrong", ["<div>", "<b><i></b></i>", "<script></script>", '<b onclick="x"></b>', '<img src="x">']
)
def test_the_check_finds_what_is_wrong(wrong: str) -> None:
    with pytest.raises(AssertionError):
        Balanced(wrong)
