"""The embedded model over a real socket: what OpenAI's and Anthropic's own clients read of it is what a cell gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest

import rekindle
from helpers.small import TINY

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
pytestmark = pytest.mark.usefixtures("large_steps")
MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[rekindle.Session, rekindle.Server]]:
    with rekindle.open_sync("tiny", **TINY) as session:
        server = session.serve().result_sync()
        yield session, server
        server.close()


@pytest.fixture(scope="module")
def openai() -> Any:
    return pytest.importorskip("openai", reason="needs OpenAI's client")


@pytest.fixture
def client(served: Any, openai: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=served[1].url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_streams_and_scores_as_in_process(served: Any, client: Any) -> None:
    own = served[0].chat(MESSAGES, max_tokens=12, temperature=0, logprobs=2).result_sync()
    common: Any = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**common, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == own.text
    entries = whole.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx([one.logprob for one in own.logprobs], abs=1e-4)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == own.text
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
    with client.chat.completions.create(**common, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == own.text
    assert whole.usage.prompt_tokens == own.usage.prompt_tokens
    several = client.chat.completions.create(**{**common, "temperature": 1}, n=3, seed=7)
    texts = [done.text for done in served[0].chat(MESSAGES, max_tokens=12, temperature=1, n=3, seed=7).result_sync()]
    assert [choice.message.content for choice in several.choices] == texts


def test_a_prompts_log_likelihood_is_that_of_the_session(served: Any, client: Any) -> None:
    """What lm-eval asks for: no token is made, and each of the prompt's has its probability."""
    prompt = "Once upon a time there was a little girl."
    own = served[0].generate_sync(prompt, max_tokens=0, prompt_logprobs=1)
    assert own.text == "" and own.finish_reason == "length" and own.usage.completion_tokens == 0
    done = client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    scores = done.choices[0].logprobs
    assert done.choices[0].text == prompt and "".join(scores.tokens) == prompt
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx([one.logprob for one in own.prompt_logprobs], abs=1e-4)
    assert len(own.prompt_logprobs) == len(own.prompt_token_ids) - 1


def test_cells_and_clients_share_the_prefix_cache(served: Any, client: Any) -> None:
    prompt = "Anna had a red ball and a blue ball, and she liked the red one best of all. " * 6
    served[0].generate_sync(prompt, max_tokens=1)
    done = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0)
    assert done.usage.prompt_tokens_details.cached_tokens >= 64


def test_structured_answers(client: Any, openai: Any) -> None:
    pytest.importorskip("llguidance", reason="structured output is the extra `structured`")
    pydantic = pytest.importorskip("pydantic", reason="OpenAI's client brings it")
    fields: Any = {"likes_balls": (bool, ...), "colour": (Literal["red", "blue"], ...)}
    child = pydantic.create_model("Child", **fields)
    common: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 60}
    parsed = client.chat.completions.parse(**common, response_format=child).choices[0]
    assert parsed.message.parsed.colour in ("red", "blue") and parsed.finish_reason == "stop"
    chosen = client.completions.create(
        model="tiny", prompt="Tom", temperature=0, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].text in ("yes", "no")
    format: Any = {"format": {"type": "json_schema", "name": "c", "strict": True, "schema": child.model_json_schema()}}
    done = client.responses.create(model="tiny", input="Hi", text=format, temperature=0, max_output_tokens=60)
    child.model_validate_json(done.output_text)
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}, "strict": True}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**common, response_format=wrong)
    assert refused.value.param.startswith("response_format")


def test_responses(served: Any, client: Any) -> None:
    own = served[0].chat(MESSAGES, max_tokens=30, temperature=0).result_sync()
    done = client.responses.create(model="tiny", input="Who are you?", temperature=0, max_output_tokens=30)
    assert done.output_text == own.text
    with client.responses.stream(model="tiny", input="Who are you?", temperature=0, max_output_tokens=30) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == own.text


@pytest.mark.thorough
def test_anthropics_client(served: Any) -> None:
    anthropic = pytest.importorskip("anthropic", reason="needs Anthropic's client")
    own = served[0].chat(MESSAGES, max_tokens=30, temperature=0).result_sync()
    with anthropic.Anthropic(base_url=served[1].url, api_key="none", max_retries=0) as client:
        greedy = {"temperature": 0}  # newer versions of the client no longer know it
        common: Any = {"model": "tiny", "max_tokens": 30, "messages": MESSAGES, "extra_body": greedy}
        done = client.messages.create(**common)
        assert done.content[0].text == own.text
        assert done.stop_reason == ("end_turn" if own.finish_reason == "eos" else "max_tokens")
        with client.messages.stream(**common) as stream:
            assert "".join(stream.text_stream) == own.text
            assert stream.get_final_message().usage.output_tokens == own.usage.completion_tokens
        counted = client.messages.count_tokens(model="tiny", messages=MESSAGES)
        assert counted.input_tokens == own.usage.prompt_tokens
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(**{**common, "extra_body": {"temperature": -3}})
