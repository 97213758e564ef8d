"""Short stories with named characters, and questions about them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from workshop.tiny.plots import BELONGINGS, ENDINGS, ERRANDS, LEAVING, MARKS, OBSTACLES, OPENINGS, PLOTS
from workshop.tiny.words import (
    COLOURS,
    FOODS,
    PLACES,
    TIMES,
    TOYS,
    TRAITS,
    Being,
    a,
    being,
    fill,
)

QUESTS = 0.85  # share of stories that are an errand and an obstacle


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


def frames(rng: Random) -> tuple[str, list[list[str]], tuple[tuple[str, str], ...]]:
    """Return a plot's name, the frames of its two paragraphs, and questions that only this plot answers."""
    if rng.random() >= QUESTS:
        plot = rng.choice(sorted(PLOTS))
        half = rng.choice((3, 4))
        return plot, [list(PLOTS[plot][:half]), list(PLOTS[plot][half:])], ()
    errand, obstacle, way = rng.choice(sorted(ERRANDS)), rng.choice(sorted(OBSTACLES)), rng.choice((0, 1))
    aim, trouble = ERRANDS[errand], OBSTACLES[obstacle]
    questions = (
        ("[Why did {name} leave home|What did {name} want to do|Why did {name} go to {there}]?", aim.why),
        ("[What was in the way|What was the problem on the way|What happened on the way]?", trouble.what),
    )
    parts = [[aim.start, rng.choice(LEAVING)], [trouble.trouble, trouble.ways[way], aim.end]]
    return f"{errand} {obstacle} {way}", parts, questions


def plot_of(text: str) -> str:
    """Return the errand and the obstacle, or the plot, whose typical words a story has; "" if it has none."""
    names = [name for name, errand in ERRANDS.items() if errand.mark in text]
    names += [name for name, obstacle in OBSTACLES.items() if obstacle.mark in text]
    return " ".join(names or [name for name, mark in MARKS.items() if mark in text][:1])


def fitting(rng: Random, hero: Being | None) -> tuple[str, list[list[str]], tuple[tuple[str, str], ...], Being, Being]:
    """Return a plot, its hero and a friend; neither is an animal that the plot has already."""
    hero = hero or being(rng)
    while True:
        plot, parts, questions = frames(rng)
        words = set(re.findall(r"\w+", str(parts)))
        friend = being(rng, exclude=(hero.name, hero.kind))
        if hero.kind not in words and friend.kind not in words:
            return plot, parts, questions, hero, friend


def story(rng: Random, *, hero: Being | None = None, opening: str | None = None) -> Story:
    plot, parts, special, hero, friend = fitting(rng, hero)
    words = set(re.findall(r"\w+", str(parts)))
    colour, food = rng.choice(COLOURS), rng.choice(FOODS)
    toy = rng.choice([toy for toy in TOYS if toy not in words and toy not in (hero.kind, friend.kind)])
    (home_in, home), (place_in, place) = rng.sample(PLACES, 2)
    trait = rng.choice(TRAITS)
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
    middle, after = ([fill(rng, sentence, **fields).strip() for sentence in part] for part in parts)
    last = fill(rng, ending, **fields)
    text = "\n\n".join((first, " ".join(middle), " ".join([*after, last])))
    templates = (
        (
            "[Who was the story about|What is the name of the {kind} in the story|Who is the hero of the story|"
            "Who is the story about|What was the {kind} called]?",
            "The story is about {name}.",
        ),
        ("Where [did|does] {name} live?", "{name} lived {home}."),
        ("What [did|does] {name} have?", "{name} had {a_thing}."),
        ("What colour [was|is] {name}'s {toy}?", "{name}'s {toy} was {colour}."),
        (
            "[Who was {name}'s friend|What was the name of the friend|Who was the friend in the story]?",
            "{name}'s friend was {pname}.",
        ),
        ("[What was {name} like|What kind of {kind} was {name}]?", "{name} was {a_trait} {kind}."),
        ("How did {name} feel at the end?", f"At the end, {{name}} felt {feeling}."),
        *special,
    )
    questions = tuple((fill(rng, question, **fields), answer.format(**fields)) for question, answer in templates)
    return Story(" ".join(text.split(" ")), hero, friend, thing, place, plot, questions)


WANTED = (
    "about {a_kind}",
    "about {a_kind}",
    "about {a_kind}",
    "about {a_kind} named {name}",
    "about {a_kind} called {name}",
    "about {who}",
    "about {name}",
    "about {a_thing}",
    "about {a_kind} and {a_thing}",
    "about {name} and {a_thing}",
    "about {a_kind} who lives {home}",
    "about {name}, who lives {home}",
    "about {name} and {pname}",
    "with {name} and {pname}",
    "with {a_kind} in it",
    "that happens {place}",
    "that happens {place}, with {a_kind}",
    "where {name} goes to {there}",
)
REQUESTS = (
    "[Tell|Please tell|Write] me a [short |little |bedtime |new |]story {wanted}[|.|, please.]",
    "[Tell me|Write|Write me|Please write] a [short |little |bedtime |]story {wanted}.",
    "[Can|Could] you tell me a [|short ]story {wanted}?",
    "[I would like|I want] a story {wanted}, please.",
    "[A|Another] story {wanted}, please.",
)
PLAIN = (
    "[Tell|Write] me a [|bedtime |short ]story[, please|]. ",
    "[Tell|Write|Please tell me|Please write] a story.",
    "[Once upon a time|Begin with: Once upon a time]",
    "[Can you tell me|I would like] a story[?|, please.]",
)


def request(rng: Random, story: Story) -> str:
    """Return a user's request for this story that names some of its contents; one in eight asks for any story."""
    if rng.random() < 0.12:
        return fill(rng, rng.choice(PLAIN)).strip()
    place = next(f"{preposition} {place}" for preposition, place in PLACES if place == story.place)
    lived = next(answer for question, answer in story.questions if " live?" in question)
    fields = {
        **story.hero.words(),
        **story.friend.words("p"),
        "a_kind": a(story.hero.kind),
        "a_thing": a(story.thing) if rng.random() < 0.7 else a(story.thing.split()[-1]),
        "place": place,
        "there": story.place,
        "home": lived.split(" lived ")[1].removesuffix("."),
    }
    return fill(rng, rng.choice(REQUESTS).replace("{wanted}", rng.choice(WANTED)), **fields)


def story_on_request(rng: Random) -> tuple[str, str]:
    tale = story(rng)
    return request(rng, tale), tale.text
