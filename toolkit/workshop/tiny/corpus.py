"""The corpus: an endless, seeded stream of documents of every kind, plain or written as a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from workshop.tiny import facts, lists, stories
from workshop.tiny.facts import Turns
from workshop.tiny.questions import general_question, sheet_of_sums, statements, sum_question, unknown_question

END = "<|endoftext|>"
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
TRAIN, HELD_OUT = "train", "held out"  # seeds of the two streams; training step N reads the stream `train N`

SYSTEM = (
    "You are a helpful assistant.",
    "You are Ember, a small and friendly assistant.",
    "You are a storyteller.",
    "Answer in one sentence.",
    "You answer questions about people and things.",
)
ANSWERS = (
    *(general_question, general_question, sum_question, sum_question, sum_question),
    *(lists.question, lists.question, unknown_question, unknown_question),
)
SHARES = {
    "story": 0.07,
    "story on request": 0.16,
    "people": 0.13,
    "me": 0.14,
    "story questions": 0.10,
    "comparison": 0.02,
    "single": 0.18,
    "several": 0.07,
    "long": 0.03,
    "sums": 0.06,
    "record": 0.02,
    "plain questions": 0.01,
    "plain statements": 0.01,
}


def chat(turns: Turns, system: str | None = None) -> str:
    """Return a conversation in the form of the chat template."""
    parts = [("system", system)] if system else []
    for message, answer in turns:
        parts += [("user", message), ("assistant", answer)]
    return "\n".join(f"{TURN}{role}\n{text}{TURN_END}" for role, text in parts)


def mixed_turns(rng: Random, number: int) -> Turns:
    """Return questions of different kinds, one after the other."""
    return [rng.choice(ANSWERS)(rng) for _ in range(number)]


def talk(rng: Random) -> tuple[str, str]:
    """Return one turn about any topic, a story now and then."""
    return stories.story_on_request(rng) if rng.random() < 0.12 else rng.choice(ANSWERS)(rng)


def long_conversation(rng: Random) -> tuple[str | None, Turns]:
    """Return facts at the beginning, other turns in between, and a question about the beginning at the end."""
    system, start = facts.about_a_story(rng) if rng.random() < 0.5 else (None, facts.about_people(rng))
    middle = [
        turn
        for _ in range(rng.choice((1, 2, 3)))
        for turn in (stories.story_on_request(rng), *mixed_turns(rng, rng.randint(1, 4)))
    ]
    return system, [*start, *middle, *rng.sample(start[1:] or start, 1)]


def document(rng: Random) -> str:
    """Return one document of a random kind."""
    (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
    if kind == "story":
        return stories.story(rng).text
    if kind == "sums":
        return sheet_of_sums(rng)
    if kind == "record":
        return lists.document(rng)
    if kind == "plain statements":
        return statements(rng)
    if kind == "plain questions":
        return "\n".join(f"Q: {question}\nA: {answer}" for question, answer in mixed_turns(rng, rng.randint(2, 4)))
    system = rng.choice(SYSTEM) if rng.random() < 0.25 else None
    if kind == "story on request":
        return chat([stories.story_on_request(rng)], system)
    if kind in ("story questions", "long"):
        context, turns = facts.about_a_story(rng) if kind == "story questions" else long_conversation(rng)
        return chat(turns, context or system)
    if kind == "people":
        turns = facts.about_people(rng)
        (statement, _), *rest = turns
        if rng.random() < 0.15 and "?" not in statement:
            return chat(rest, rng.choice((statement, f"You know this: {statement}")))
        return chat(turns, system)
    if kind == "me":
        return chat(facts.about_me(rng, talk), system)
    if kind == "comparison":
        return chat(facts.summary(rng), system)
    return chat(mixed_turns(rng, 1 if kind == "single" else rng.randint(2, 5)), system)


def documents(seed: str, copying: float = 0.0, sheets: float = 0.0) -> Iterator[str]:
    """Yield the documents of a seed without end, with shares of copying and of sums; equal on every machine."""
    rng = Random(seed)
    while True:
        kind = rng.random()
        if kind < copying:
            yield lists.copies(rng)
        else:
            yield sheet_of_sums(rng) if kind < copying + sheets else document(rng)
