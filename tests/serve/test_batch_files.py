"""`rekindle run-batch`: OpenAI's batch format, errors by line, and a file that survives a kill; over fakes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from helpers.sessions import CONFIG, byte_tokenizer, eventually, expected, parts, wait_until_idle
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.cli import main as cli
from rekindle._src.serve.batch import BatchRun
from rekindle._src.text.chat import ChatTemplate
from rekindle.errors import InvalidRequest

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def made(**runner: Any) -> Session:
    scheduler, fake = parts(CONFIG, **runner)
    return Session(scheduler, fake, byte_tokenizer(), CONFIG, model="fake", chat=ChatTemplate(TEMPLATE))


@pytest.fixture
def session() -> Iterator[Session]:
    with made() as session:
        yield session
        wait_until_idle(session)


def line(number: int, url: str = "/v1/completions", method: str = "POST", **body: Any) -> dict[str, Any]:
    body = {"prompt": f"number {number}", "max_tokens": 6, "temperature": 0, **body}
    return {"custom_id": f"line {number}", "method": method, "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def read(path: Path) -> dict[str, Any]:
    found = [json.loads(one) for one in path.read_text().splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def text(prompt: str, count: int = 6) -> str:
    return bytes(expected(prompt, max_tokens=count)).decode()


@pytest.mark.anyio
async def test_every_line_gets_its_response(session: Session, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
    lines = [line(number) for number in range(60)]
    lines.append({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    lines.append({"custom_id": "embed", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["ab", "cd"]}})
    batch = BatchRun(session, write(tmp_path / "in", lines), tmp_path / "out")
    await batch.run()
    assert (batch.total, batch.answered, batch.failed, batch.resumed) == (62, 62, 0, 0)
    assert batch.tokens == 61 * 6
    found = read(tmp_path / "out")
    assert list(found["line 0"]) == ["id", "custom_id", "response", "error"]
    for number in range(60):
        response = found[f"line {number}"]["response"]
        assert response["status_code"] == 200 and response["request_id"]
        assert response["body"]["choices"][0]["text"] == text(f"number {number}")
        assert response["body"]["object"] == "text_completion"
    answer = found["chat"]["response"]["body"]["choices"][0]
    assert answer["message"]["content"] == text("<user>hi")
    vectors = await session.embed(["ab", "cd"])
    data = found["embed"]["response"]["body"]["data"]
    np.testing.assert_allclose([one["embedding"] for one in data], vectors, rtol=1e-6)


@pytest.mark.anyio
async def test_embeddings_have_the_shapes_that_clients_ask_for(session: Session, tmp_path: Path) -> None:
    def ask(number: int, **body: Any) -> dict[str, Any]:
        return {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}

    many = [f"text {number}" for number in range(300)]
    bodies: list[dict[str, Any]] = [
        {"input": "ab", "encoding_format": "base64", "normalize": False},
        {"input": [97, 98], "pooling": "last", "normalize": False, "model": "fake"},
        {"input": [[97, 98], [99]], "dimensions": 1},
        {"input": many, "user": "me"},
        {"input": ["x", ""]},
        {"input": "x", "model": "other"},
        {"input": []},
        {"input": "x", "dimensions": 0},
        {"input": "x", "encoding_format": "hex"},
    ]
    await BatchRun(
        session, write(tmp_path / "in", [ask(n, **body) for n, body in enumerate(bodies)]), tmp_path / "out"
    ).run()
    found = [read(tmp_path / "out")[str(number)]["response"] for number in range(len(bodies))]
    data = found[0]["body"]["data"]
    decoded = np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4")
    np.testing.assert_array_equal(decoded, await session.embed("ab", normalize=False))
    last = await session.embed("ab", normalize=False, pooling="last")
    np.testing.assert_array_equal(np.float32(found[1]["body"]["data"][0]["embedding"]), last)
    assert [len(one["embedding"]) for one in found[2]["body"]["data"]] == [1, 1]
    assert found[2]["body"]["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [one["index"] for one in found[3]["body"]["data"]] == list(range(300))
    np.testing.assert_allclose(
        [one["embedding"] for one in found[3]["body"]["data"]], await session.embed(many), rtol=1e-6
    )
    assert [one["status_code"] for one in found[4:]] == [400, 404, 400, 400, 400]
    params = [one["body"]["error"]["param"] for one in found[4:]]
    assert params == ["input", "model", "input", "dimensions", "encoding_format"]


@pytest.mark.anyio
async def test_errors_stand_on_their_lines(session: Session, tmp_path: Path) -> None:
    lines = [
        line(0),
        "no json",
        [1],
        {"method": "POST", "url": "/v1/completions", "body": {}},
        line(4, method="GET"),
        line(5, url="/v1/images"),
        line(6, stream=True),
        line(7, temperature=-1),
        line(8, model="other"),
        "",
        line(0),
        {"custom_id": "last", "method": "POST", "url": "/v1/completions", "body": 3},
    ]
    batch = BatchRun(session, write(tmp_path / "in", lines), tmp_path / "out")
    await batch.run()
    assert batch.total == batch.answered == 11 and batch.failed == 10
    found = [json.loads(one) for one in (tmp_path / "out").read_text().splitlines()]
    by_id = {one["custom_id"]: one for one in found if one["response"] is not None}
    statuses = {name: one["response"]["status_code"] for name, one in by_id.items()}
    assert statuses == {"line 0": 200, "line 7": 400, "line 8": 404, "last": 400}
    assert by_id["line 7"]["response"]["body"]["error"]["param"] == "temperature"
    said = [one["error"]["message"] for one in found if one["error"] is not None]
    words = ("can't be read as JSON", "not a JSON object", "custom_id is missing", "Use one of POST", "Use one of /v1/",
             "stream is not possible", "names an earlier line")  # fmt: skip
    assert len(said) == len(words) and all(any(word in one for one in said) for word in words), said
    # They would fail again: nothing is done twice.
    again = BatchRun(session, tmp_path / "in", tmp_path / "out")
    await again.run()
    assert (again.answered, again.resumed) == (0, 11)


DEEP, NESTED = "[" * 200_000, "[" * 900 + "]" * 900
WRONG: dict[str, tuple[str | bytes, str | None]] = {  # a line, and the custom_id that its error has
    "url of another kind": (json.dumps({**line(1), "url": ["/v1/completions"]}), "line 1"),
    "url that can be hashed": (json.dumps({**line(1), "url": 1}), "line 1"),
    "method of another kind": (json.dumps({**line(1), "method": {"POST": 1}}), "line 1"),
    "custom_id of another kind": (json.dumps({**line(1), "custom_id": ["a"]}), None),
    "empty custom_id": (json.dumps({**line(1), "custom_id": ""}), None),
    "long custom_id": (json.dumps({**line(1), "custom_id": "x" * 2000}), None),
    "no body": (json.dumps({**line(1), "body": None}), "line 1"),
    "no JSON": ("no json", None),
    "half of an object": ('{"custom_id": "line 1", "method":', None),
    "no object": ("[[1], 2]", None),
    "null": ("null", None),
    "deep": (DEEP, None),
    "deep within": ('{"custom_id": "line 1", "body": ' + DEEP, None),
    "as deep as the parser goes": (json.dumps(line(1, temperature=None)).replace("null", NESTED), "line 1"),
    "deep url": (json.dumps({**line(1), "url": None}).replace("null", NESTED), "line 1"),
    "half a surrogate pair": (json.dumps(line(1)).replace("number 1", "\\ud800"), "line 1"),
    "half a surrogate pair in the name": (json.dumps(line(1)).replace("line 1", "\\ud800"), None),
    "no UTF-8": (b'{"custom_id": "\xff\xfe"}', None),
    "NaN": (json.dumps(line(1, temperature=float("nan"))), None),
    "infinity": (json.dumps(line(1)).replace('"temperature": 0', '"temperature": 1e999'), None),
    "a number of 5,000 digits": (json.dumps(line(1)).replace('"temperature": 0', f'"temperature": {"1" * 5000}'), None),
    "zeros": (b"\0" * 100, None),
    "too long": (json.dumps(line(1, prompt="x" * 70_000)), None),
    "too many values": (json.dumps(line(1, prompt=[1] * 10)).replace("[1,", "[" + "1," * 200_000), None),
}  # fmt: skip


@pytest.mark.usefixtures("short_turns")
@pytest.mark.anyio
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
async def test_a_line_fails_alone_whatever_it_has(
    session: Session, tmp_path: Path, wrong: tuple[str | bytes, str | None]
) -> None:
    """The lines around it are answered, the last one without a line break at its end."""
    data, custom_id = wrong
    data = data if isinstance(data, bytes) else data.encode()
    first, last = (json.dumps(line(number)).encode() for number in (0, 2))
    (tmp_path / "in").write_bytes(first + b"\n" + data + b"\r\n\n" + last)
    batch = BatchRun(session, tmp_path / "in", tmp_path / "out")
    batch._service.body_limit = 64 << 10 if b"x" * 70_000 in data else 1 << 20
    await batch.run()
    assert (batch.total, batch.answered, batch.failed) == (3, 3, 1)
    found = [json.loads(one) for one in (tmp_path / "out").read_text().splitlines()]
    (failed,) = [one for one in found if one["custom_id"] not in ("line 0", "line 2")]
    right = [one["response"]["body"]["choices"][0]["text"] for one in found if one is not failed]
    assert sorted(right) == sorted([text("number 0"), text("number 2")])
    assert failed["custom_id"] == custom_id
    error = failed["error"] or failed["response"]["body"]["error"]
    assert len(error["message"]) < 400
    again = BatchRun(session, tmp_path / "in", tmp_path / "out")
    again._service.body_limit = batch._service.body_limit
    await again.run()
    assert (again.answered, again.resumed) == (0, 3)


@pytest.mark.anyio
async def test_a_defect_of_the_server_s_own_is_one_line_s_failure(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = BatchRun._call

    async def failing(self: BatchRun, task: Any) -> Any:
        if task.custom_id == "line 1":
            raise KeyError("a defect")
        return await call(self, task)

    monkeypatch.setattr(BatchRun, "_call", failing)
    batch = BatchRun(session, write(tmp_path / "in", [line(number) for number in range(3)]), tmp_path / "out")
    await batch.run()
    statuses = {name: one["response"]["status_code"] for name, one in read(tmp_path / "out").items()}
    assert statuses == {"line 0": 200, "line 1": 500, "line 2": 200}
    monkeypatch.undo()
    again = BatchRun(session, tmp_path / "in", tmp_path / "out")
    await again.run()
    assert (again.answered, again.failed) == (1, 0), "the server's failures are tried again"


@pytest.mark.anyio
async def test_a_batch_resumes_after_a_cut_and_retries_the_servers_failures(tmp_path: Path) -> None:
    source, out, failing = write(tmp_path / "in", [line(n) for n in range(30)]), tmp_path / "out", [ValueError("no")]
    with made(fail=lambda plan: failing.pop() if failing else None) as session:
        batch = BatchRun(session, source, out)
        await batch.run()
        assert 0 < batch.failed < 30
        whole = out.read_bytes().splitlines(keepends=True)
        right = [one for one in whole if b'"status_code": 200' in one]
        out.write_bytes(b"".join(right[:5]) + right[5][:40])
        again = BatchRun(session, source, out)
        await again.run()
        assert (again.resumed, again.answered, again.failed) == (5, 25, 0)
        assert {name: one["response"]["body"]["choices"][0]["text"] for name, one in read(out).items()} == {
            f"line {number}": text(f"number {number}") for number in range(30)
        }
        # Another line in its place, or another model: answered anew.
        write(source, [line(0, max_tokens=3), *(line(n) for n in range(1, 30))])
        third = BatchRun(session, source, out)
        await third.run()
        assert (third.resumed, third.answered) == (29, 1)
        # What is no status of an answer is one of a failure.
        out.write_bytes(out.read_bytes().replace(b'"status_code": 200', b'"status_code": "200"'))
        fourth = BatchRun(session, source, out)
        await fourth.run()
        assert (fourth.resumed, fourth.answered) == (0, 30)


@pytest.mark.anyio
async def test_lines_of_many_sequences_wait_for_their_places(session: Session, tmp_path: Path) -> None:
    """Three of them don't fit into the queue at once."""
    lines = [line(number, n=120, max_tokens=2, temperature=1) for number in range(6)]
    batch = BatchRun(session, write(tmp_path / "in", lines), tmp_path / "out")
    await batch.run()
    assert batch.failed == 0
    assert all(len(one["response"]["body"]["choices"]) == 120 for one in read(tmp_path / "out").values())


