"""What users do through LiteLLM, against the server at $REKINDLE_URL; prints "all right" at the end."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would download a list of prices

import litellm

BASE = os.environ["REKINDLE_URL"] + "/v1"
MESSAGES = [{"role": "user", "content": "Who are you?"}]


def chat(provider: str, **options: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 12, **options}
    return litellm.completion(f"{provider}/tiny", messages=MESSAGES, api_base=BASE, api_key="none", **given)


async def several() -> list[str]:
    calls = (
        litellm.acompletion(
            "hosted_vllm/tiny", messages=MESSAGES, api_base=BASE, api_key="none", temperature=0, max_tokens=12
        )
        for _ in range(8)
    )
    return [done.choices[0].message.content for done in await asyncio.gather(*calls)]


def main() -> None:
    said = chat("hosted_vllm")
    assert said.choices[0].message.content and said.usage.completion_tokens <= 12
    text = said.choices[0].message.content
    assert chat("openai").choices[0].message.content == text
    parts = list(chat("hosted_vllm", stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert asyncio.run(several()) == [text] * 8
    scored = chat("hosted_vllm", logprobs=True, top_logprobs=2)
    assert len(scored.choices[0].logprobs.content) == scored.usage.completion_tokens
    whole = litellm.text_completion(
        model="hosted_vllm/tiny", prompt="Once upon a time", api_base=BASE, api_key="none", max_tokens=8, temperature=0
    )
    assert whole.choices[0].text
    vectors = litellm.embedding("hosted_vllm/tiny", input=["one", "two"], api_base=BASE, api_key="none")
    assert len(vectors.data) == 2 and vectors.usage.prompt_tokens > 0
    for wrong, kind in (
        ({"temperature": -3}, litellm.BadRequestError),
        ({"max_tokens": 8, "model": "hosted_vllm/other"}, litellm.NotFoundError),
    ):
        try:
            options = {"model": "hosted_vllm/tiny", "max_tokens": 8, **wrong}
            litellm.completion(messages=MESSAGES, api_base=BASE, api_key="none", **options)
        except kind:
            continue
        raise AssertionError(f"{wrong} was accepted")
    print("all right")


if __name__ == "__main__":
    main()
