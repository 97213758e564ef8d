"""Conversations about people and stories: facts, and questions about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from workshop.tiny.stories import request, story
from workshop.tiny.words import (
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
    join,
)

Turns = list[tuple[str, str]]  # pairs of the user's message and the assistant's answer


def about_people(rng: Random) -> Turns:
    """Return facts about a few people, and questions about some of them, at once or in later turns."""
    group = people(rng, rng.choice((1, 2, 2, 3, 3, 4)))
    if rng.random() < 0.5:
        known = [(person, fact) for fact in [rng.choice(sorted(FACTS))] for person in group]
    else:
        allowed = sorted(set(FACTS) - {rng.choice(("thing", "colour"))})
        known = [(person, fact) for person in group for fact in rng.sample(allowed, rng.choice((1, 2)))]
    if rng.random() < 0.5:
        rng.shuffle(known)
    text = " ".join(state(rng, person, fact) for person, fact in known)
    questions = [ask(rng, *fact) for fact in rng.sample(known, min(len(known), rng.choice((1, 1, 2, 3))))]
    if rng.random() < 0.15:
        stranger = rng.choice([name for name in GIRLS + BOYS if name not in {person.name for person in group}])
        unknown, answer = rng.choice(UNKNOWN)
        questions.append((unknown.format(name=stranger), answer.format(name=stranger)))
    if rng.random() < 0.7:
        (question, answer), *rest = questions
        return [(f"{text} {question}", answer), *rest]
    return [(text, fill(rng, "[Thank you, I will remember that.|I see.|Okay, I will remember that.]")), *questions]


# A user's statement about themselves, the reply, the later question and its answer.
OWN = {
    "name": (
        "[My name is|I am|I'm|Hello, my name is|Hi, I am|Hi, I'm|Hello! I am|Call me|My name's] {name}.",
        "[Hello|Hi|Nice to meet you], {name}!",
        "[What is my name|What's my name|Do you know my name|What am I called|Do you remember my name|Who am I]?",
        "Your name is {name}.",
    ),
    "city": (
        "I live in {city}.", "{city} is a [nice|beautiful|lovely] place.", "[Where do I live|In which city do I live]?",
        "You live in {city}.",
    ),
    "food": (
        "I [like|love] {food}.", "[That is good to know.|A good choice!]", "[What do I like|What do I like to eat]?",
        "You like {food}.",
    ),
    "pet": (
        "I have {a_pet} named {pet}.", "{pet} is a [nice|lovely] name for {a_pet}.",
        "[What is the name of my {kind}|What is my {kind} called]?", "Your {kind} is called {pet}.",
    ),
    "job": (
        "I am {a_job}.", "[That is a nice job.|Being {a_job} sounds interesting.]", "[What is my job|What do I do]?",
        "You are {a_job}.",
    ),
    "thing": (
        "I have {a_thing}.", "[That sounds nice.|I like {colour} things.]", "What colour is my {toy}?",
        "Your {toy} is {colour}.",
    ),
    "age": (
        "I am {age} years old.", "[That is a good age.|Thank you for telling me.]", "How old am I?",
        "You are {age} years old.",
    ),
}  # fmt: skip


def about_me(rng: Random, talk: Callable[[Random], tuple[str, str]]) -> Turns:
    """Return a user's facts about themselves, perhaps other `talk`, and later questions about the facts."""
    (me,) = people(rng, 1)
    words = fields(me)
    if rng.random() < 0.06:
        return [(fill(rng, OWN["name"][2]), "I do not know your name. What is your name?")]
    chosen = ["name"] if rng.random() < 0.4 else rng.sample(sorted(OWN), rng.choice((1, 2, 3)))
    statements = [(fill(rng, OWN[key][0], **words), fill(rng, OWN[key][1], **words)) for key in chosen]
    if len(statements) > 1 and rng.random() < 0.3:
        reply = f"Nice to meet you, {me.name}!" if "name" in chosen else "Thank you for telling me."
        statements = [(" ".join(message for message, _ in statements), reply)]
    elif chosen == ["name"] and rng.random() < 0.25:
        message, answer = talk(rng)
        statements = [(f"{statements[0][0]} {message}", answer)]
    between = [talk(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 4)))]
    questions = [
        (fill(rng, OWN[key][2], **words), fill(rng, OWN[key][3], **words)) for key in rng.sample(chosen, len(chosen))
    ]
    return statements + between + questions


def about_a_story(rng: Random) -> tuple[str | None, Turns]:
    """Return a story and questions about it; the story is the system's text, the user's, or the assistant's answer."""
    tale = story(rng)
    questions = rng.sample(tale.questions, rng.choice((1, 2, 3, 4)))
    kind = rng.random()
    if kind < 0.3:
        return fill(
            rng, "[Read this story and answer the questions.|Answer questions about this story.]"
        ) + f"\n\n{tale.text}", questions
    if kind < 0.55:
        (question, answer), *rest = questions
        return None, [(f"{tale.text}\n\n{question}", answer), *rest]
    return None, [(request(rng, tale), tale.text), *questions]


def summary(rng: Random) -> Turns:
    """Return facts about several people, and a question that compares them."""
    group = people(rng, 2 if rng.random() < 0.6 else 3)
    kind = rng.choice(("older", "younger", "all"))
    text = " ".join(state(rng, person, "age") for person in group)
    if kind == "all":
        fact = rng.choice(("city", "food"))
        text = " ".join(state(rng, person, fact) for person in group)
        values = join([str(fields(person)[fact]) for person in group])
        question = "Where do they live?" if fact == "city" else "What do they like?"
        return [(f"{text} {question}", f"They {'live in' if fact == 'city' else 'like'} {values}.")]
    more, most = ("older", "oldest") if kind == "older" else ("younger", "youngest")
    best = (max if kind == "older" else min)(group, key=lambda person: person.age)
    word = f"{more} one" if len(group) == 2 else most
    return [(f"{text} Who is the {word}?", f"{best.name} is the {word}.")]


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
    things, animals = zip(colours, toys, strict=True), zip(kinds, pets, strict=True)
    return list(map(Person, names, things, cities, foods, ages, jobs, animals, hobbies))


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
    "job": ("Who is the {job}?", "{name} is the {job}."), "pet": ("Who has {a_pet}?", "{name} has {a_pet}."),
}  # fmt: skip


UNKNOWN = (
    ("Where does {name} live?", "I do not know where {name} lives."),
    ("How old is {name}?", "I do not know how old {name} is."),
    ("What does {name} like?", "I do not know what {name} likes."),
    ("What is {name}'s job?", "I do not know what {name}'s job is."),
)


def fields(person: Person) -> dict[str, object]:
    return {
        "name": person.name, "a_thing": a(" ".join(person.thing)), "A_thing": capital(a(" ".join(person.thing))),
        "colour": person.thing[0], "toy": person.thing[1], "city": person.city, "food": person.food, "age": person.age,
        "job": person.job, "a_job": a(person.job), "a_pet": a(person.pet[0]), "kind": person.pet[0],
        "pet": person.pet[1], "hobby": person.hobby,
    }  # fmt: skip


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
