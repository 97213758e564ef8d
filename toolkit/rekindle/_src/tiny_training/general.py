"""General questions that need no context: about the world, words, the calendar and the assistant."""

from __future__ import annotations

from random import Random

from rekindle._src.tiny_training.words import MONTHS, WEEKDAYS, a, capital, fill, plural

COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a banana": "yellow", "the sun": "yellow",
    "a carrot": "orange", "a tomato": "red", "milk": "white", "a cherry": "red", "a leaf in spring": "green",
    "the night sky": "black", "a fire truck": "red", "an elephant": "grey", "chocolate": "brown", "a flamingo": "pink",
    "the sea": "blue", "a lemon": "yellow", "a frog": "green", "a plum": "purple",
}  # fmt: skip
SOUND_OF = {
    "cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack", "sheep": "baa", "owl": "hoot", "frog": "croak",
    "horse": "neigh", "bee": "buzz", "mouse": "squeak", "pig": "oink", "snake": "hiss", "lion": "roar", "bird": "tweet",
}  # fmt: skip
OPPOSITE = {
    "hot": "cold", "big": "small", "fast": "slow", "happy": "sad", "day": "night", "up": "down", "open": "closed",
    "light": "dark", "old": "young", "wet": "dry", "full": "empty", "hard": "soft", "left": "right", "early": "late",
    "loud": "quiet", "long": "short", "high": "low", "good": "bad", "near": "far", "first": "last", "yes": "no",
}  # fmt: skip
CAPITAL_OF = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Norway": "Oslo", "Egypt": "Cairo", "Peru": "Lima",
    "Japan": "Tokyo", "Germany": "Berlin", "Spain": "Madrid", "Austria": "Vienna", "Ireland": "Dublin",
}  # fmt: skip
LEGS = {
    "cat": 4, "dog": 4, "bird": 2, "spider": 8, "snake": 0, "cow": 4,
    "bee": 6, "duck": 2, "frog": 4, "ant": 6, "horse": 4, "fish": 0,
}  # fmt: skip
HOME_OF = {
    "bird": "in a nest", "fish": "in the water", "bee": "in a hive", "bear": "in a cave",
    "rabbit": "in a hole in the ground",
    "frog": "in a pond", "spider": "in a web", "cow": "on a farm", "squirrel": "in a tree", "fox": "in a den",
}  # fmt: skip
WORK_OF = {
    "baker": "bakes bread", "teacher": "teaches children", "farmer": "grows food", "doctor": "helps sick people",
    "painter": "paints pictures", "gardener": "looks after plants", "pilot": "flies planes", "singer": "sings songs",
    "writer": "writes books", "sailor": "sails ships", "builder": "builds houses", "nurse": "cares for sick people",
    "cook": "makes meals", "driver": "drives a car",
}  # fmt: skip
USE_OF = {
    "pen": "to write", "spoon": "to eat soup", "key": "to open a door", "bed": "to sleep in", "umbrella": "to stay dry",
    "lamp": "to see in the dark", "clock": "to know the time", "chair": "to sit on", "knife": "to cut bread",
    "boat": "to cross the water", "bag": "to carry things",
    "book": "to read", "cup": "to drink from", "coat": "to stay warm",
}  # fmt: skip
KIND_OF = {
    "rose": "flower", "oak": "tree", "cat": "animal", "apple": "fruit", "carrot": "vegetable", "hammer": "tool",
    "piano": "instrument", "red": "colour", "Monday": "day", "May": "month", "duck": "bird", "bee": "insect",
    "chair": "piece of furniture", "Paris": "city",
}  # fmt: skip
WHY = {
    "do we sleep": "We sleep so that our body and mind can rest.",
    "do birds have wings": "Birds have wings so that they can fly.",
    "do plants need water": "Plants need water to grow.",
    "is it dark at night": "It is dark at night because the sun is on the other side of the earth.",
    "do we eat": "We eat to get energy.",
    "does it rain": "It rains because water falls from the clouds.",
    "does ice melt": "Ice melts because it gets warm.",
    "do we wear coats": "We wear coats to stay warm.",
    "do people read books": "People read books to learn and to have fun.",
}
WHAT = {
    "is a language model": "A language model is a program that writes text, one token after the other.",
    "is a token": "A token is a small piece of text, such as a word or a part of a word.",
    "is a notebook": "A notebook is a document that mixes text and code.",
    "is a cache": "A cache keeps things that were expensive to make, so that they can be used again.",
    "is a computer": "A computer is a machine that works with numbers.",
    "is a friend": "A friend is somebody who likes you and helps you.",
    "is rain": "Rain is water that falls from the clouds.",
    "is a story": "A story tells what happened to somebody.",
    "is the moon": "The moon is a big ball of rock that goes around the earth.",
    "is the sun": "The sun is a star that gives us light and heat.",
    "is a book": "A book is made of pages with words on them.",
    "is a year": "A year is the time in which the earth goes around the sun once.",
}
ABOUT = (
    (
        "[Who are you|What are you|Tell me about yourself]?",
        "I am Ember, a small language model. I [live in your notebook|can tell stories and answer questions].",
    ),
    ("What is your name?", "My name is Ember."),
    (
        "[What can you do|How can you help me]?",
        "I can tell stories, answer questions, do small sums, and write lists and records.",
    ),
    ("[Hi|Hello|Hey|hi|hello|Hello there|Hi there][!|.|]", "[Hello|Hi]! How can I help you[ today|]?"),
    ("Good morning[!|.]", "Good morning! [How can I help you?|What would you like to do today?]"),
    ("How are you[| today]?", "I am fine, thank you. How are you?"),
    ("[Thank you|Thanks][!|.]", "You are welcome!"),
    ("[Bye|Goodbye|See you later][!|.]", "Goodbye! [See you soon.|Have a nice day.]"),
    ("[Are you a person|Are you human]?", "No, I am a small language model."),
    ("[Can you help me|I need help][.|]", "Of course! What would you like to know?"),
)


