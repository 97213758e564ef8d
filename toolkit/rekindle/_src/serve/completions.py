"""`/v1/completions` and `/v1/embeddings`: prompts without a conversation, continued or as vectors."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rekindle._src.core.records import Completion, TextDelta, TokenLogprobs
from rekindle._src.serve import generation
from rekindle._src.serve.bodies import Entries, text_of
from rekindle._src.serve.errors import wrong
from rekindle._src.serve.exchange import Exchange, dumps
from rekindle._src.serve.fields import INT64, Boolean, Endpoint, Field, OneOf, String, ignored, refused, whole
from rekindle._src.serve.ledger import bytes_of
from rekindle._src.serve.life import Active, estimate
from rekindle._src.serve.logprobs import Offset
from rekindle._src.serve.metrics import finish_of
from rekindle._src.serve.models import HandleLike, ServedSession
from rekindle._src.serve.openai_fields import COMPLETIONS, PROMPTS, REQUEST_ID

MAX_TOKENS = 16  # OpenAI's default

_FIRST = 16  # inputs after which a large request no longer counts as waiting
EMBED_OPTIONS = ("dimensions", "pooling", "normalize", "prompt_name")
_POOLING = "Of the last layer's hidden states: their mean, the last one or the first; the model's own by default."
EMBEDDINGS = Endpoint(
    "/v1/embeddings",
    "Embed texts",
    (
        Field("input", PROMPTS, COMPLETIONS.by_name["prompt"].doc, option="prompt", required=True),
        Field("model", String(maximum=512), "The name of a served model; may be left out."),
        Field("encoding_format", OneOf(("float", "base64")), "float by default; base64 is of little-endian float32."),
        Field("dimensions", whole(1), "Keep only so many numbers, for models trained for that."),
        Field("pooling", OneOf(("mean", "last", "cls")), _POOLING),
        Field("normalize", Boolean(), "Scale each vector to length 1; true by default, or what the model's files say."),
        Field("prompt_name", String(maximum=512), "One of the model's own prompts, which comes before each text."),
        Field("priority", INT64, "Smaller is served first, in a session with policy='priority'."),
        Field("request_id", REQUEST_ID, "Names the request for /abort and in the log; or X-Request-Id."),
        ignored("user", "Not used."),
        refused("truncate_prompt_tokens", "shorten the input before sending it"),
    ),
)


async def completions(exchange: Exchange, fields: dict[str, Any]) -> None:
    served, session = await generation.model_of(exchange, fields)
    n, echo = fields.get("n", 1), fields.get("echo", False)
    if fields.get("best_of", n) != n:
        raise wrong("best_of", fields["best_of"], f"is not n, which is {n}", "Remove it: every completion is returned")
    form = generation.form_of(exchange, fields)
    options = {**generation.sampling_options(fields, session), **form}
    options["max_tokens"] = fields.get("max_tokens", MAX_TOKENS)
    if "logprobs" in fields:
        options["logprobs"] = fields["logprobs"]
        if echo:
            options["prompt_logprobs"] = max(fields["logprobs"], fields.get("prompt_logprobs", 0))
    prompts = await _tokens(exchange, fields, session)
    _fits(len(prompts) * n, session)
    streaming = generation.stream_options(fields)
    with exchange.takes_on(estimate(prompts)) as active:
        handles = await exchange.run(partial(_handles, session, prompts, options))
        del prompts
        if not echo:
            _let_go(exchange, fields)
        generation.submit(exchange, active, handles)  # if the queue has no room for one, all of them are refused
        writer = _CompletionWriter(exchange, fields, served.name, session, handles)
        if fields.get("stream"):
            await writer.stream(active, streaming)
            return
        results = await generation.wait_all(exchange, active, handles)
        await exchange.reply(await writer.whole(results))


def _handles(session: ServedSession, prompts: Sequence[Any], options: Mapping[str, Any]) -> list[HandleLike]:
    return [session.generate(prompt, **options) for prompt in prompts]


def _let_go(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Drop the prompts, which the session has: as the same texts, or as arrays in place of lists of token ids."""
    account = exchange.account
    ids = [prompt for prompt in fields.pop("prompt") if not isinstance(prompt, str)]
    if ids:
        account.hold(parsed=max(0, account.parsed - sum(map(bytes_of, ids)) + 4 * sum(map(len, ids))))


async def _tokens(exchange: Exchange, fields: Mapping[str, Any], session: ServedSession) -> Sequence[Any]:
    """Return the prompts, encoded here if they must get no special tokens."""
    prompts: Sequence[Any] = fields["prompt"]
    if fields.get("add_special_tokens", True):
        return prompts

    def encode_all() -> Sequence[Any]:
        encode = session.tokenizer.encode
        return [encode(text, add_special_tokens=False) if isinstance(text, str) else text for text in prompts]

    tokens: Sequence[Any] = await exchange.run(encode_all)
    if not all(len(prompt) for prompt in tokens):
        raise wrong("prompt", "", "has no tokens", "Send at least one character")
    return tokens


def _fits(sequences: int, session: ServedSession) -> None:
    places = session.config.max_queue + session.config.max_requests
    if sequences > places:
        raise wrong("n", sequences, f"sequences are more than the {places:,} that the server takes", "Send fewer")


