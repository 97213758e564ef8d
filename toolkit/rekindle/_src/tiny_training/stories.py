"""Short stories with named characters, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rekindle._src.tiny_training.plots import BELONGINGS, ENDINGS, OPENINGS, PLOTS
from rekindle._src.tiny_training.words import (
    COLOURS,
    FOODS,
    HEROES,
    PLACES,
    TIMES,
    TOYS,
    TRAITS,
    Being,
    a,
    being,
    child,
    fill,
)


@dataclass(frozen=True, slots=True)
class Story:
    """A story's text, its characters and things, and questions about it with their answers."""

    text: str
    hero: Being
    friend: Being
    thing: str
    place: str
    plot: str
    questions: tuple[tuple[str, str], ...]


def story(rng: Random, *, hero: Being | None = None, opening: str | None = None) -> Story:
    hero = hero or being(rng)
    friend = being(rng, taken=(hero.name, hero.kind) if hero.kind in HEROES else (hero.name,))
    colour, toy, food = rng.choice(COLOURS), rng.choice(TOYS), rng.choice(FOODS)
    (home_in, home), (place_in, place) = rng.sample(PLACES, 2)
    trait, plot = rng.choice(TRAITS), rng.choice(sorted(PLOTS))
    thing = f"{colour} {toy}"
    fields = {
        **hero.words(),
        **friend.words("p"),
        "His_p": friend.words()["His"],
        "a_kind": a(hero.kind),
        "a_pkind": a(friend.kind),
        "a_young_pkind": f"a young {friend.kind}",
        "trait": trait,
        "a_trait": a(trait),
        "thing": thing,
        "a_thing": a(thing),
        "toy": toy,
        "colour": colour,
        "home": f"{home_in} {home}",
        "place": f"{place_in} {place}",
        "there": place,
        "food": food,
        "time": rng.choice(TIMES),
    }
    feeling, ending = rng.choice(ENDINGS)
    first = fill(rng, f"{opening or rng.choice(OPENINGS)} {rng.choice(BELONGINGS)}", **fields)
    middle = [fill(rng, sentence, **fields).strip() for sentence in PLOTS[plot]]
    last = fill(rng, ending, **fields)
    half = rng.choice((3, 4))
    text = "\n\n".join((first, " ".join(middle[:half]), " ".join([*middle[half:], last])))
    asked = (
        (
            "[Who is the story about|What is the name of the {kind} in the story|Who is the hero of the story]?",
            "The story is about {name}.",
        ),
        ("Where [did|does] {name} live?", "{name} lived {home}."),
        ("What [did|does] {name} have?", "{name} had {a_thing}."),
        ("What colour [was|is] {name}'s {toy}?", "{name}'s {toy} was {colour}."),
        ("[Who was {name}'s friend|What was the name of the friend]?", "{name}'s friend was {pname}."),
        ("[What was {name} like|What kind of {kind} was {name}]?", "{name} was {a_trait} {kind}."),
        ("How did {name} feel at the end?", f"At the end, {{name}} felt {feeling}."),
    )
    questions = tuple((fill(rng, question, **fields), answer.format(**fields)) for question, answer in asked)
    return Story(" ".join(text.split(" ")), hero, friend, thing, place, plot, questions)


REQUESTS = (
    "[Tell me|Write|Write me|Please tell me] a [short |little |]story about {a_kind} named {name}.",
    "Can you tell me a story about {a_kind} named {name}?",
    "[Tell me|Write|Please write] a [short |]story about {who}.",
    "I would like a story about {a_kind} called {name}, please.",
    "[Tell me|Write] a story about {name} and {a_thing}.",
    "[Tell me|Write] a story with {name} and {pname}.",
    "[Tell me|Write] a story that happens {place}. The hero is {name}.",
    "Tell me a [bedtime |]story.",
    "[Tell|Write] me a story[, please|].",
    "Tell me a story about {a_kind}.",
    "[Once upon a time|Begin with: Once upon a time]",
)


def request(rng: Random, told: Story) -> str:
    """A user's request for this story."""
    place = next(f"{preposition} {place}" for preposition, place in PLACES if place == told.place)
    fields = {
        **told.hero.words(),
        **told.friend.words("p"),
        "a_kind": a(told.hero.kind),
        "a_thing": a(told.thing),
        "place": place,
    }
    return fill(rng, rng.choice(REQUESTS), **fields)


def told_on_request(rng: Random) -> tuple[str, str]:
    told = story(rng, hero=child(rng) if rng.random() < 0.3 else None)
    return request(rng, told), told.text
