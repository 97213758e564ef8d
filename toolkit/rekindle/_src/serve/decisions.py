"""`/v1/decisions` and `/v1/rerank`: answers to typed questions, and documents ranked by a query; no text is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.serve import generation
from rekindle._src.serve.errors import wrong
from rekindle._src.serve.exchange import Exchange
from rekindle._src.serve.fields import (
    INT64,
    Boolean,
    Either,
    Endpoint,
    Field,
    Items,
    Kind,
    OneOf,
    Shape,
    String,
    ignored,
    refused,
    whole,
)
from rekindle._src.serve.life import Active, estimate
from rekindle._src.serve.models import ServedModel
from rekindle._src.serve.openai_fields import MOST_MESSAGES, REQUEST_ID

MOST_QUESTIONS = 200
MOST_CHOICES = 255
MOST_LEVELS = 10
MOST_OPTIONS = 1_024  # of all questions of a request
MOST_DOCUMENTS = 1_000
MOST_TOKENS = 1 << 22  # about, of all prompts of a request: a state or a query is in each of them
BYTES = 250  # of a token's log-probability, until the request is answered
_TEXT = String(maximum=1 << 20)
_PART = Shape((("type", OneOf(("input_text", "text"))), ("text", String())), ("type", "text"))
_CONTENT = Either("a text or a list of texts", ((str, String()), (list, Items(_PART, maximum=16_384))))
_MESSAGE = Shape((("role", OneOf(("user",))), ("content", _CONTENT)), ("role", "content"))
_INPUT = Either("a text or messages", ((str, String(minimum=1)), (list, Items(_MESSAGE, 1, MOST_MESSAGES))))
_VALUE: Kind = Either("a text or a boolean", ((bool, Boolean()), (str, _TEXT)))
_CHOICE = Shape((("value", _VALUE), ("description", _TEXT)), ("value",))
_LEVEL = Shape((("label", _TEXT), ("description", _TEXT)), ("label",))
_QUESTION = Shape(
    (
        ("type", OneOf(("predicate", "choice", "score"))), ("instructions", String(maximum=1 << 20, minimum=1)),
        ("name", _TEXT), ("choices", Items(_CHOICE, 2, MOST_CHOICES)), ("levels", Items(_LEVEL, 2, MOST_LEVELS)),
    ),
    ("type", "instructions"),
)  # fmt: skip
_SERVING = (
    Field("model", String(maximum=512), "The name of a served model; may be left out."),
    Field("priority", INT64, "Smaller is served first, in a session with policy='priority'."),
    Field("cache_salt", String(1_024, minimum=1), "Cached pages are shared with this salt only."),
    Field("request_id", REQUEST_ID, "Names the request for /abort and in the log; or X-Request-Id."),
    ignored("user", "Not used."),
)
DECISIONS = Endpoint(
    "/v1/decisions",
    "Answer typed questions about a text, with the probability of each answer",
    (
        Field("input", _INPUT, "The text that the questions are about, or messages of the user.", required=True),
        Field("questions", Items(_QUESTION, 1, MOST_QUESTIONS), "Predicates, choices and scores.", required=True),
        *_SERVING,
        ignored("safety_identifier", "Not used."),
    ),
)
RERANK = Endpoint(
    "/v1/rerank",
    "Rank documents by a query",
    (
        Field("query", String(maximum=1 << 20, minimum=1), "The question.", required=True),
        Field(
            "documents",
            Items(Either("a text or an object with a text", (
                (str, String(minimum=1)), (dict, Shape((("text", String(minimum=1)),), ("text",))),
            )), 1, MOST_DOCUMENTS),
            "Texts, or objects with a text.",
            required=True,
        ),
        Field("top_n", whole(1), "The best of them alone; all by default."),
        Field("return_documents", Boolean(), "Send the documents' texts back; true by default."),
        Field("instruction", String(maximum=1 << 16, minimum=1), "The task; by default that of a web search."),
        *_SERVING,
        refused("max_chunks_per_doc", "split documents before sending them"),
        refused("truncate_prompt_tokens", "shorten the documents before sending them"),
    ),
)  # fmt: skip


async def decisions(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer with a decision for each question."""
    served, session = await generation.model_of(exchange, fields)
    exchange.names = {**exchange.names, "prompt": "input", "state": "input"}
    state, asked = input_text(fields.pop("input")), dict[str, Any]()
    for place, entry in enumerate(fields["questions"]):
        asked[str(place)] = question_of(place, entry)
        exchange.names[f"questions[{str(place)!r}]"] = f"questions[{place}]"
    options = sum(map(options_of, fields["questions"]))
    if options > MOST_OPTIONS:
        problem = f"have {options:,} options together, more than {MOST_OPTIONS:,}"
        raise wrong("questions", f"{len(asked)} of them", problem, "Send them in parts")
    tokens = sum(options_of(entry) * estimate([state, *texts_of(entry)]) for entry in fields["questions"])
    check_tokens("questions", tokens)
    exchange.account.hold(results=BYTES * sum(map(characters_of, fields["questions"])))
    with exchange.takes_on(tokens) as active:
        call = session.decide(state, asked, **_options(fields))
        decided = await _answers(exchange, active, call, tokens)
    answers = [_answer(entry, decided[str(place)]) for place, entry in enumerate(fields["questions"])]
    usage = call.usage
    counted = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens,
    }
    await exchange.reply({"model": served.name, "answers": answers, "usage": counted})