class _CompletionWriter(generation.Writer):
    def __init__(
        self, exchange: Exchange, fields: Mapping[str, Any], model: str, session: ServedSession,
        handles: Sequence[HandleLike],
    ) -> None:  # fmt: skip
        super().__init__(exchange, fields, model, session, "cmpl", "text_completion")
        self._texts: dict[int, str] = {}  # of prompts that are token ids
        self._handles, self._n, self._echo = handles, fields.get("n", 1), bool(fields.get("echo"))

    async def whole(self, completions: Sequence[Sequence[Completion]]) -> dict[str, Any]:

        def choice_of(numbered: tuple[int, Completion]) -> dict[str, Any]:
            number, completion = numbered
            text = self._prompt(number) + completion.text if self._echo else completion.text
            choice: dict[str, Any] = {
                "index": number * self._n + completion.index,
                "text": text,
                "logprobs": self._logprobs(completion),
                "finish_reason": finish_of(completion.finish_reason),
                "stop_reason": completion.stop_reason,
            }
            if "prompt_logprobs" in self._fields:
                choice["prompt_logprobs"] = self._shapes.prompt(completion.prompt_logprobs or ())
            if self._ids:
                choice |= {"token_ids": completion.token_ids, "prompt_token_ids": completion.prompt_token_ids}
                choice["weights_versions"] = completion.weights_versions
            return choice

        choices = [(number, completion) for number, group in enumerate(completions) for completion in group]
        return await self._answer(completions, Entries(choices, choice_of))

    def _prompt(self, number: int) -> str:
        """Return the text of a prompt; token ids are decoded, once for all choices."""
        prompt, tokenizer = self._fields["prompt"][number], self._session.tokenizer
        if isinstance(prompt, str):
            return prompt
        if number not in self._texts:
            self._texts[number] = str(tokenizer.decode(prompt)) if tokenizer.has_text else ""
        return self._texts[number]

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        if "logprobs" not in self._fields:
            return None
        entries: list[TokenLogprobs | int] = [*(completion.logprobs or ())]
        if self._echo:
            entries = [completion.prompt_token_ids[0], *(completion.prompt_logprobs or ()), *entries]
        return self._shapes.completion(entries, Offset())

    async def stream(self, active: Active, options: Mapping[str, Any]) -> None:
        exchange, n = self._exchange, self._n
        chunks = generation.Chunks(self._common, options=options)
        logprobs, ids = "logprobs" in self._fields, self._ids
        scores = "prompt_logprobs" in self._fields
        offsets: dict[int, Offset] = {}  # by index, of choices that have begun
        begun: set[int] = set()  # prompts
        prompted = generated = 0  # tokens, of prompts that have begun and of all choices

        async def write(number: int, delta: TextDelta) -> None:
            nonlocal prompted, generated
            index = number * n + delta.index
            text, fresh = delta.text, index not in offsets
            if fresh:
                offsets[index] = Offset()
                if self._echo:
                    text = self._prompt(number) + text
            shape: dict[str, Any] | None = None
            if logprobs:
                entries: list[TokenLogprobs | int] = [*delta.logprobs]
                if fresh and self._echo:
                    entries = [self._handles[number].prompt_token_ids[0], *delta.prompt_logprobs, *entries]
                shape = self._shapes.completion(entries, offsets[index])
            reason = finish_of(delta.finish_reason)
            scores_of = "null" if shape is None else await text_of(shape)
            choice = (
                f'{{"index":{index},"text":{dumps(text)},"logprobs":{scores_of},'
                f'"finish_reason":{dumps(reason)},"stop_reason":{dumps(delta.stop_reason)}'
            )
            if fresh and scores:
                choice += f',"prompt_logprobs":{await text_of(self._shapes.prompt(delta.prompt_logprobs))}'
            if ids:
                prompt = self._handles[number].prompt_token_ids if fresh else None
                choice += f'{generation.token_members(delta)},"prompt_token_ids":{dumps(prompt)}'
            generated += len(delta.token_ids)
            usage_so_far = None
            if chunks.continuous:
                if number not in begun:
                    begun.add(number)
                    prompted += len(self._handles[number].prompt_token_ids)
                usage_so_far = generation.usage_object(prompted, generated)
            await exchange.emit(chunks.chunk(choice + "}", usage_so_far).encode())

        await self._end(chunks, await generation.follow(exchange, active, self._handles, write))


async def embeddings(exchange: Exchange, fields: dict[str, Any]) -> None:
    served, session = await generation.model_of(exchange, fields)
    options: dict[str, Any] = {name: fields[name] for name in EMBED_OPTIONS if name in fields}
    if fields.get("priority"):
        options["priority"] = -fields["priority"]
    inputs = fields["input"]
    vectors: list[Any] = []
    tokens = 0
    with exchange.takes_on(estimate(inputs)) as active:
        for part in (inputs[:_FIRST], inputs[_FIRST:]):
            if part:
                call = session.embed(part, **options)
                call.serve(exchange.caller)
                active.handles.append(call)
                vectors += list(await call)
                tokens += call.usage.prompt_tokens
                active.started()
                exchange.account.hold(results=sum(vector.nbytes for vector in vectors))

    def entry(numbered: tuple[int, Any]) -> dict[str, Any]:
        return {"object": "embedding", "index": numbered[0], "embedding": _shape(numbered[1], fields)}

    data = Entries([*enumerate(vectors)], entry)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    await exchange.reply({"object": "list", "data": data, "model": served.name, "usage": usage})


def _shape(vector: Any, fields: dict[str, Any]) -> Any:
    if fields.get("encoding_format") == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