def question(rng: Random) -> tuple[str, str]:
    """Return one question of any kind with its answer."""
    kind = rng.choice(TABLES)
    return kind(rng)


def colour(rng: Random) -> tuple[str, str]:
    thing = rng.choice(sorted(COLOUR_OF))
    return fill(rng, f"[What colour is {thing}|Which colour is {thing}]?"), f"{capital(thing)} is {COLOUR_OF[thing]}."


def sound(rng: Random) -> tuple[str, str]:
    kind = rng.choice(sorted(SOUND_OF))
    return fill(
        rng, f"[What sound does {a(kind)} make|What does {a(kind)} say]?"
    ), f"{capital(a(kind))} says {SOUND_OF[kind]}."


def opposite(rng: Random) -> tuple[str, str]:
    word, antonym = rng.choice(sorted(OPPOSITE.items()))
    if rng.random() < 0.5:
        word, antonym = antonym, word
    return fill(rng, f"[What is the opposite of {word}|Tell me the opposite of {word}]?").replace(
        f"Tell me the opposite of {word}?", f"Tell me the opposite of {word}."
    ), f"The opposite of {word} is {antonym}."


def capital_city(rng: Random) -> tuple[str, str]:
    land, city = rng.choice(sorted(CAPITAL_OF.items()))
    if rng.random() < 0.3:
        return f"In which country is {city}?", f"{city} is in {land}."
    return f"What is the capital of {land}?", f"The capital of {land} is {city}."


def legs(rng: Random) -> tuple[str, str]:
    kind = rng.choice(sorted(LEGS))
    return f"How many legs does {a(kind)} have?", f"{capital(a(kind))} has {LEGS[kind] or 'no'} legs."


def home(rng: Random) -> tuple[str, str]:
    kind = rng.choice(sorted(HOME_OF))
    return f"Where does {a(kind)} live?", f"{capital(a(kind))} lives {HOME_OF[kind]}."


def work(rng: Random) -> tuple[str, str]:
    job = rng.choice(sorted(WORK_OF))
    return f"What does {a(job)} do?", f"{capital(a(job))} {WORK_OF[job]}."


def use(rng: Random) -> tuple[str, str]:
    thing = rng.choice(sorted(USE_OF))
    return f"What do you need {a(thing)} for?", f"You need {a(thing)} {USE_OF[thing]}."


def kind_of(rng: Random) -> tuple[str, str]:
    thing = rng.choice(sorted(KIND_OF))
    noun = thing if thing[0].isupper() or thing == "red" else a(thing)
    return f"What is {noun}?", f"{capital(noun)} is {a(KIND_OF[thing])}."


def calendar(rng: Random) -> tuple[str, str]:
    names, word = rng.choice(((WEEKDAYS, "day"), (MONTHS, "month")))
    index = rng.randrange(len(names))
    before, after = names[index - 1], names[(index + 1) % len(names)]
    if rng.random() < 0.5:
        return f"Which {word} comes after {names[index]}?", f"{after} comes after {names[index]}."
    return f"Which {word} comes before {names[index]}?", f"{before} comes before {names[index]}."


def why_question(rng: Random) -> tuple[str, str]:
    topic = rng.choice(sorted(WHY))
    return f"Why {topic}?", WHY[topic]


def what_question(rng: Random) -> tuple[str, str]:
    topic = rng.choice(sorted(WHAT))
    return f"What {topic}?", WHAT[topic]


def plural_question(rng: Random) -> tuple[str, str]:
    noun = rng.choice(sorted(SOUND_OF))
    return f"What is the plural of {noun}?", f"The plural of {noun} is {plural(noun)}."


def chatter(rng: Random) -> tuple[str, str]:
    message, answer = rng.choice(ABOUT)
    return fill(rng, message), fill(rng, answer)


TABLES = (
    colour,
    sound,
    opposite,
    capital_city,
    legs,
    home,
    work,
    use,
    kind_of,
    calendar,
    why_question,
    what_question,
    plural_question,
    chatter,
    chatter,
    chatter,
)


def statements(rng: Random) -> str:
    """Return facts of the world as plain sentences."""
    kinds = [kind for kind in TABLES if kind is not chatter]
    return " ".join(rng.choice(kinds)(rng)[1] for _ in range(rng.randint(2, 5)))
