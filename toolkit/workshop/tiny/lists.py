"""Lists, and JSON records: built from sentences, and questions about them."""

from __future__ import annotations

import json
from random import Random

from workshop.tiny.facts import Person, ask, people, state
from workshop.tiny.words import (
    ANIMALS,
    BOYS,
    CITIES,
    COLOURS,
    COUNTABLE,
    FOODS,
    GIRLS,
    GROWN_UPS,
    HOBBIES,
    MONTHS,
    TOYS,
    WEEKDAYS,
    fill,
    invented_name,
    join,
    plural,
)

GROUPS = {
    "animals": ANIMALS,
    "colours": COLOURS,
    "things to eat": FOODS,
    "jobs": GROWN_UPS,
    "hobbies": HOBBIES,
    "toys": TOYS,
    "cities": CITIES,
}
ANY_WORD = tuple(word for group in (*GROUPS.values(), GIRLS, BOYS, COUNTABLE, WEEKDAYS, MONTHS) for word in group)
WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
KEYS = {"age": "age", "city": "city", "food": "likes", "job": "job", "hobby": "hobby"}


def numbered(items: list[str]) -> str:
    return "\n".join(f"{number}. {item}" for number, item in enumerate(items, 1))


def bulleted(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def listing(rng: Random) -> tuple[str, str]:
    """Return a request for a list, and the list."""
    kind = rng.random()
    if kind < 0.45:
        group = rng.choice(sorted(GROUPS))
        number = rng.randint(2, 6)
        # In alphabetical order, so that the most likely next item is never a repetition.
        items = sorted(rng.sample(GROUPS[group], number))
        amount = rng.choice((WORDS[number], str(number)))
        return fill(rng, f"[Name|List|Write a list of|Tell me|Give me] {amount} {group}."), numbered(items)
    if kind < 0.6:
        start = rng.randint(0, 20)
        stop = start + rng.randint(3, 8)
        return f"Count from {start} to {stop}.", ", ".join(str(value) for value in range(start, stop + 1))
    if kind < 0.7:
        names, word = rng.choice(((WEEKDAYS, "days of the week"), (MONTHS, "months of the year")))
        return fill(rng, f"[Name|List|Write down] the {word}."), numbered(list(names))
    if kind < 0.85:
        items = rng.sample(
            FOODS + tuple(plural(noun) for noun in COUNTABLE if plural(noun) not in FOODS), rng.randint(2, 5)
        )
        return fill(
            rng, f"[I need|I want to buy|Please get] {join(items)}. [Write a shopping list|Make a list|Write a list]."
        ), bulleted(items)
    values = rng.sample(range(30), rng.randint(3, 5))
    return f"Sort these numbers: {', '.join(map(str, values))}.", ", ".join(map(str, sorted(values)))


def record(person: Person, facts: list[str]) -> str:
    values = {"age": person.age, "city": person.city, "food": person.food, "job": person.job, "hobby": person.hobby}
    return json.dumps({"name": person.name} | {KEYS[fact]: values[fact] for fact in facts})


def from_sentences(rng: Random) -> tuple[str, str]:
    """Return sentences with facts about a person, and the request to write them as JSON."""
    (person,) = people(rng, 1)
    facts = rng.sample(sorted(KEYS), rng.choice((1, 2, 3)))
    text = " ".join(state(rng, person, fact) for fact in facts)
    return f"{text} " + fill(
        rng, "[Write this as JSON|Write a JSON record|Give me a JSON record|Answer in JSON]."
    ), record(person, facts)


def read_back(rng: Random) -> tuple[str, str]:
    """Return a JSON record, and a question about it."""
    (person,) = people(rng, 1)
    facts = rng.sample(sorted(KEYS), rng.choice((2, 3)))
    request, answer = ask(rng, person, rng.choice(facts))
    return f"{record(person, facts)}\n{request}", answer


def invented_record(rng: Random) -> tuple[str, str]:
    (person,) = people(rng, 1)
    facts = ["age", *rng.sample(sorted(set(KEYS) - {"age"}), rng.choice((1, 2)))]
    if rng.random() < 0.5:
        return fill(rng, "[Write|Give me|Make up] a JSON record [of|about|for] [a person|somebody]."), record(
            person, facts
        )
    return fill(rng, f"[Write|Give me|Make up] a JSON record [about|for] {person.name}."), record(person, facts)


def repeat(rng: Random) -> tuple[str, str]:
    """Return a request to repeat random words; only copying can answer it."""
    words = " ".join(nonsense(rng, rng.randint(2, 8)))
    return fill(rng, "[Repeat|Say this again|Repeat after me|Say]: ") + words, words


def nonsense(rng: Random, number: int) -> list[str]:
    """Return random words without order or meaning."""
    return [invented_name(rng) if rng.random() < 0.1 else rng.choice(ANY_WORD) for _ in range(number)]


def copies(rng: Random) -> str:
    """Return a line of random words, repeated: an exercise in copying from the context."""
    line = " ".join(nonsense(rng, rng.randint(4, 16)))
    return "\n".join([line] * rng.randint(2, 4))


KINDS = (listing, listing, listing, from_sentences, from_sentences, read_back, invented_record, repeat)


def question(rng: Random) -> tuple[str, str]:
    return rng.choice(KINDS)(rng)


def document(rng: Random) -> str:
    """Return records or a list as plain text, without a conversation."""
    if rng.random() < 0.5:
        facts = rng.sample(sorted(KEYS), rng.choice((2, 3)))
        return "\n".join(record(person, facts) for person in people(rng, rng.randint(2, 4)))
    request, answer = listing(rng)
    return f"{request}\n{answer}"
