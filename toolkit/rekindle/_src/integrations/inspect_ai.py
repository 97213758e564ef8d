"""A session as a model of inspect_ai."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from rekindle._src.core.records import Completion, FinishReason
from rekindle._src.session.opening import Opening, open
from rekindle._src.session.session import Session
from rekindle.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    T = TypeVar("T")
    model: Any
    ToolCall: Any

    class ModelAPI:
        """The parts of the base class that are used here; the package is not installed where types are checked."""

        model_name: str

        def __init__(self, *_: Any, **__: Any) -> None: ...

    def modelapi(name: str) -> Callable[[T], T]: ...

else:
    try:
        from inspect_ai import model
        from inspect_ai.model import ModelAPI, modelapi
        from inspect_ai.tool import ToolCall
    except ImportError as error:
        raise MissingExtra("inspect_ai", "inspect") from error

# Names of inspect's generation options, and those of sampling options here.
_SAME = "max_tokens temperature top_p top_k seed frequency_penalty presence_penalty logit_bias"
OPTIONS = {**{name: name for name in _SAME.split()}, "stop_seqs": "stop", "num_choices": "n"}
STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.CONTEXT: "model_length"}


class RekindleAPI(ModelAPI):
    """A session as a model of inspect: `--model rekindle/FOLDER -M dtype=float32`, with the options of `rekindle.open`.

    In code also over an open session: `get_model("rekindle/tiny", session=session)`.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: Any = None,
        *,
        session: Session | None = None,
        **options: Any,
    ) -> None:
        """Take a session, or open one before the first request."""
        super().__init__(model_name, base_url, api_key, [], *([] if config is None else [config]))
        self._session, self._own = session, session is None
        self._opening: Opening | None = None if session is not None else open(model_name, **options)
        self._lock = anyio.Lock()

    async def generate(self, input: Sequence[Any], tools: Sequence[Any], tool_choice: Any, config: Any) -> Any:
        """Return inspect's `ModelOutput` of a chat."""
        session = await self._opened()
        options = {ours: getattr(config, name) for name, ours in OPTIONS.items()}
        options = {name: value for name, value in options.items() if value is not None}
        if config.logprobs:
            options["logprobs"] = config.top_logprobs or 0
        if config.response_schema is not None:
            options["schema"] = config.response_schema.json_schema.model_dump(exclude_none=True)
        if tools and tool_choice != "none":
            options["tools"] = [_tool(tool) for tool in tools]
            named = getattr(tool_choice, "name", None)
            options["tool_choice"] = {"any": "required"}.get(tool_choice, tool_choice) if named is None else named
        done = await session.chat([_message(one) for one in input], **options)
        completions = [done] if isinstance(done, Completion) else list(done)
        usages = [one.usage for one in completions]
        written = sum(usage.completion_tokens for usage in usages)
        read, cached = usages[0].prompt_tokens, usages[0].cached_tokens
        return model.ModelOutput(
            model=self.model_name,
            choices=[self._choice(session, one) for one in completions],
            usage=model.ModelUsage(
                input_tokens=read - cached,
                output_tokens=written,
                total_tokens=read + written,
                input_tokens_cache_read=cached,
            ),
        )

    def _choice(self, session: Session, done: Completion) -> Any:
        calls = [ToolCall(id=call.id, function=call.name, arguments=dict(call.arguments)) for call in done.tool_calls]
        content: Any = done.content
        if done.reasoning:
            content = [model.ContentReasoning(reasoning=done.reasoning), model.ContentText(text=done.content)]
        message = model.ChatMessageAssistant(
            content=content, tool_calls=calls or None, model=self.model_name, source="generate"
        )
        reason = "tool_calls" if calls else STOP_REASONS.get(done.finish_reason, "stop")
        return model.ChatCompletionChoice(message=message, stop_reason=reason, logprobs=_logprobs(done))

    async def _opened(self) -> Session:
        async with self._lock:
            if self._session is None:
                assert self._opening is not None, "there is one or the other"
                self._session = await self._opening
            return self._session

    async def aclose(self) -> None:
        """Close the session if it was opened here."""
        if self._own and self._session is not None:
            await self._session.aclose()

    def max_connections(self) -> int:
        """Return how many requests inspect sends at once: as many as share a batch, and as many that wait."""
        return 64 if self._session is None else 2 * self._session.config.max_requests

    def max_tokens(self) -> int | None:
        """Return the limit on an answer's length where a task has none."""
        return 2048

    def connection_key(self) -> str:
        """Return the name of the limit on connections: models have limits of their own."""
        return f"rekindle/{self.model_name}"


@modelapi(name="rekindle")
def provider() -> type[RekindleAPI]:
    """Return the class for model names that begin with `rekindle/`."""
    return RekindleAPI


def _message(message: Any) -> dict[str, Any]:
    """Return a message of inspect as one of a chat here."""
    if not isinstance(message.content, str):
        other = [part.type for part in message.content if part.type not in ("text", "reasoning")]
        if other:
            raise InvalidRequest("messages", other[0], "can't be read", "Send text")
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "assistant" and message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        plain |= {"tool_call_id": message.tool_call_id, "name": message.function}
        if message.error is not None:
            plain["content"] = message.error.message
    return plain


def _tool(tool: Any) -> dict[str, Any]:
    parameters = tool.parameters.model_dump(exclude_none=True)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _logprobs(done: Completion) -> Any:
    """Return inspect's log-probabilities of a completion; None if it has none."""
    if done.logprobs is None:
        return None
    content = []
    for entry in done.logprobs:
        top = [
            model.TopLogprob(token=done.text_of(token), logprob=value)
            for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        token = done.text_of(entry.token_id)
        content.append(model.Logprob(token=token, logprob=entry.logprob, top_logprobs=top or None))
    return model.Logprobs(content=content)
