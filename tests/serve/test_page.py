"""The page at `/`: one document that loads nothing, needs no key, shows whatever it shows as text, and can chat."""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from helpers.asgi import send
from helpers.chatting import saying
from helpers.sessions import wait_until_idle
from helpers.thorough import one_event_loop as anyio_backend  # noqa: F401
from rekindle import Sampling, Session
from rekindle._src.serve import page
from rekindle.serve import app as make_app
from serve.conftest import chatting_session

EVIL = "<img/src=x/onerror=alert(1)>'\"\\"
IDS = re.findall(r'id="(\w+)"', page.BODY)


@pytest.mark.anyio
async def test_it_is_there_without_a_key_and_shows_nothing_of_the_server(session: Session) -> None:
    app = make_app(session, name=EVIL, api_key="secret")
    answer = await send(app, "GET", "/")
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert (await send(app, "GET", "/v1/models")).status == 401
    assert (await send(app, "POST", "/")).status == 405
    text = answer.body.decode()
    assert EVIL not in text and "secret" not in text and "fake" not in text
    assert (await send(app, "GET", "/", headers={"host": "evil.example"})).status == 200, "a key guards what there is"
    assert (await send(make_app(session), "GET", "/", headers={"host": "evil.example"})).status == 403


@pytest.mark.anyio
async def test_its_policy_allows_its_own_script_and_style_and_this_server(app: Any) -> None:
    answer = await send(app, "GET", "/")
    text, policy = answer.body.decode(), answer.headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag in ("script", "style"):
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(parts) == 1
        digest = base64.b64encode(hashlib.sha256(parts[0].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"https?://|\bsrc=|\bon\w+=|style=|@import|url\(", text), "it loads or runs something else"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", page.SCRIPT)
    assert set(re.findall(r'\$\("(\w+)"\)', page.SCRIPT)) <= set(IDS)
    assert "color-scheme: light dark" in text and len(answer.body) < 28_000


def shown(address: str, *steps: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What the page shows after some steps in it."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node runs the page's script")
    command = [node, str(Path(__file__).with_name("page.js")), address, page.SCRIPT, json.dumps(IDS), json.dumps(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return result


@pytest.mark.anyio
async def test_its_script_names_the_models_chats_and_asks_for_a_key(session: Session) -> None:
    pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
    async with await session.serve(name=EVIL) as server:
        found = await anyio.to_thread.run_sync(
            lambda: shown(
                server.url,
                ("shows", "models", "tokens"),
                ("type", "text", "Hello"),
                ("click", "send"),
                ("shows", "send", "Stop"),
                ("shows", "send", "Send"),
            )
        )
        said = await session.chat([{"role": "user", "content": "Hello"}], max_tokens=5)
    assert found["models"]["text"] == f"{EVIL}|512 tokens" and found["locked"]["hidden"]
    call = next(
        node
        for node in ast.walk(ast.parse(found["python"]["text"]))
        if isinstance(node, ast.keyword) and node.arg == "model"
    )
    assert ast.literal_eval(call.value) == EVIL
    assert json.loads(shlex.split(found["curl"]["text"])[-1])["model"] == EVIL
    assert f"{server.url}/v1/chat/completions" in found["curl"]["text"]
    assert found["talk"]["text"].startswith("Hello|") and len(found["talk"]["text"]) > 20
    assert said.text and found["note"]["text"] == "" and found["title"]["text"] == "Hello"

    async with await session.serve(api_key="secret") as server:
        found = await anyio.to_thread.run_sync(lambda: shown(server.url, ("shows", "state", "asks for an API key")))
        assert found["open"]["hidden"] and not found["locked"]["hidden"] and not found["models"]["text"]
        wrong = [
            ("shows", "state", "asks"),
            ("type", "key", "guess"),
            ("submit", "unlock"),
            ("shows", "state", "wrong"),
        ]
        right = [("type", "key", "secret"), ("submit", "unlock"), ("shows", "models", "tokens")]
        found = await anyio.to_thread.run_sync(lambda: shown(server.url, *wrong, *right))
        assert not found["open"]["hidden"] and found["locked"]["hidden"]
        assert "Bearer $KEY" in found["curl"]["text"] and "import os" in found["python"]["text"]
        assert "secret" not in found["curl"]["text"] + found["python"]["text"]


@pytest.mark.anyio
async def test_the_page_shows_the_servers_error_without_a_chat_template(tmp_path: Path) -> None:
    from helpers.sessions import CONFIG, fake_session

    pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
    with fake_session(CONFIG) as base:
        async with await base.serve() as server:
            steps = [("shows", "models", "tokens"), ("type", "text", "Hello"), ("click", "send")]
            found = await anyio.to_thread.run_sync(lambda: shown(server.url, *steps, ("shows", "note", "template")))
    assert "chat template" in found["note"]["text"] and found["text"]["value"] == "Hello" and not found["talk"]["text"]


@pytest.mark.anyio
@pytest.mark.thorough
async def test_it_samples_as_a_notebooks_chat_and_says_how_fast_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's default of temperature 1 makes nonsense of small models."""
    pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
    steps = [
        ("shows", "models", "tokens"), ("type", "text", "Hello"), ("click", "send"), ("shows", "talk", "tokens/s"),
        ("type", "preset", "precise"), ("press", "talk", "Again"), ("shows", "send", "Stop"),
        ("shows", "talk", "tokens/s"),
    ]  # fmt: skip
    chat = Sampling(temperature=0.8, top_p=0.9)
    monkeypatch.setattr(Session, "chat_sampling", chat)
    with chatting_session(step_seconds=0.001) as session:
        async with await session.serve() as server:
            found = await anyio.to_thread.run_sync(lambda: shown(server.url, *steps))
    own, precise = found["sent"]
    assert (own["temperature"], own["top_p"]) == (chat.temperature, chat.top_p)
    assert own["stream_options"] == {"include_usage": True} and own["messages"] == precise["messages"]
    assert precise["temperature"] == 0, "a preset of the views"
    assert re.search(
        r"first token after [\d.]+ m?s, then [\d,]+ tokens/s · (\d+ tokens, ended by the model|cut at \d+ tokens)",
        found["talk"]["text"],
    )


@pytest.mark.anyio
async def test_an_answer_is_stopped_by_a_key_and_its_text_stays(slow: Session) -> None:
    steps = [
        ("shows", "models", "tokens"), ("type", "text", "Hello"), ("click", "send"), ("shows", "talk", r"\|\w\w"),
        ("key", "Escape"), ("shows", "send", "Send"),
    ]  # fmt: skip
    async with await slow.serve() as server:
        found = await anyio.to_thread.run_sync(lambda: shown(server.url, *steps))
    assert "· stopped" in found["talk"]["text"] and found["note"]["text"] == ""


@pytest.mark.anyio
async def test_a_question_comes_back_from_an_answer_of_reasoning_alone_with_the_reason() -> None:
    pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
    steps = [("shows", "models", "tokens"), ("type", "text", "Hello"), ("click", "send"), ("shows", "send", "Send")]
    with saying("<think>They greet") as session:
        async with await session.serve() as server:
            found = await anyio.to_thread.run_sync(lambda: shown(server.url, *steps))
    assert found["note"]["text"] == "The answer ended before its text began."
    assert found["text"]["value"] == "Hello" and found["talk"]["text"] == ""


@pytest.mark.anyio
async def test_reasoning_is_folded_with_its_seconds_and_tokens() -> None:
    pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
    steps = [
        ("shows", "models", "tokens"), ("type", "text", "Hello"), ("click", "send"), ("shows", "send", "Send"),
        ("type", "text", "And?"), ("click", "send"), ("shows", "send", "Send"),
    ]  # fmt: skip
    with saying("<think>They <b>greet</b> me</think>*Hi*") as session:
        async with await session.serve() as server:
            found = await anyio.to_thread.run_sync(lambda: shown(server.url, *steps))
    said = json.dumps(found["talk"]["tree"])
    fold = re.search(
        r'\["details", "", \["summary", "note", "reasoning, ([^"]*)"\], \["div", "thoughts", "([^"]*)"\]', said
    )
    assert fold is not None and fold[2] == "They <b>greet</b> me", said
    assert re.fullmatch(r"[\d.]+ m?s, 20 tokens", fold[1])
    assert "They" not in said.partition('"details"')[0]
    first, second = (body["messages"] for body in found["sent"])
    assert second[1] == {"role": "assistant", "content": "*Hi*", "reasoning_content": "They <b>greet</b> me"}, first


@pytest.mark.anyio
async def test_an_answer_comes_back_if_another_one_is_refused(session: Session) -> None:
    pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
    steps = [("shows", "models", "tokens"), ("type", "text", "Hello"), ("click", "send"), ("shows", "talk", "token")]
    refused = [("type", "model", "unknown"), ("press", "talk", "Again"), ("shows", "note", "unknown")]
    restored = [("type", "model", "fake"), ("press", "talk", "Again"), ("shows", "send", "Send")]
    async with await session.serve() as server:
        before = await anyio.to_thread.run_sync(lambda: shown(server.url, *steps, *refused))
        after = await anyio.to_thread.run_sync(lambda: shown(server.url, *steps, *refused, *restored))
    question, answer = before["talk"]["tree"][2:]
    assert question[1] == "turn users" and answer[1] == "turn assistants" and before["talk"]["text"].endswith("Again")
    assert before["text"]["value"] == "" and before["title"]["text"] == "Hello"
    assert [sent["messages"] for sent in after["sent"]] == [[{"role": "user", "content": "Hello"}]] * 3


@pytest.mark.anyio
async def test_a_full_context_gives_the_message_back_and_a_button_makes_room(session: Session) -> None:
    much = "x" * 400
    steps = [
        ("shows", "models", "tokens"), ("type", "text", "y" * 200), ("click", "send"), ("shows", "talk", "token"),
        ("type", "text", much), ("click", "send"), ("shows", "note", "max_model_len"),
    ]  # fmt: skip
    async with await session.serve() as server:
        full = await anyio.to_thread.run_sync(lambda: shown(server.url, *steps))
        free = await anyio.to_thread.run_sync(
            lambda: shown(server.url, *steps, ("click", "room"), ("shows", "talk", "token"))
        )
    assert full["text"]["value"] == much and not full["room"]["hidden"] and much not in full["talk"]["text"]
    assert free["room"]["hidden"] and free["text"]["value"] == "" and free["talk"]["text"].startswith(much)
    assert [message["content"] for message in free["sent"][-1]["messages"]] == [much]


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_a_chat_in_a_browser(slow: Session) -> None:
    """A browser enforces the policy: the page's own script and style run, and nothing is refused on the way."""
    sync_api = pytest.importorskip("playwright.sync_api")
    from helpers.browsing import blank_page

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(slow.serve(name=EVIL, api_key="secret").result_sync()))
        late = stack.enter_context(contextlib.closing(slow.serve().result_sync()))
        shown = stack.enter_context(blank_page(stack.enter_context(sync_api.sync_playwright()), width=320, height=700))
        complaints: list[str] = []
        shown.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.goto(f"{server.url}/")
        shown.get_by_label("API key").fill("secret")
        shown.keyboard.press("Enter")
        shown.get_by_role("cell", name="512 tokens").wait_for()
        shown.get_by_label("Your message").fill("Hello")
        shown.keyboard.press("Enter")
        shown.get_by_role("button", name="Send").wait_for()
        said = shown.locator("#talk .said").all_inner_texts()
        assert said[0] == "Hello" and len(said) == 2 and said[1]
        assert shown.get_by_role("cell", name=EVIL).count() == 1 and shown.locator("img").count() == 0
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it is wider than a telephone"
        assert [text for text in complaints if "401" not in text] == [], "the policy refuses something"

        shown.goto(f"{late.url}/")
        shown.get_by_label("Your message").fill("Hello")
        shown.keyboard.press("Enter")
        shown.locator(".assistant").get_by_text(re.compile("..")).wait_for()
        shown.get_by_role("button", name="Stop").click()
        shown.get_by_role("button", name="Send").wait_for()
        wait_until_idle(slow)
        shown.get_by_role("button", name="New chat").click()
        assert shown.locator("#talk .said").count() == 0
