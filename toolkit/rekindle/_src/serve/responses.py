"""`/v1/responses`: its fields, its items as messages, and the answer. Items of an answer are kept for a while."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rekindle._src.core.records import Completion, TextDelta, TokenLogprobs
from rekindle._src.core.reply import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallDropped, ToolCallStarted
from rekindle._src.serve import generation
from rekindle._src.serve.bodies import Entries, pieces
from rekindle._src.serve.chat import (
    call_chat,
    calls_options,
    events_of,
    reasoning_options,
    tool_options,
)
from rekindle._src.serve.content import ReadPart, RequestContent, content_of, content_text
from rekindle._src.serve.errors import ApiError, missing, wrong
from rekindle._src.serve.exchange import Exchange, OpenAI, characters_of, dumps
from rekindle._src.serve.fields import (
    Boolean,
    Either,
    Endpoint,
    Field,
    Items,
    OneOf,
    Shape,
    SmallValue,
    String,
    ignored,
    refused,
    whole,
)
from rekindle._src.serve.logprobs import LogprobShapes
from rekindle._src.serve.models import ServedSession
from rekindle._src.serve.openai_fields import (
    MOST,
    MOST_MESSAGES,
    OBJECT,
    REASONING_FIELDS,
    SAMPLING_BY_NAME,
    TRUNCATION,
)

WIDEST = 4  # bytes of a character
# Characters of what comes back with an answer: they are written at once, up to three times.
MOST_METADATA, MOST_REPEATED = 1 << 16, 1 << 20  # of metadata, of which OpenAI takes 9,216, and of each other field
TOOL = Shape((("type", String()), ("name", String(maximum=256, minimum=1)), ("parameters", OBJECT)), ("type",))
TOOL_CHOICE = Either("a word or a tool", ((str, String()), (dict, OBJECT)))
REPEATED_CHOICE = SmallValue(MOST_REPEATED, TOOL_CHOICE)
INPUT = Either(
    "a string or a list of items", ((str, String()), (list, Items(OBJECT, minimum=1, maximum=MOST_MESSAGES)))
)
FORMAT = Shape((("format", Shape((("type", OneOf(("text", "json_object", "json_schema"))),), ("type",))),))
RESPONSES = Endpoint(
    "/v1/responses",
    "Answer a conversation; of the answer, items are kept for a while",
    (
        Field("model", String(maximum=512), "The name of a served model; may be left out."),
        Field("input", INPUT, "Text, or the items of the conversation so far.", required=True),
        Field("instructions", String(), "What the model is told before the conversation."),
        Field("max_output_tokens", whole(1, MOST), "New tokens at most.", option="max_tokens"),
        *(SAMPLING_BY_NAME[name] for name in ("temperature", "top_p")),
        Field("top_logprobs", whole(0, 20), "Log-probabilities of this many tokens at each position."),
        Field("stream", Boolean(), "Send the answer as server-sent events, while it is made."),
        Field("tools", SmallValue(MOST_REPEATED, Items(TOOL, maximum=512)), "Functions that the model may call."),
        Field("tool_choice", REPEATED_CHOICE, "none, auto, required, a function, or allowed_tools."),
        Field("parallel_tool_calls", Boolean(), "false: at most one call in an answer."),
        *REASONING_FIELDS,
        Field("text", SmallValue(MOST_REPEATED, FORMAT), "The format of the text."),
        Field("include", Items(String()), "message.output_text.logprobs; others bring nothing here."),
        Field("metadata", SmallValue(MOST_METADATA), "Comes back with the answer."),
        ignored("stream_options", "There is nothing to choose."),
        ignored("user", "Not used."),
        ignored("safety_identifier", "Not used."),
        ignored("service_tier", "There is one."),
        ignored("prompt_cache_key", "Prefixes are found by their content."),
        ignored("prompt_cache_options", "Prefixes are found by their content."),
        ignored("prompt_cache_retention", "Pages are kept while there is room."),
        ignored("max_tool_calls", "It is about tools that run at OpenAI."),
        Field("store", Boolean(), "false: later requests can't name items of this answer by their ids."),
        refused("previous_response_id", "conversations are not stored: send the whole one each time"),
        refused("conversation", "conversations are not stored: send the whole one each time"),
        refused("background", "an answer belongs to its connection", False),
        refused("background_options", "an answer belongs to its connection", {}),
        refused("prompt", "there are no stored prompts: send instructions and input"),
        TRUNCATION,
        refused("context_management", "shorten the conversation before sending it", []),
        refused("access_programs", "there are none", []),
        refused("image", "answers are text"),
        refused("moderation", "there is no moderation"),
    ),
)
_LOGPROBS = "message.output_text.logprobs"


class Responses(OpenAI):
    """Error objects of this API: the same as OpenAI's other ones, except that events of a stream have names."""

    def event(self, refused: ApiError) -> bytes:
        fields = {"code": refused.code, "message": refused.message, "param": refused.param, "sequence_number": 0}
        return f"event: error\ndata: {dumps({'type': 'error', **fields})}\n\n".encode()


