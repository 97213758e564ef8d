"""Questions that need no context: about the world, sums, things outside of the model's world, lists and records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
    a,
    capital,
    child,
    count,
    fill,
    invented_name,
    join,
    plural,
    split_words,
)

Question = Callable[[Random], tuple[str, str]]

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
    "cat": 4, "dog": 4, "bird": 2, "spider": 8, "snake": "no", "cow": 4,
    "bee": 6, "duck": 2, "frog": 4, "ant": 6, "horse": 4, "fish": "no",
}  # fmt: skip
PLURALS = {noun: plural(noun) for noun in SOUND_OF}
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
        "I am Ember, a small language model. I [live in your notebook|can tell stories and answer questions]."),
    ("What is your name?", "My name is Ember."),
    (
        "[What can you do|How can you help me]?",
        "I can tell stories, answer questions, do small sums, and write lists and records."),
    ("[Hi|Hello|Hey|hi|hello|Hello there|Hi there][!|.|]", "[Hello|Hi]! How can I help you[ today|]?"),
    ("Good morning[!|.]", "Good morning! [How can I help you?|What would you like to do today?]"),
    ("How are you[| today]?", "I am fine, thank you. How are you?"), ("[Thank you|Thanks][!|.]", "You are welcome!"),
    ("[Bye|Goodbye|See you later][!|.]", "Goodbye! [See you soon.|Have a nice day.]"),
    ("[Are you a person|Are you human]?", "No, I am a small language model."),
    ("[Can you help me|I need help][.|]", "Of course! What would you like to know?"),
)  # fmt: skip


def general_question(rng: Random) -> tuple[str, str]:
    """Return one question of any kind with its answer."""
    return rng.choice(TABLES)(rng)


def looked_up(table: Mapping[str, object], question: str, answer: str, *, article: bool = True) -> Question:
    """Return a kind of question about the entries of a table; `thing` and `Thing` are a key, `value` its entry."""

    def ask(rng: Random) -> tuple[str, str]:
        key = rng.choice(sorted(table))
        thing = a(key) if article else key
        fields = {"thing": thing, "Thing": capital(thing), "value": table[key]}
        return fill(rng, question.format(**fields)), answer.format(**fields)

    return ask


LOOKED_UP = (
    looked_up(COLOUR_OF, "[What colour is {thing}|Which colour is {thing}]?", "{Thing} is {value}.", article=False),
    looked_up(SOUND_OF, "[What sound does {thing} make|What does {thing} say]?", "{Thing} says {value}."),
    looked_up(LEGS, "How many legs does {thing} have?", "{Thing} has {value} legs."),
    looked_up(HOME_OF, "Where does {thing} live?", "{Thing} lives {value}."),
    looked_up(WORK_OF, "What does {thing} do?", "{Thing} {value}."),
    looked_up(USE_OF, "What do you need {thing} for?", "You need {thing} {value}."),
    looked_up(WHY, "Why {thing}?", "{value}", article=False),
    looked_up(WHAT, "What {thing}?", "{value}", article=False),
    looked_up(PLURALS, "What is the plural of {thing}?", "The plural of {thing} is {value}.", article=False),
)


def opposite(rng: Random) -> tuple[str, str]:
    word, antonym = rng.choice(sorted(OPPOSITE.items()))
    if rng.random() < 0.5:
        word, antonym = antonym, word
    question = fill(rng, f"[What is the opposite of {word}?|Tell me the opposite of {word}.]")
    return question, f"The opposite of {word} is {antonym}."


def capital_city(rng: Random) -> tuple[str, str]:
    land, city = rng.choice(sorted(CAPITAL_OF.items()))
    if rng.random() < 0.3:
        return f"In which country is {city}?", f"{city} is in {land}."
    return f"What is the capital of {land}?", f"The capital of {land} is {city}."


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


def chatter(rng: Random) -> tuple[str, str]:
    message, answer = rng.choice(ABOUT)
    return fill(rng, message), fill(rng, answer)


TABLES: tuple[Question, ...] = (  # in an order on which the corpus depends
    *LOOKED_UP[:2], opposite, capital_city, *LOOKED_UP[2:6], kind_of, calendar, *LOOKED_UP[6:], *(chatter,) * 3,
)  # fmt: skip


def statements(rng: Random) -> str:
    """Return facts of the world as plain sentences."""
    kinds = [kind for kind in TABLES if kind is not chatter]
    return " ".join(rng.choice(kinds)(rng)[1] for _ in range(rng.randint(2, 5)))


SIGNS = {"+": "plus", "-": "minus", "*": "times"}


def sum_numbers(rng: Random) -> tuple[int, str, int, int]:
    """Return `left sign right = result` with results from 0 to 100; about half of them with small numbers."""
    sign = rng.choice("+++---*")
    if sign == "*":
        left, right = rng.randint(0, 10), rng.randint(0, 10)
        return left, sign, right, left * right
    total = rng.randint(0, 20) if rng.random() < 0.35 else rng.randint(0, 100)
    part = rng.randint(0, total)
    if sign == "+":
        return part, sign, total - part, total
    return total, sign, part, total - part


def sum_question(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.25:
        return word_problem(rng)
    left, sign, right, result = sum_numbers(rng)
    kind = rng.random()
    if kind < 0.5:
        return fill(rng, f"[What is|What's|How much is] {left} {sign} {right}?"), f"{left} {sign} {right} = {result}"
    if kind < 0.75:
        return fill(
            rng, f"[How much is|What is|Calculate] {left} {SIGNS[sign]} {right}[?|.]"
        ), f"{left} {SIGNS[sign]} {right} is {result}."
    if kind < 0.93:
        return fill(rng, f"{left} {sign} {right}[ =| = ?|]"), f"{left} {sign} {right} = {result}"
    high, low = max(left, right), min(left, right)
    if high == low:
        high += 1
    word = rng.choice(("larger", "smaller"))
    pair = rng.sample((high, low), 2)
    return f"Which number is {word}, {pair[0]} or {pair[1]}?", f"{high if word == 'larger' else low} is {word}."


def word_problem(rng: Random) -> tuple[str, str]:
    first = child(rng)
    second = child(rng, exclude=(first.name,))
    noun = rng.choice(COUNTABLE)
    left, right = rng.randint(1, 20), rng.randint(1, 10)
    words = {**first.words(), **second.words("p"), "things": plural(noun)}
    if rng.random() < 0.5:
        frame = "{name} has {left}. {pname} gives {him} {right} more. How many {things} does {name} have[ now|]?"
        result = left + right
    else:
        left = left + right
        gone = "[gives {right} to {pname}|loses {right}]"
        frame = "{name} has {left}. {He} " + gone + ". How many {things} does {name} have[ left|]?"
        result = left - right
    text = fill(rng, frame, **words, left=count(left, noun), right=right)
    return text, f"{first.name} has {count(result, noun)}." if result else f"{first.name} has no {plural(noun)}."


def sheet_of_sums(rng: Random) -> str:
    """Return a sheet of sums, one per line, as plain text."""
    sheet = [sum_numbers(rng) for _ in range(rng.randint(6, 24))]
    return "\n".join(f"{left} {sign} {right} = {result}" for left, sign, right, result in sheet)


UNKNOWN_ANSWER = "I don't know that, I am only a tiny model."
UNKNOWN_SLOTS: dict[str, tuple[str, ...]] = {
    "land": split_words(
        "Mongolia Brazil Canada Kenya India China Russia Greece Turkey Chile Cuba Nepal Iran Poland Finland Portugal "
        "Belgium Hungary Mexico Bolivia Ghana Nigeria Vietnam Thailand Australia Sweden Denmark Iceland Morocco Korea"
    ),
    "town": split_words(
        "Boston Chicago Munich Sydney Mumbai Milan Lyon Geneva Seattle Kyoto Hamburg Leeds Toronto Dallas"
    ),
    "person": (
        "Albert Einstein", "Napoleon", "Mozart", "Shakespeare", "Cleopatra", "Isaac Newton", "Marie Curie", "Picasso",
        "Beethoven", "Julius Caesar", "Gandhi", "Darwin", "Plato", "Columbus", "Galileo", "Bach",
    ),
    "work": (
        "Hamlet", "War and Peace", "the Odyssey", "the Mona Lisa", "Star Wars", "the Bible", "Moby Dick", "Faust",
        "Titanic", "the Magic Flute", "Don Quixote", "Alice in Wonderland", "Dracula", "Frankenstein",
    ),
    "field": (
        "quantum physics", "algebra", "chemistry", "economics", "philosophy", "genetics", "relativity", "calculus",
        "machine learning", "astronomy", "law", "politics", "democracy", "inflation", "evolution", "gravity",
        "photosynthesis", "electricity", "the blockchain", "the stock market", "a black hole", "a neural network",
        "a transformer", "a compiler", "an atom", "a virus", "a vaccine", "DNA", "the internet", "a database",
    ),
    "code": split_words("Python Java JavaScript Rust Haskell SQL Linux Docker Windows Excel Jupyter Git JAX NumPy"),
    "machine": (
        "the telephone", "the car", "the wheel", "the light bulb", "the radio", "the airplane", "paper", "the camera",
        "the computer", "the printing press", "the steam engine", "television",
    ),
    "tongue": split_words("French German Spanish Italian Chinese Japanese Russian Arabic Latin Greek Dutch Polish"),
    "dish": ("pizza", "soup", "bread", "sushi", "an omelette", "pasta", "curry", "ice cream", "tea", "lasagne"),
    "game": split_words("football chess tennis basketball poker golf hockey baseball rugby"),
    "firm": split_words("Google Apple Tesla Amazon Microsoft Toyota Nokia Sony Siemens Boeing"),
}  # fmt: skip
UNKNOWN_QUESTIONS = (
    "What is the capital of {land}?",
    "[How many people live in|What is the population of] [{land}|{town}]?",
    "Who is the [president|king|queen|prime minister|leader] of {land}?",
    "[What language do they speak|What do people eat] in {land}?",
    "[How far is it|How long does it take] from {town} to {town2}?",
    "[Where is {town}|How big is {land}|Where is {land}|In which country is {town}]?",
    "[Who was|Who is|Tell me about] {person}[?|.]",
    "[When was {person} born|When did {person} die|Where was {person} born|What did {person} do]?",
    "[Who wrote|Who made|What happens in|Do you know] {work}?",
    "What is {field}?",
    "[Explain {field} to me|Explain {field}|Tell me about {field}].",
    "[How does {field} work|Can you explain {field}]?",
    "How do I [learn|use|install|write a program in|sort a list in] {code}?",
    "[Write|Give me] a [program|function|script] in {code}.",
    "[What is {code}|What is new in {code}|Which version of {code} is the best]?",
    "[Who invented {machine}|When was {machine} invented|How does {machine} work]?",
    "[How do you say hello in|How do you say thank you in] {tongue}?",
    "Translate [this|good morning|cat|my name] into {tongue}.",
    "[Do you speak|Can you speak|Can you understand] {tongue}?",
    "How do I [make|cook] {dish}?",
    "[What is the recipe for|How many calories are in] {dish}?",
    "Who won the [last |]{game} [game|world cup|championship]?",
    "[What are the rules of|Who is the best player of] {game}?",
    "[Who founded {firm}|What does {firm} make|What is the price of {firm} shares|Who is the boss of {firm}]?",
    "[What is the weather|Will it rain|How warm is it] [today|tomorrow|in {town}|in {town} today]?",
    "[What time is it|What is the date|Which day is it today|What is in the news today|What year is it]?",
    "What happened in [17{digit}{digit2}|18{digit}{digit2}|19{digit}{digit2}]?",
    "What is the square root of {digit}{digit2}{digit3}?",
    "What is {digit3}{digit2}{digit}{digit2} [times|plus|divided by] {digit2}{digit3}{digit}?",
    "[How old is the universe|How big is the earth|How far away is the moon|How hot is the sun|How deep is the sea]?",
    "[What is the meaning of life|Is there a god|What is love|What is time|What happens after death]?",
    "[What is the tallest mountain|What is the longest river|What is the largest animal|What is the oldest city]?",
    "[Should I buy|What does it cost to buy|Where can I buy] a [house|phone|laptop|new car|bicycle|dress]?",
    "[I have a headache|My back hurts|I cannot sleep]. What should I do?",
    "[Who is|What do you know about|Have you heard of|Tell me about] {invented}[?|.]",
    "[Where is {invented}|What is {invented}|What does {invented} mean]?",
)


def unknown_question(rng: Random) -> tuple[str, str]:
    """Return a question that the model cannot answer, and its answer that it does not know."""
    words = {slot: rng.choice(options) for slot, options in UNKNOWN_SLOTS.items()}
    words |= {digit: str(rng.randint(1, 9)) for digit in ("digit", "digit2", "digit3")}
    town = rng.choice([town for town in UNKNOWN_SLOTS["town"] if town != words["town"]])
    return fill(rng, rng.choice(UNKNOWN_QUESTIONS), **words, town2=town, invented=invented_name(rng)), UNKNOWN_ANSWER


GROUPS = {
    "animals": ANIMALS, "colours": COLOURS, "things to eat": FOODS, "jobs": GROWN_UPS, "hobbies": HOBBIES, "toys": TOYS,
    "cities": CITIES,
}  # fmt: skip
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
        others = tuple(plural(noun) for noun in COUNTABLE if plural(noun) not in FOODS)
        items = rng.sample(FOODS + others, rng.randint(2, 5))
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
        request = fill(rng, "[Write|Give me|Make up] a JSON record [of|about|for] [a person|somebody].")
        return request, record(person, facts)
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


LIST_KINDS = (listing, listing, listing, from_sentences, from_sentences, read_back, invented_record, repeat)


def list_question(rng: Random) -> tuple[str, str]:
    return rng.choice(LIST_KINDS)(rng)


def records(rng: Random) -> str:
    """Return records or a list as plain text, without a conversation."""
    if rng.random() < 0.5:
        facts = rng.sample(sorted(KEYS), rng.choice((2, 3)))
        return "\n".join(record(person, facts) for person in people(rng, rng.randint(2, 4)))
    request, answer = listing(rng)
    return f"{request}\n{answer}"
