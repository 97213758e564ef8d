"""Sessions as models of inspect_ai: its own evaluation runs, and a chat has the session's own answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle import Session

inspect_ai = pytest.importorskip("inspect_ai", reason="the extra `inspect`")
import rekindle.inspect_ai  # noqa: E402  the package's entry point, which a tree that was installed before may not have

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("shared_programs", "large_steps"),
]
QUESTIONS = [("What is 3 + 4?", "7"), ("What is 12 + 5?", "17"), ("What is 9 - 5?", "4"), ("Who are you?", "Robert")]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    options: dict[str, Any] = {"max_requests": 4, "max_model_len": 256, "precompile": "lazy", "quiet": True}
    with rekindle.open_sync("tiny", dtype="float32", disk_memory=0, generation_config="greedy", **options) as made:
        yield made


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # what inspect runs on by default
async def test_a_chat_has_the_sessions_answer(session: Session) -> None:
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model

    model = get_model("rekindle/tiny", session=session, memoize=False)
    config = GenerateConfig(max_tokens=8, temperature=0, logprobs=True, top_logprobs=2, num_choices=2)
    out = await model.generate(
        [ChatMessageSystem(content="Be kind."), ChatMessageUser(content="Who are you?")], config=config
    )
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who are you?"}]
    (own, _) = await session.chat(messages, max_tokens=8, temperature=0, logprobs=2, n=2)
    assert [choice.message.content for choice in out.choices] == [own.text] * 2
    assert out.choices[0].stop_reason == "max_tokens"
    usage = out.usage
    assert usage is not None and usage.output_tokens == 16
    assert usage.input_tokens + (usage.input_tokens_cache_read or 0) == own.usage.prompt_tokens
    content = out.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([entry.logprob for entry in own.logprobs or ()])
    assert len(content[0].top_logprobs) == 2


def test_an_evaluation_runs(session: Session, tmp_path: Path) -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes

    task = Task(dataset=[Sample(input=question, target=answer) for question, answer in QUESTIONS], scorer=includes())
    model = get_model("rekindle/tiny", session=session, memoize=False)
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none", max_tokens=24)
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 0.75
