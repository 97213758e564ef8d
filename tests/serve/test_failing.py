"""Steps that fail, before and amid a stream: an error object of the API, and the server goes on."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.asgi import post
from helpers.sessions import change_front
from rekindle._src.core.records import StepPlan
from rekindle.serve import app
from serve.conftest import chatting_session, checked

pytestmark = pytest.mark.anyio
BODY: Any = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("generated", [0, 3])
async def test_a_failing_step_is_told_to_its_client_and_ends_nothing_else(streamed: bool, generated: int) -> None:
    failed: list[int] = []

    def fail(plan: StepPlan) -> BaseException | None:
        if not failed and any(row.generated == generated and row.samples for row in plan.rows):
            failed.append(plan.step)
            return RuntimeError("a secret of the device")
        return None

    for session in checked(chatting_session(fail=fail)):
        served = app(session)
        answer = await post(served, "/v1/completions", {**BODY, "stream": streamed})
        if streamed and generated:
            assert answer.status == 200
            *_, error, done = answer.events
            assert error["error"]["type"] == "server_error" and done == "[DONE]"
        else:
            assert answer.status == 500 and answer.error["type"] == "server_error"
        assert (await post(served, "/v1/completions", BODY)).status == 200


async def test_a_base_model_names_what_serves_it_and_no_folder_of_the_server() -> None:
    session = chatting_session()
    change_front(session, chat=None, model="/home/somebody/models/gemma.gguf")
    for one in checked(session):
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        answer = await post(app(one), "/v1/chat/completions", body)
        assert answer.status == 400
        message = answer.error["message"]
        assert "model='gemma.gguf': has no chat template" in message and "/v1/completions" in message
        assert "somebody" not in message and "session" not in message