async def responses(exchange: Exchange, fields: dict[str, Any]) -> None:
    served, session = await generation.model_of(exchange, fields)
    options = generation.sampling_options(fields, session)
    options["max_tokens"] = fields.get("max_output_tokens", generation.rest_of_context(session))
    with_logprobs = _LOGPROBS in fields.get("include", ())
    if fields.get("top_logprobs") and not with_logprobs:
        raise wrong("top_logprobs", fields["top_logprobs"], f"is given without include {_LOGPROBS}", "Add that")
    if with_logprobs:
        options["logprobs"] = fields.get("top_logprobs", 0)
    options |= _chat_options(fields) | generation.overflow_option(fields)
    store = fields.get("store", True)
    format = (fields.get("text") or {}).get("format") or {"type": "text"}
    options |= generation.form_at(exchange, format, "text.format")
    options |= calls_options(fields, parallel=fields.get("parallel_tool_calls", True))
    exchange.names = {**exchange.names, "prompt": "input", "messages": "input"}
    item_store = exchange.service.item_store
    shapes = LogprobShapes(exchange.service.token_names(served.name, session))
    fields["input"], exchange.size = await exchange.run(lambda: _with_kept(exchange, fields["input"]))
    content = RequestContent(exchange, session)
    messages = await content.messages(lambda read: messages_of(fields, read))
    with exchange.takes_on(content.tokens) as active:
        await content.fetch()
        handle = await exchange.run(partial(call_chat, session.chat, messages, options))
        del messages
        generation.submit(exchange, active, [handle])
        answer = _Answer(exchange, fields, served.name, session, shapes if with_logprobs else None)
        if not fields.get("stream"):
            ((completion,),) = await generation.wait_all(exchange, active, [handle])
            answer.whole(completion)
            if store:
                item_store.keep(exchange.caller, answer.items)
            await exchange.reply(answer.response(completion))
            return

        async def write(_: int, delta: TextDelta) -> None:
            answer.begin()
            answer.take(delta)
            await answer.flush()

        ((completion,),) = await generation.follow(exchange, active, [handle], write)
        answer.end(completion)
        if store:
            item_store.keep(exchange.caller, answer.items)
        await answer.flush()


def _chat_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if tools := tools_of(fields):
        options["tools"] = tools
    choice = choice_of(fields)
    if choice is not None:
        options["tool_choice"] = choice
    return options | tool_options(options) | reasoning_options(fields)


_ROLES = ("user", "assistant", "system", "developer")


