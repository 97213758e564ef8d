"""Pictures in requests: in three forms they reach the session in their order, or are refused by the field."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from helpers.asgi import get, post
from helpers.sessions import CONFIG, fake_front
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.capabilities import capabilities_of
from rekindle._src.capabilities.pictures.request import PICTURES
from rekindle._src.core.pictures import EncodedRows, PictureCost, PictureStatistics, RowsOrigin, TokenGrid
from rekindle._src.dispatch.host import Host, wait
from rekindle._src.images import open_bytes, open_pictures
from rekindle._src.serve import pictures as serve_pictures
from rekindle._src.serve.fetching import Fetcher
from rekindle._src.text.chat import ChatTemplate
from rekindle.serve import app as make_app
from serve.conftest import checked
from serve.test_fetching import rules, silence, website

Image = pytest.importorskip("PIL.Image", reason="pictures are the extra `images`")

pytestmark = pytest.mark.anyio
TOKEN = 1
MARK = chr(TOKEN)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{PICTURE}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}|"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ReadPicture:
    """A picture as the session has it: its pixels' digest."""

    def __init__(self, source: Any, *, decodes: bool) -> None:
        self.digest = bytes.fromhex(source.decode().digest) if decodes else b""
        self.source, self.grids = source, (TokenGrid(1, 3),)


class Pictures:
    """A model's pictures, each of which is three tokens; what was read and spelled is kept."""

    marker, whole, token = "{PICTURE}", False, TOKEN

    def __init__(self) -> None:
        self.decodes = self.here = True
        self.asked: list[tuple[str, str | None]] = []
        self.digests: list[bytes] = []
        self.texts: list[str] = []
        self.row_bytes = 96

    def read(self, values: Sequence[Any], field: str = "images") -> tuple[ReadPicture, ...]:
        values = [one.source if isinstance(one, ReadPicture) else one for one in values]
        read = tuple(ReadPicture(one, decodes=self.decodes) for one in open_pictures(values, field=field))
        self.digests += [one.digest for one in read]
        return read

    def spelled(self, text: str, pictures: Sequence[Any]) -> str:
        text = text.replace(self.marker, MARK)
        self.texts.append(text)
        return text

    def filled(self, token_ids: Any, pictures: Any, field: str = "images") -> Any:
        return token_ids

    def cost(self, width: int, height: int, field: str = "images") -> PictureCost:
        return PictureCost(3, self.row_bytes)

    def counts(self, picture: Any) -> list[int]:
        return [3]

    def known(self, picture: Any, salt: str | None) -> bool:
        return self.here

    async def encoded(self, picture: Any, wanted: Callable[[], bool], *, caller: str, salt: str | None) -> Any:
        self.asked.append((caller, salt))
        return EncodedRows(np.zeros((1, 3, 8), np.float32), RowsOrigin.ENCODER)

    def statistics(self) -> PictureStatistics:
        return PictureStatistics(0, 0, 0, 0, 0)

    def use(self, token_ids: Any, runs: Any, pictures: Any) -> Any:
        return None, 0


def seeing_session(pictures: Pictures | None) -> Session:
    services = {} if pictures is None else {PICTURES: pictures}
    front = fake_front(CONFIG)._replace(chat=ChatTemplate(TEMPLATE), services=services)
    host = Host(lambda: front, capabilities_of)
    host.start()
    return Session.attached(host, wait(host.opened))


@pytest.fixture
def pictures() -> Pictures:
    return Pictures()


@pytest.fixture
def session(pictures: Pictures) -> Iterator[Session]:
    yield from checked(seeing_session(pictures))