def input_text(value: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of an input; messages are apart by an empty line, and the parts of one by a line's end."""
    if isinstance(value, str):
        return value
    contents = [message["content"] for message in value]
    texts = [one if isinstance(one, str) else "\n".join(part["text"] for part in one) for one in contents]
    return "\n\n".join(texts)


def question_of(place: int, entry: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the question of an object of the API, as a session takes it."""
    kind, text = entry["type"], entry["instructions"]
    if kind == "predicate":
        return text, bool
    members, name = ("choices", "value") if kind == "choice" else ("levels", "label")
    if entry.get(members) is None:
        raise wrong(f"questions[{place}].{members}", None, "is missing", f"A question of type {kind} needs it")
    options = {one[name]: one.get("description") or "" for one in entry[members]}
    if len(options) < len(entry[members]):
        raise wrong(f"questions[{place}].{members}", [*options][:4], "has an entry twice", "Name each of them once")
    return text, options


def options_of(entry: Mapping[str, Any]) -> int:
    """Return the number of options that a question's object has; of a predicate, yes and no."""
    return len(entry.get({"choice": "choices", "score": "levels"}.get(entry["type"], "")) or "yn")


def characters_of(entry: Mapping[str, Any]) -> int:
    """Return the number of characters of a question's options. Each may be a token with a log-probability."""
    options = [*(entry.get("choices") or ()), *(entry.get("levels") or ())]
    return sum(len(str(option.get("value", option.get("label")))) for option in options)


async def _answers(exchange: Exchange, active: Active, call: Any, tokens: int) -> Any:
    """Return the results of a call. Large ones are encoded when it is the caller's turn."""
    active.handles.append(call)
    account, before = exchange.account, exchange.account.results
    call.serve(exchange.caller, active.started, lambda size: account.hold(results=before + size))
    async with exchange.turn(tokens):
        await call.encode()
    results = await call
    active.started()
    return results


def check_tokens(field: str, tokens: int) -> None:
    """Raise `ApiError` for a request with too many tokens in all of its prompts."""
    if tokens > MOST_TOKENS:
        problem = f"make about {tokens:,} tokens of prompts, more than {MOST_TOKENS:,}"
        raise wrong(field, f"{tokens:,} tokens", problem, "Send them in parts")


def texts_of(entry: Mapping[str, Any]) -> list[str]:
    """Return the texts of a question's object."""
    options = [*(entry.get("choices") or ()), *(entry.get("levels") or ())]
    return [entry["instructions"], *(str(value) for option in options for value in option.values())]


def _answer(entry: Mapping[str, Any], decision: Any) -> dict[str, Any]:
    """Return the answer's object: a question's own name comes back, null if it has none."""
    kind = entry["type"]
    common = {"type": kind, "name": entry.get("name")}
    if kind == "predicate":
        return {**common, "probability": decision.probabilities[True]}
    shares, confidence = [*decision.probabilities.items()], decision.confidence
    if kind == "choice":
        choices = [{"value": value, "probability": share} for value, share in shares]
        return {**common, "choice": decision.value, "probabilities": choices, "confidence": confidence}
    levels = [{"value": at, "label": label, "probability": share} for at, (label, share) in enumerate(shares)]
    mean = sum(at * share for at, (_, share) in enumerate(shares))
    return {**common, "score": mean, "probabilities": levels, "confidence": confidence}


async def rerank(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer with the documents in the order of their relevance."""
    served, session = await generation.model_of(exchange, fields)
    exchange.names = {**exchange.names, "prompt": "documents"}
    query = fields["query"]
    documents = [one if isinstance(one, str) else one["text"] for one in fields.pop("documents")]
    options = {name: fields[name] for name in ("top_n", "instruction") if name in fields}
    tokens = estimate(documents) + len(documents) * estimate([query, fields.get("instruction", "")])
    check_tokens("documents", tokens)
    with exchange.takes_on(tokens) as active:
        call = session.rerank(query, documents, **options, **_options(fields))
        ranking = await _answers(exchange, active, call, tokens)
    shown = fields.get("return_documents", True)
    results = [
        {
            "index": one.index,
            "relevance_score": one.relevance,
            **({"document": {"text": one.document}} if shown else {}),
        }
        for one in ranking
    ]
    await exchange.reply({**_ranked(served, exchange, call.usage.prompt_tokens), "results": results})


def _ranked(served: ServedModel, exchange: Exchange, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"rerank-{exchange.request_id}", "object": "list", "model": served.name, "usage": usage}


def _options(fields: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if fields.get("priority"):
        options["priority"] = -fields["priority"]
    if "cache_salt" in fields:
        options["salt"] = fields["cache_salt"]
    return options