def _with_kept(exchange: Exchange, items: str | Sequence[Mapping[str, Any]]) -> tuple[Any, int]:
    """Return the input with kept items in the place of references, and the characters that the request stands for.

    A reference of 70 bytes may stand for a long answer: the bound is that of a body which has the items themselves.
    """
    size, limit = exchange.size, exchange.service.body_limit
    if isinstance(items, str):
        return items, size
    whole_items = []
    for index, item in enumerate(items):
        if item.get("type") == "item_reference":
            path = f"input[{index}]"
            item = exchange.service.item_store.get(exchange.caller, _text(item, "id", path), f"{path}.id")
            size += characters_of(item)
            if size > limit:
                raise ApiError(
                    413,
                    f"{path}: with the items that it names, the request has more than {limit:,} characters. Name fewer",
                    param="input",
                    code="body_too_large",
                )
        whole_items.append(item)
    account = exchange.account
    account.hold(parsed=account.parsed + WIDEST * (size - exchange.size))
    return whole_items, size


def messages_of(fields: dict[str, Any], read: ReadPart) -> list[dict[str, Any]]:
    """Take the input out of the fields. Return it as a conversation.

    Consecutive reasoning, text and calls become one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    if fields.get("instructions"):
        messages.append({"role": "system", "content": fields["instructions"]})
    items = fields.pop("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for index, item in enumerate(items):
        path = f"input[{index}]"
        match item.get("type", "message"):
            case "message":
                _message(messages, item, path, read)
            case "reasoning":
                _assistant(messages)["reasoning_content"] = _thoughts(item, path)
            case "function_call":
                function = {name: _text(item, name, path) for name in ("name", "arguments")}
                call = {"id": _text(item, "call_id", path), "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output, place = item.get("output"), f"{path}.output"
                parts = isinstance(output, list)
                text = content_text(_parts(output, place), place) if parts else _text(item, "output", path)
                messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", path), "content": text})
            case kind:
                raise wrong(f"{path}.type", kind, "is not served here", "Send messages, reasoning and function calls")
    for message in messages:
        if message["role"] == "assistant":  # joined once: there may be thousands
            message["content"] = "\n".join(message["content"])
    return messages


def _message(messages: list[dict[str, Any]], item: Mapping[str, Any], path: str, read: ReadPart) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise wrong(f"{path}.role", role, "is not known", f"Use one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        place = f"{path}.content"
        parts = _parts(content, place)
        content = content_text(parts, place) if role == "assistant" else content_of(parts, place, read)
    elif not isinstance(content, str):
        raise wrong(f"{path}.content", content, "is neither a string nor a list of parts", "Pass one of them")
    if role != "assistant":
        messages.append({"role": role, "content": content})
        return
    texts = _assistant(messages)["content"]
    if content or texts:  # empty ones at the beginning have no line
        texts.append(content)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end, for items to add their texts to. Append one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _thoughts(item: Mapping[str, Any], path: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise wrong(f"{path}.content", parts, "is not a list of parts", "Pass one")
    return "\n".join(_text(part, "text", f"{path}.content") for part in _parts(parts, f"{path}.content"))


def _parts(parts: Sequence[Any], path: str) -> Sequence[Mapping[str, Any]]:
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise wrong(f"{path}[{index}]", part, "is not a part with a type", "Pass {'type': 'input_text', …}")
    return parts


def _text(item: Mapping[str, Any], name: str, path: str) -> str:
    if not isinstance(item.get(name), str):
        raise wrong(f"{path}.{name}", item.get(name), "is not a string", "Pass one")
    return str(item[name])


def tools_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions in the form of chat completions. Refuse tools that run at OpenAI by name."""
    tools = []
    for index, tool in enumerate(fields.get("tools") or ()):
        if tool["type"] != "function":
            raise wrong(f"tools[{index}].type", tool["type"], "does not run here", "Pass functions")
        if not tool.get("name"):
            raise missing(f"tools[{index}].name")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def choice_of(fields: Mapping[str, Any]) -> Any:
    """Return `tool_choice` in the form of chat completions."""
    choice = fields.get("tool_choice")
    if isinstance(choice, Mapping):
        if choice.get("type") == "allowed_tools":
            return choice
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            raise wrong("tool_choice", choice, "is not a function", 'Pass {"type": "function", "name": …}')
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice not in (None, "auto", "none", "required"):
        raise wrong("tool_choice", choice, "is not known", "Use auto, none, required, or a function")
    return choice