def png(seed: int = 0, size: tuple[int, int] = (3, 2)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def digest(data: bytes) -> bytes:
    return bytes.fromhex(open_bytes(data).decode().digest)


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def user(*parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def chat_part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat_body(*parts: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": user(*parts), "max_tokens": 2, "temperature": 0, **more}


def body_of(path: str, url: str, words: str = "?") -> dict[str, Any]:
    """One picture by URL, and a text, in the form of an endpoint."""
    if path == "/v1/chat/completions":
        return chat_body(chat_part(url), text(words))
    if path == "/v1/responses":
        parts = {"type": "input_image", "image_url": url}, {"type": "input_text", "text": words}
        return {"input": user(*parts), "max_output_tokens": 2}
    source = {"type": "url", "url": url}
    if url.startswith("data:"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {"messages": user({"type": "image", "source": source}, text(words)), "max_tokens": 2}


FIELDS = {
    "/v1/chat/completions": "messages[0].content[0].image_url.url",
    "/v1/responses": "input[0].content[0].image_url",
    "/v1/messages": "messages[0].content[0].source.url",
}


async def test_pictures_of_all_forms_reach_the_session_in_their_order(session: Session, pictures: Pictures) -> None:
    app = make_app(session)
    one, two, three = png(1), png(2, (1, 1)), png(3, (1, 9))
    done = await post(
        app,
        "/v1/chat/completions",
        chat_body(text("A"), chat_part(uri(one), detail="low"), text("B"), chat_part(uri(two), detail=None), text("C")),
    )
    assert done.status == 200, done.body
    assert pictures.texts[-1] == f"<user>A{MARK}B{MARK}C|<assistant>"
    assert pictures.digests == [digest(one), digest(two)]
    assert done.json()["usage"]["prompt_tokens"] == len(pictures.texts[-1]) + 2 * 2  # three tokens in each place
    pictures.digests.clear()
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_image", "image_url": uri(two), "detail": "auto"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "D"}, {"type": "input_image", "image_url": uri(one)}],
        },
    ]
    done = await post(app, "/v1/responses", {"input": items, "max_output_tokens": 2})
    assert done.status == 200, done.body
    assert pictures.texts[-1] == f"<user>{MARK}|<assistant>Yes|<user>D{MARK}|<assistant>"
    assert pictures.digests == [digest(two), digest(one)]
    pictures.digests.clear()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(three).decode()}
    content = [text("E"), {"type": "image", "source": source}, {"type": "image", "source": {**source}}]
    done = await post(app, "/v1/messages", {"messages": user(*content), "max_tokens": 2})
    assert done.status == 200, done.body
    assert pictures.texts[-1] == f"<user>E{MARK}{MARK}|<assistant>"
    assert pictures.digests == [digest(three)] * 2


async def test_a_stream_about_a_picture(session: Session, pictures: Pictures) -> None:
    done = await post(make_app(session), "/v1/chat/completions", chat_body(chat_part(uri(png())), stream=True))
    assert done.status == 200 and done.events[-1] == "[DONE]" and pictures.digests == [digest(png())]


@pytest.mark.parametrize("path", FIELDS)
async def test_a_model_of_text_refuses_them_by_the_field(path: str) -> None:
    for session in checked(seeing_session(None)):
        app = make_app(session, allow_urls=True)
        app.state.rekindle.fetcher.fetch = lambda *_, **__: pytest.fail("it was fetched")
        for url in (uri(png()), "http://example.org/a.png"):
            done = await post(app, path, body_of(path, url))
            assert done.status == 400 and "reads text alone" in done.error["message"]
            field = FIELDS[path][: FIELDS[path].index("]", 12) + 1] + ".type"
            assert field in done.error["message"] and done.error.get("param", field) == field
        (model,) = (await get(app, "/v1/models")).json()["data"]
        assert model["input_modalities"] == ["text"]
        assert set(model["chat_sampling"]) == {"temperature", "top_p", "top_k", "min_p"}


async def test_models_say_that_they_read_pictures(session: Session) -> None:
    done = await get(make_app(session), "/v1/models")
    assert done.json()["data"][0]["input_modalities"] == ["text", "image"]
    assert session.reads_pictures


@pytest.mark.parametrize("path", FIELDS)
async def test_urls_are_fetched_where_they_are_allowed(path: str, session: Session, pictures: Pictures) -> None:
    data = png(4)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
    async with website({"/a.png": answer}) as site:
        refused = await post(make_app(session), path, body_of(path, site.url("/a.png")))
        assert refused.status == 400 and FIELDS[path] in refused.error["message"]
        assert "--allow-urls" in refused.error["message"] and site.connections == 0
        app = make_app(session, allow_urls=True)
        inside = await post(app, path, body_of(path, f"http://127.0.0.1:{site.port}/a.png"))
        assert inside.status == 400 and FIELDS[path] in inside.error["message"] and site.connections == 0
        app.state.rekindle.fetcher = Fetcher(rules(site))
        done = await post(app, path, body_of(path, site.url("/a.png"), "What?"))
        assert done.status == 200, done.body
        assert pictures.digests == [digest(data)] and pictures.texts == [f"<user>{MARK}What?|<assistant>"]
        missing = await post(app, path, body_of(path, site.url("/a.png", host="none.test")))
        assert missing.status == 400 and "is at no public host" in missing.error["message"]


async def test_what_is_fetched_counts_as_what_is_sent(session: Session) -> None:
    data = png(5, (64, 64))  # 12 KiB of noise
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
    html = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"
    async with website({"/": answer, "/html": html, "/slow": silence}) as site:
        app = make_app(session, allow_urls=True, body_limit=2 * len(data))
        app.state.rekindle.fetcher = Fetcher(rules(site, seconds=0.2))
        one = chat_part(site.url())
        assert (await post(app, "/v1/chat/completions", chat_body(one))).status == 200
        large = await post(app, "/v1/chat/completions", chat_body(one, one, one))
        assert large.status == 413 and large.error["code"] == "body_too_large"
        assert large.error["param"] == "messages[0].content[1].image_url.url"  # with the body itself
        none = await post(app, "/v1/chat/completions", chat_body(chat_part(site.url("/html"))))
        assert none.status == 400 and none.error["param"] == "messages[0].content[0].image_url.url"
        slow = await post(app, "/v1/chat/completions", chat_body(one, chat_part(site.url("/slow"))))
        assert slow.status == 400 and "messages[0].content[1]" in slow.error["param"]
        many = await post(app, "/v1/chat/completions", chat_body(*[one] * (serve_pictures.MOST_URLS + 1)))
        assert many.status == 400 and many.error["param"] == "messages[0].content[16].image_url.url"


async def test_all_fetched_files_are_held_while_the_first_is_read(
    session: Session, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account fell to the first file as soon as it was read, though all were there."""
    data, held = png(5, (64, 64)), list[int]()
    app = make_app(session, allow_urls=True)
    ledger, read = app.state.rekindle.ledger, pictures.read

    def opened(*arguments: Any, **options: Any) -> Any:
        held.append(ledger.held)
        return open_bytes(*arguments, **options)

    def handed_on(*arguments: Any, **options: Any) -> Any:
        held.append(ledger.held)
        return read(*arguments, **options)

    monkeypatch.setattr(serve_pictures, "open_bytes", opened)
    monkeypatch.setattr(pictures, "read", handed_on)
    async with website({"/": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)}) as site:
        app.state.rekindle.fetcher = Fetcher(rules(site))
        done = await post(app, "/v1/chat/completions", chat_body(*[chat_part(site.url())] * 3))
    assert done.status == 200, done.body
    fetched, last = held[:3], held[3]
    assert min(fetched) == max(fetched) > last >= 3 * len(data), held
    assert fetched[0] - last < len(data) and ledger.held == 0


async def test_bounds_on_bodies_and_pictures_are_told_apart(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = png(6, (40, 40))
    app = make_app(session, body_limit=4_000)
    body = await post(app, "/v1/chat/completions", chat_body(chat_part(uri(noise))))
    assert body.status == 413 and body.error["code"] == "body_too_large"
    assert serve_pictures.LIMITS.pixels == 1 << 25
    app = make_app(session)
    done = await post(app, "/v1/chat/completions", chat_body(chat_part(uri(_wide()))))
    assert done.status == 400 and done.error["param"] == "messages[0].content[0].image_url.url"
    assert "8,192 × 4,097 pixels; at most 33,554,432" in done.error["message"]
    limits = serve_pictures.PictureLimits(count=3, total_pixels=3_200)
    monkeypatch.setattr(serve_pictures, "LIMITS", limits)
    both = await post(app, "/v1/chat/completions", chat_body(chat_part(uri(noise)), chat_part(uri(noise)), text("A")))
    assert both.status == 200
    three = await post(app, "/v1/chat/completions", chat_body(*[chat_part(uri(noise))] * 3))
    assert three.status == 400 and three.error["param"] == "messages[0].content[2].image_url.url"
    four = await post(app, "/v1/chat/completions", chat_body(*[chat_part(uri(png()))] * 4))
    assert four.status == 400 and four.error["param"] == "messages[0].content[3].type"


async def test_pictures_are_asked_for_by_their_caller_and_its_salt(session: Session, pictures: Pictures) -> None:
    app = make_app(session, api_key=["one", "two"])
    pictures.here = False
    for key, salt in (("one", "alice"), ("two", None), ("one", None)):
        body = chat_body(chat_part(uri(png())), **({} if salt is None else {"cache_salt": salt}))
        done = await post(app, "/v1/chat/completions", body, headers={"authorization": f"Bearer {key}"})
        assert done.status == 200
    (one, *_), (two, *_), (again, *_) = pictures.asked
    assert one == again != two and "" not in {one, two}, "they take turns"
    assert [salt for _, salt in pictures.asked] == ["alice", None, None]


async def test_scans_of_pictures_count_as_their_pixels_do(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    data = data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 50 + data[-2:]
    assert open_bytes(data).weight == 60 * 32 * 32 // 18
    monkeypatch.setattr(serve_pictures, "LIMITS", serve_pictures.PictureLimits(total_pixels=8_000))
    done = await post(make_app(session), "/v1/chat/completions", chat_body(*[chat_part(uri(data))] * 3))
    assert done.status == 400 and done.error["param"] == "messages[0].content[2].image_url.url"
    assert "makes 10,239 pixels in all" in done.error["message"]


def _wide(height: int = 4_097) -> bytes:
    """A PNG that says it has 8,192 × 4,097 pixels, and has none."""
    data = bytearray(png())
    data[16:24] = (8_192).to_bytes(4, "big") + height.to_bytes(4, "big")
    return bytes(data)


async def test_a_large_picture_does_not_count_as_waiting_text(session: Session) -> None:
    """A picture of 300 kB in base64 is not 75,000 tokens that wait."""
    app = make_app(session, max_queued_tokens=1_000)
    life = app.state.rekindle.life
    life.queued_tokens += 10  # others wait
    try:
        done = await post(app, "/v1/chat/completions", chat_body(chat_part(uri(png(7, (320, 320))))))
        assert done.status == 200, done.body
        words = await post(app, "/v1/chat/completions", chat_body(text("word " * 1_000)))
        assert words.status == 429
    finally:
        life.queued_tokens -= 10


async def test_a_small_picture_counts_as_its_rows_while_it_waits(session: Session, pictures: Pictures) -> None:
    """A pixel may be 256 rows of an encoder: a queue of such requests held 84 MB each, and counted as no tokens."""
    app = make_app(session, max_queued_tokens=1_000)
    life = app.state.rekindle.life
    parts = [chat_part(uri(png(seed, (1, 1)))) for seed in range(8)]
    life.queued_tokens += 10  # others wait
    try:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            pictures.row_bytes = 3 * 4_096
            done = await post(app, path, body_of(path, uri(png(1, (1, 1)))))
            assert done.status == 200, done.body
            pictures.row_bytes = 1_000 * 4_096
            done = await post(app, path, body_of(path, uri(png(1, (1, 1)))))
            assert done.status == 429 and "1,000 may" in done.body.decode(), path
        pictures.row_bytes = 126 * 4_096
        assert (await post(app, "/v1/chat/completions", chat_body(*parts))).status == 429
        assert (await post(app, "/v1/chat/completions", chat_body(*parts[1:]))).status == 200
    finally:
        life.queued_tokens -= 10
    pictures.row_bytes = 1 << 40  # a request that waits for no other is let in
    assert (await post(app, "/v1/chat/completions", chat_body(*parts))).status == 200


async def test_tokens_of_pictures_are_counted_by_their_headers(session: Session, pictures: Pictures) -> None:
    """A file without its pixels is enough: nothing is decoded, and nothing encoded."""
    app, header = make_app(session, allow_urls=True), _wide(4_096)
    pictures.decodes = False
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        parts = [body_of("/v1/messages" if "count" in path else "/v1/chat/completions", uri(header), "What?")]
        messages = parts[0]["messages"]
        messages[0]["content"].append(messages[0]["content"][0])
        done = await post(app, path, {"messages": messages})
        assert done.status == 200, done.body
        rendered = f"<user>{MARK}What?{MARK}|<assistant>"
        count = done.json()["input_tokens" if "count" in path else "count"]
        assert count == len(rendered) + 2 * 2, "three tokens in each place"
        if "count" not in path:
            expected = rendered.replace(MARK, MARK * 3).encode()
            assert done.json()["tokens"] == [*expected]
        wrong = body_of("/v1/messages" if "count" in path else "/v1/chat/completions", uri(_wide()))
        refused = await post(app, path, {"messages": wrong["messages"]})
        assert refused.status == 400 and "pixels; at most" in refused.error["message"]
    async with website({"/a.png": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(header), header)}) as site:
        app.state.rekindle.fetcher = Fetcher(rules(site))
        for path, form in (("/tokenize", "/v1/chat/completions"), ("/v1/messages/count_tokens", "/v1/messages")):
            done = await post(app, path, {"messages": body_of(form, site.url("/a.png"))["messages"]})
            assert done.status == 200, done.body
    special = {"messages": user(chat_part(uri(header))), "add_special_tokens": True}
    assert (await post(app, "/tokenize", special)).error["param"] == "add_special_tokens"
    for text_session in checked(seeing_session(None)):
        done = await post(make_app(text_session), "/tokenize", {"messages": user(chat_part(uri(header)))})
        assert done.status == 400 and "messages[0].content[0].type" in done.error["message"]


SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
HOSTILE: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"type": "image_url"}),
    ("/v1/chat/completions", {"type": "image_url", "image_url": None}),
    ("/v1/chat/completions", {"type": "image_url", "image_url": 1}),
    ("/v1/chat/completions", {"type": "image_url", "image_url": []}),
    ("/v1/chat/completions", {"type": "image_url", "image_url": {}}),
    ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": {"url": "x"}}}),
    ("/v1/chat/completions", chat_part("/etc/passwd")),
    ("/v1/chat/completions", chat_part("file:///etc/passwd")),
    ("/v1/chat/completions", chat_part("")),
    ("/v1/chat/completions", chat_part(uri(png()), detail="enormous")),
    ("/v1/chat/completions", chat_part(uri(png()), detail=["low"])),
    ("/v1/chat/completions", chat_part("data:image/png;base64,")),
    ("/v1/chat/completions", chat_part("data:image/png;base64,????")),
    ("/v1/chat/completions", chat_part("data:image/png,abc")),
    ("/v1/chat/completions", chat_part("data:text/html;base64,AAAA")),
    ("/v1/chat/completions", chat_part(uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"))),
    ("/v1/chat/completions", chat_part(uri(png()[:40]))),
    ("/v1/chat/completions", chat_part("data:image/png;base64," + "A" * 400)),
    ("/v1/responses", {"type": "input_image", "file_id": "file-1"}),
    ("/v1/responses", {"type": "input_image", "image_url": "C:\\a.png"}),
    ("/v1/messages", {"type": "image"}),
    ("/v1/messages", {"type": "image", "source": {"type": "base64", "data": "AAAA"}}),
    ("/v1/messages", {"type": "image", "source": {"type": "file", "file_id": "f"}}),
    ("/v1/messages", {"type": "image", "source": {"type": "url"}}),
    ("/v1/messages", {"type": "image", "source": {**SOURCE, "media_type": "text/html;base64,AAAA"}}),
    ("/v1/messages", {"type": "image", "source": {**SOURCE, "data": SOURCE["data"] + "="}}),
]


@pytest.mark.parametrize("allow_urls", [False, True])
async def test_parts_that_are_no_picture_are_refused_by_name(session: Session, allow_urls: bool) -> None:
    app = make_app(session, allow_urls=allow_urls)
    for path, part in HOSTILE:
        key, limit = ("input", "max_output_tokens") if path == "/v1/responses" else ("messages", "max_tokens")
        words = {"type": "input_text" if key == "input" else "text", "text": "A"}
        done = await post(app, path, {key: user(words, part), limit: 2})
        assert done.status == 400, (part, done.body)
        assert f"{key}[0].content[1]" in done.error["message"], (part, done.error)
    assert (await post(app, "/v1/chat/completions", chat_body(chat_part(uri(png()))))).status == 200


async def test_a_file_that_breaks_while_it_is_decoded_fails_its_request_alone(session: Session) -> None:
    broken = bytearray(png(8, (40, 40)))
    broken[60:200] = bytes(140)
    app = make_app(session)
    done = await post(app, "/v1/chat/completions", chat_body(chat_part(uri(bytes(broken)))))
    assert done.status == 400 and "can't be decoded" in done.error["message"] and "0x" not in json.dumps(done.json())
    assert (await post(app, "/v1/chat/completions", chat_body(chat_part(uri(png()))))).status == 200


async def test_the_assistant_has_no_pictures(session: Session) -> None:
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": [text("B"), chat_part(uri(png()))]}]
    body = {"messages": messages, "max_tokens": 2, "continue_final_message": True, "echo": True}
    done = await post(make_app(session), "/v1/chat/completions", body)
    assert done.status == 400 and "messages[1].content[1].type" in done.error["message"]