@pytest.mark.anyio
async def test_cancelling_leaves_whole_lines_and_no_request(tmp_path: Path) -> None:
    with made(step_seconds=0.01) as session:
        source = write(tmp_path / "in", [line(number) for number in range(200)])
        first = BatchRun(session, source, tmp_path / "out")
        async with anyio.create_task_group() as group:
            group.start_soon(first.run)
            await anyio.to_thread.run_sync(eventually, lambda: first.answered > 0)
            group.cancel_scope.cancel()
        wait_until_idle(session)
        some = len(read(tmp_path / "out"))
        assert 0 < some < 200
        batch = BatchRun(session, source, tmp_path / "out")
        await batch.run()
        assert (batch.resumed, batch.answered) == (some, 200 - some)
        assert batch.look().line.startswith("200 of 200 lines, ")


@pytest.mark.anyio
async def test_files_that_cannot_be_used_are_left_alone(session: Session, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be read"):
        await BatchRun(session, tmp_path / "none", tmp_path / "out").run()
    source = write(tmp_path / "in", [line(0)])
    before = source.read_bytes()
    with pytest.raises(InvalidRequest, match="line 1 is not one that rekindle run-batch wrote"):
        await BatchRun(session, source, source).run()
    assert source.read_bytes() == before
    with pytest.raises(InvalidRequest, match="can't be written"):
        await BatchRun(session, source, tmp_path / "in" / "out").run()


@pytest.mark.slow
def test_the_command_goes_on_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "seed": n}}
        for n in range(400)
    ]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = ["run-batch", str(source), str(out), "--max-model-len", "256", "--max-requests", "2"]
    process = subprocess.Popen([sys.executable, "-m", "rekindle", *arguments], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 200
        while not out.exists() or out.stat().st_size < 4_000:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    whole = out.read_bytes().count(b"\n")
    write(source, lines[: whole + 4])
    assert cli.main(arguments) == 0
    assert f"{whole:,} were answered before" in capsys.readouterr().out
    assert {one["response"]["status_code"] for one in read(out).values()} == {200}
    assert len(read(out)) == whole + 4
