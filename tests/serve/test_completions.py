"""/v1/completions as OpenAI and vLLM define it, over fakes whose tokens are bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.asgi import Answer, post
from helpers.sessions import expected
from rekindle import Session

pytestmark = pytest.mark.anyio


async def complete(app: Any, **body: Any) -> Any:
    answer = await post(app, "/v1/completions", {"temperature": 0, **body})
    assert answer.status == 200, answer.body
    return answer.json()


async def stream(app: Any, **body: Any) -> list[Any]:
    answer = await post(app, "/v1/completions", {"temperature": 0, "stream": True, **body})
    assert answer.status == 200 and answer.complete, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.events[-1] == "[DONE]"
    return answer.events[:-1]


def text(prompt: str | list[int], count: int, **options: Any) -> str:
    return bytes(expected(prompt, max_tokens=count, **options)).decode()


async def test_the_text_is_that_of_the_session_with_sixteen_tokens_by_default(app: Any, session: Session) -> None:
    done = await complete(app, prompt="Hello")
    assert done["object"] == "text_completion" and done["id"].startswith("cmpl-") and done["model"] == "fake"
    assert done["choices"] == [
        {"index": 0, "text": text("Hello", 16), "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    usage = done["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 16, 21)
    again = await complete(app, prompt="Hello, this is a longer prompt")
    again = await complete(app, prompt="Hello, this is a longer prompt")
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 24}


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"], [97, 98], [[97, 98], [99, 100]], ["ab", [99, 100]]], ids=str)
async def test_every_form_of_prompts(app: Any, prompt: Any) -> None:
    done = await complete(app, prompt=prompt, max_tokens=4)
    wanted = [text("ab", 4), text("cd", 4)][: len(done["choices"])]
    assert [choice["text"] for choice in done["choices"]] == wanted
    assert [choice["index"] for choice in done["choices"]] == list(range(len(wanted)))
    assert done["usage"]["prompt_tokens"] == 2 * len(wanted)


async def test_choices_of_several_prompts_with_n_are_numbered_through(app: Any) -> None:
    body: Any = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3, "temperature": 1, "seed": 5, "best_of": 2}
    done = await complete(app, **body)
    assert [choice["index"] for choice in done["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in done["choices"]}) == 4
    assert done["usage"]["prompt_tokens"] == 4 and done["usage"]["completion_tokens"] == 12
    chunks = await stream(app, **body)
    joined = dict.fromkeys(range(4), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice["text"]
    assert [joined[choice["index"]] for choice in done["choices"]] == [choice["text"] for choice in done["choices"]]


async def test_a_stream_has_the_same_text_and_its_usage_only_if_asked_for(app: Any) -> None:
    chunks = await stream(app, prompt="Hello", max_tokens=9)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text("Hello", 9)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert all("usage" not in chunk for chunk in chunks)
    *chunks, last = await stream(app, prompt="Hello", max_tokens=3, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await stream(app, prompt="Hello", max_tokens=3, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}


@pytest.mark.parametrize("streamed", [False, True])
async def test_offsets_count_characters_although_tokens_split_them(app: Any, streamed: bool) -> None:
    body: Any = {"prompt": "aé€b", "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = (await stream(app, **body))[0]["choices"][0] if streamed else (await complete(app, **body))["choices"][0]
    assert choice["text"] == "aé€b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3], "each where its character begins"


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_with_logprobs_scores_the_prompt_without_making_a_token(app: Any, streamed: bool) -> None:
    """What lm-eval's `local-completions` sends."""
    body: Any = {"prompt": "Hey", "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = (await stream(app, **body))[0]["choices"][0] if streamed else (await complete(app, **body))["choices"][0]
    assert choice["text"] == "Hey" and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "y"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0]
    assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][1]["e"] == -1.0
    body["max_tokens"] = 2
    if streamed:
        chunks = await stream(app, **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hey" + text("Hey", 2)
        assert [at for chunk in chunks for at in chunk["choices"][0]["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]
    else:
        choice = (await complete(app, **body))["choices"][0]
        assert choice["text"] == "Hey" + text("Hey", 2) and len(choice["logprobs"]["tokens"]) == 5


async def test_a_prompt_that_fills_the_context_can_be_scored(app: Any, session: Session) -> None:
    prompt = [97] * 512
    choice = (await complete(app, prompt=prompt, echo=True, logprobs=1, max_tokens=0))["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 512
    refused = await post(app, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
    assert refused.error["param"] == "prompt"


async def test_where_it_stopped_and_what_is_left_of_it(app: Any) -> None:
    whole = text("Hello", 16)
    done = await complete(app, prompt="Hello", stop=[whole[5:7], "\x00"])
    assert done["choices"][0]["text"] == whole[:5]
    assert (done["choices"][0]["finish_reason"], done["choices"][0]["stop_reason"]) == ("stop", whole[5:7])
    done = await complete(app, prompt="Hello", stop=whole[5:7], include_stop_str_in_output=True)
    assert done["choices"][0]["text"] == whole[:7]
    ids = whole.encode()
    done = await complete(app, prompt="Hello", stop_token_ids=[ids[4]])
    assert done["choices"][0]["stop_reason"] == ids[4] and done["choices"][0]["text"] == whole[: ids.index(ids[4])]
    chunks = await stream(app, prompt="Hello", stop=whole[5:7])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[:5]
    assert chunks[-1]["choices"][0]["stop_reason"] == whole[5:7]


async def test_fewer_tokens_than_may_come_are_refused(app: Any) -> None:
    """Nothing is accepted and then not applied: 16 tokens at most is the default."""
    refused = await post(app, "/v1/completions", {"prompt": "x", "min_tokens": 20})
    assert refused.status == 400 and refused.error["param"] == "min_tokens"


async def test_token_ids_and_tokens_named_by_their_ids(app: Any) -> None:
    done = await complete(
        app, prompt="Hey", max_tokens=2, return_token_ids=True, logprobs=0, return_tokens_as_token_ids=True
    )
    choice, ids = done["choices"][0], expected("Hey", max_tokens=2)
    assert choice["token_ids"] == ids and choice["prompt_token_ids"] == [72, 101, 121]
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in ids]
    chunks = await stream(app, prompt="Hey", max_tokens=2, return_token_ids=True)
    assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == ids
    assert [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks] == [[72, 101, 121], None]


async def test_prompt_logprobs_as_vllm_has_them(app: Any) -> None:
    done = await complete(app, prompt="Hey", max_tokens=1, prompt_logprobs=1)
    first, second, _ = done["choices"][0]["prompt_logprobs"]
    assert first is None and second["101"] == {"logprob": -1.0, "rank": None, "decoded_token": "e"}


async def test_seeds_may_be_negative_and_are_taken_modulo(app: Any) -> None:
    body: Any = {"prompt": "x", "temperature": 1, "max_tokens": 12}
    texts = [(await complete(app, **body, seed=seed))["choices"][0]["text"] for seed in (-1, 2**63 - 1, 7, 2**63 + 7)]
    assert texts[0] == texts[1] != texts[2] == texts[3]


async def test_absent_temperature_is_one_and_what_the_user_of_open_said(app: Any, session: Session) -> None:
    done = {(await post(app, "/v1/completions", {"prompt": "x"})).json()["choices"][0]["text"] for _ in range(4)}
    assert len(done) > 1


async def test_nothing_of_json_that_is_legal_breaks_it(app: Any) -> None:
    bodies: list[bytes] = [
        b"[]", b"1", b"", b"{", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}',
        b"[" * 100_000, b'{"max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": 1e30}', b'{"prompt": "x", "top_k": 99999999999999999999}',
        b'{"prompt": ["x", 1]}', b'{"prompt": [[]]}', b'{"prompt": []}', b'{"prompt": [4294967296]}',
        b'{"prompt": "x", "logit_bias": {"\xc2\xb2": 1}}', b'{"prompt": "x", "stop": [""]}', b'{"prompt": ""}',
        b'{"prompt": "x", "min_p": -0.0, "top_p": 0}', b'{"prompt": "x", "request_id": "\xc3\xa9"}',
    ]  # fmt: skip
    for raw in bodies:
        answer: Answer = await post(app, "/v1/completions", raw=raw)
        assert answer.status == 400, (raw[:60], answer.body)
        assert set(answer.error) == {"message", "type", "param", "code"}, json.dumps(answer.error)


async def test_tokens_and_words_that_may_not_come(app: Any) -> None:
    body = {"prompt": "Hello", "max_tokens": 30, "temperature": 0}
    allowed = await post(app, "/v1/completions", {**body, "allowed_token_ids": [97, 98]})
    text = allowed.json()["choices"][0]["text"]
    assert set(text) == {"a", "b"} and "ab" in text
    barred = await post(app, "/v1/completions", {**body, "allowed_token_ids": [97, 98], "bad_words": ["ab"]})
    text = barred.json()["choices"][0]["text"]
    assert len(text) == 30 and "ab" not in text
    for wrong, param in (
        ({"allowed_token_ids": [5_000]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": "no"}, "bad_words"),
    ):
        answer = await post(app, "/v1/completions", {**body, **wrong})
        assert answer.status == 400 and answer.error["param"] == param
    alone = await post(app, "/v1/completions", {**body, "allowed_token_ids": [97], "bad_words": ["a"]})
    assert (alone.status, alone.error["code"]) == (400, "no_token_left"), "no server's fault, and not to be tried again"


@pytest.mark.anyio
async def test_a_prompt_without_tokens_is_refused(app: Any) -> None:
    for body in ({"prompt": ""}, {"prompt": "", "add_special_tokens": False}):
        answer = await post(app, "/v1/completions", body)
        assert answer.status == 400, body
        assert "has no tokens" in answer.json()["error"]["message"]
