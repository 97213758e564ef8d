"""Invented people with facts: sentences that state a fact, and questions that ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rekindle._src.tiny_training.words import (
    BOYS,
    CITIES,
    COLOURS,
    FOODS,
    GIRLS,
    GROWN_UPS,
    HE_ANIMALS,
    HOBBIES,
    INVENTED,
    PETS,
    SHE_ANIMALS,
    TOYS,
    a,
    capital,
    fill,
    invented_name,
)


@dataclass(frozen=True, slots=True)
class Person:
    """A person with the facts that texts state and questions ask for."""

    name: str
    thing: tuple[str, str]
    city: str
    food: str
    age: int
    job: str
    pet: tuple[str, str]
    hobby: str


def people(rng: Random, number: int) -> list[Person]:
    """Return different people; no two of them share a fact."""
    names = [invented_name(rng) if rng.random() < INVENTED else name for name in rng.sample(GIRLS + BOYS, number)]
    toys, colours, cities, foods = (rng.sample(words, number) for words in (TOYS, COLOURS, CITIES, FOODS))
    jobs, kinds, hobbies = (rng.sample(words, number) for words in (GROWN_UPS, PETS, HOBBIES))
    pets, ages = rng.sample(SHE_ANIMALS + HE_ANIMALS, number), rng.sample(range(5, 60), number)
    return [
        Person(
            names[i],
            (colours[i], toys[i]),
            cities[i],
            foods[i],
            ages[i],
            jobs[i],
            (kinds[i], pets[i]),
            hobbies[i],
        )
        for i in range(number)
    ]


FACTS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "thing": (
        "[{name} has {a_thing}.|{name} has {a_thing}.|{name} owns {a_thing}.|{A_thing} belongs to {name}.]",
        ("What does {name} have?", "What [|thing ]does {name} own?"),
        "{name} has {a_thing}.",
    ),
    "colour": (
        "{name}'s {toy} is {colour}.",
        ("What colour is {name}'s {toy}?", "Which colour does {name}'s {toy} have?"),
        "{name}'s {toy} is {colour}.",
    ),
    "city": (
        "[{name} lives in {city}.|{name} lives in {city}.|{name}'s home is in {city}.]",
        ("Where does {name} live?", "In which city does {name} live?", "Where is {name}'s home?"),
        "{name} lives in {city}.",
    ),
    "food": (
        "[{name} [likes|loves] {food}.|{name} likes to eat {food}.]",
        ("What does {name} like?", "What does {name} like to eat?"),
        "{name} likes {food}.",
    ),
    "age": (
        "{name} is {age} years old.",
        ("How old is {name}?", "What is {name}'s age?"),
        "{name} is {age} years old.",
    ),
    "job": ("{name} is {a_job}.", ("What is {name}'s job?", "What does {name} do?"), "{name} is {a_job}."),
    "pet": (
        "{name} has {a_pet} [named|called] {pet}.",
        ("What is the name of {name}'s {kind}?", "What is {name}'s {kind} called?"),
        "{name}'s {kind} is called {pet}.",
    ),
    "hobby": (
        "[{name}'s hobby is {hobby}.|{name} enjoys {hobby}.]",
        ("What is {name}'s hobby?", "What does {name} do for fun?"),
        "{name}'s hobby is {hobby}.",
    ),
}
WHO = {
    "thing": ("Who has {a_thing}?", "{name} has {a_thing}."),
    "city": ("Who lives in {city}?", "{name} lives in {city}."),
    "food": ("Who [likes|loves] {food}?", "{name} likes {food}."),
    "age": ("Who is {age} years old?", "{name} is {age} years old."),
    "job": ("Who is the {job}?", "{name} is the {job}."),
    "pet": ("Who has {a_pet}?", "{name} has {a_pet}."),
}


UNKNOWN = (
    ("Where does {name} live?", "I do not know where {name} lives."),
    ("How old is {name}?", "I do not know how old {name} is."),
    ("What does {name} like?", "I do not know what {name} likes."),
    ("What is {name}'s job?", "I do not know what {name}'s job is."),
)


def fields(person: Person) -> dict[str, object]:
    return {
        "name": person.name,
        "a_thing": a(" ".join(person.thing)),
        "A_thing": capital(a(" ".join(person.thing))),
        "colour": person.thing[0],
        "toy": person.thing[1],
        "city": person.city,
        "food": person.food,
        "age": person.age,
        "job": person.job,
        "a_job": a(person.job),
        "a_pet": a(person.pet[0]),
        "kind": person.pet[0],
        "pet": person.pet[1],
        "hobby": person.hobby,
    }


def ask(rng: Random, person: Person, fact: str) -> tuple[str, str]:
    """Return a question about one fact of a person, or about the person with that fact, and its answer."""
    if fact in WHO and rng.random() < 0.35:
        question, answer = WHO[fact]
    else:
        _, questions, answer = FACTS[fact]
        question = rng.choice(questions)
    return fill(rng, question, **fields(person)), fill(rng, answer, **fields(person))


def state(rng: Random, person: Person, fact: str) -> str:
    return fill(rng, FACTS[fact][0], **fields(person))