class _Answer:
    """The items of an answer, and the events of a stream that report them."""

    def __init__(
        self,
        exchange: Exchange,
        fields: Mapping[str, Any],
        model: str,
        session: ServedSession,
        shapes: LogprobShapes | None,
    ) -> None:
        self._exchange, self._fields, self._model, self._session = exchange, fields, model, session
        self._shapes = shapes
        self._created = int(time.time())
        self._parallel = fields.get("parallel_tool_calls", True)
        self._items: list[dict[str, Any]] = []
        self._open = ""  # the kind of the last item, if more may be added to it
        self._texts: list[str] = []  # of that item, until it is closed
        self._logprobs: list[TokenLogprobs] = []  # of tokens since the last text
        self._scores: dict[str, list[TokenLogprobs]] = {}  # log-probabilities of each item's text
        self._out: list[tuple[str, dict[str, Any]]] = []  # events not sent yet
        self._silent = False  # the answer is not streamed
        self._sequence = 0
        self._begun = False

    @property
    def items(self) -> list[dict[str, Any]]:
        return self._items

    # The answer as a whole.

    def response(self, completion: Completion | None) -> dict[str, Any]:
        """Return the response object. Without a completion, return it as it is at the start."""
        fields, cut = self._fields, completion is not None and completion.finish_reason.cut
        status = "in_progress" if completion is None else "incomplete" if cut else "completed"
        return {
            "id": f"resp_{self._exchange.request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": fields.get("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "metadata": fields.get("metadata") or {},
            "model": self._model,
            "output": [] if completion is None else Entries(self._items, self._scored),
            "parallel_tool_calls": self._parallel,
            "previous_response_id": None,
            "reasoning": {"effort": (fields.get("reasoning") or {}).get("effort"), "summary": None},
            "store": fields.get("store", True),
            "temperature": fields.get("temperature"),
            "text": fields.get("text") or {"format": {"type": "text"}},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "top_p": fields.get("top_p"),
            "truncation": fields.get("truncation") or "disabled",
            "usage": None if completion is None else _usage(completion),
            **generation.left_out_member(None if completion is None else completion.left_out),
        }

    def whole(self, completion: Completion) -> None:
        """Add the items of an answer that is not streamed."""
        calls = [
            event
            for index, call in enumerate(completion.tool_calls if self._parallel else completion.tool_calls[:1])
            for event in (ToolCallStarted(index, call.id, call.name), ToolCallArguments(index, call.arguments_text))
        ]
        content = (ContentDelta(completion.content),) if completion.content or not calls else ()
        reasoning = (ReasoningDelta(completion.reasoning),) if completion.reasoning else ()
        self._silent = True
        self.take(TextDelta(completion.id, "", events=(*reasoning, *content, *calls)))
        self._close(completion)
        if self._shapes is not None and content:
            (item,) = (item for item in self._items if item["type"] == "message")
            self._scores[item["id"]] = list(completion.logprobs or ())

    def _scored(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return an item with its log-probabilities, which are built when they are written."""
        if item["id"] not in self._scores:
            return item
        return {**item, "content": Entries([self._scored_part(item)], dict)}

    def _scored_part(self, item: dict[str, Any]) -> dict[str, Any]:
        scores = self._scores.get(item["id"])
        part: dict[str, Any] = item["content"][0]
        return part if scores is None else {**part, "logprobs": self._entries(scores)}

    def _entries(self, scores: list[TokenLogprobs]) -> Entries | list[Any]:
        return [] if self._shapes is None else Entries(scores, self._shapes.chat_entry)

    # As a stream.

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._tell("response.created", response=self.response(None))
            self._tell("response.in_progress", response=self.response(None))

    def end(self, completion: Completion) -> None:
        if not self._items:
            self._item("message")
        self._close(completion)
        response = self.response(completion)
        self._tell(f"response.{response['status']}", response=response)

    async def flush(self) -> None:
        """Send the queued events. The last events hold all log-probabilities and may be large."""
        events, self._out = self._out, []
        if events:
            await self._exchange.emit_paced(part for kind, data in events for part in _event(kind, data))

    def take(self, delta: TextDelta) -> None:
        if self._shapes is not None:
            self._logprobs += delta.logprobs
        for event in events_of(delta, parallel=self._parallel):
            match event:
                case ContentDelta(text) | ToolCallDropped(_, text):
                    self._item("message", broken=isinstance(event, ToolCallDropped))
                    item, scores = self._items[-1], self._logprobs
                    self._texts.append(text)
                    if self._shapes is not None:
                        self._scores.setdefault(item["id"], []).extend(scores)
                    self._part("response.output_text.delta", delta=text, logprobs=self._entries(scores))
                    self._logprobs = []
                case ReasoningDelta(text):
                    self._item("reasoning")
                    self._texts.append(text)
                    self._part("response.reasoning_text.delta", delta=text)
                case ToolCallStarted(_, call_id, name):
                    self._close(None)
                    self._item("function_call", call_id=call_id, name=name, arguments="")
                case ToolCallArguments(_, text):
                    self._texts.append(text)
                    self._tell("response.function_call_arguments.delta", delta=text, **self._place)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _item(self, kind: str, *, broken: bool = False, **more: Any) -> None:
        """Begin an item, unless the last one is open and of this kind. `broken` marks the last one as incomplete."""
        if self._open == kind:
            return
        self._close(None, broken=broken)
        self._open = kind
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        name = f"{prefix}_{uuid.uuid4().hex}"  # impossible to guess: a later request may name it
        item: dict[str, Any] = {"id": name, "type": kind, "status": "in_progress", **more}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._tell("response.output_item.added", item=dict(item), output_index=len(self._items) - 1)
        if kind != "function_call":
            item["content"] = [_part(kind)]
            self._part("response.content_part.added", part=_part(kind))

    def _close(self, completion: Completion | None, *, broken: bool = False) -> None:
        if not self._open:
            return
        kind, self._open = self._open, ""
        item = self._items[-1]
        cut = broken or (completion is not None and completion.finish_reason.cut)
        item["status"] = "incomplete" if cut else "completed"
        text, self._texts = "".join(self._texts), []
        if kind == "function_call":
            item["arguments"] = text
        else:
            item["content"][0]["text"] = text
        if kind == "function_call":
            self._tell("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"],
                       **self._place)  # fmt: skip
        else:
            part = self._scored_part(item)
            if kind == "message":
                self._part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            else:
                self._part("response.reasoning_text.done", text=part["text"])
            self._part("response.content_part.done", part=part)
        self._tell("response.output_item.done", item=self._scored(item), output_index=len(self._items) - 1)

    def _part(self, kind: str, /, **data: Any) -> None:
        self._tell(kind, content_index=0, **self._place, **data)

    def _tell(self, kind: str, /, **data: Any) -> None:
        if self._silent:
            return
        self._out.append((kind, {"type": kind, "sequence_number": self._sequence, **data}))
        self._sequence += 1


def _event(kind: str, data: dict[str, Any]) -> Iterator[str]:
    yield f"event: {kind}\ndata: "
    yield from pieces(data)
    yield "\n\n"


def _part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _usage(completion: Completion) -> dict[str, Any]:
    prompt, generated = completion.usage.prompt_tokens, completion.usage.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": completion.usage.cached_tokens},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": completion.usage.reasoning_tokens},
        "total_tokens": prompt + generated,
    }
