"""Conversations about people and stories: facts, and questions about them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rekindle._src.tiny_training.people import FACTS, UNKNOWN, ask, fields, people, state
from rekindle._src.tiny_training.stories import request, story
from rekindle._src.tiny_training.words import BOYS, GIRLS, fill, join

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
        "I live in {city}.",
        "{city} is a [nice|beautiful|lovely] place.",
        "[Where do I live|In which city do I live]?",
        "You live in {city}.",
    ),
    "food": (
        "I [like|love] {food}.",
        "[That is good to know.|A good choice!]",
        "[What do I like|What do I like to eat]?",
        "You like {food}.",
    ),
    "pet": (
        "I have {a_pet} named {pet}.",
        "{pet} is a [nice|lovely] name for {a_pet}.",
        "[What is the name of my {kind}|What is my {kind} called]?",
        "Your {kind} is called {pet}.",
    ),
    "job": (
        "I am {a_job}.",
        "[That is a nice job.|Being {a_job} sounds interesting.]",
        "[What is my job|What do I do]?",
        "You are {a_job}.",
    ),
    "thing": (
        "I have {a_thing}.",
        "[That sounds nice.|I like {colour} things.]",
        "What colour is my {toy}?",
        "Your {toy} is {colour}.",
    ),
    "age": (
        "I am {age} years old.",
        "[That is a good age.|Thank you for telling me.]",
        "How old am I?",
        "You are {age} years old.",
    ),
}


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
