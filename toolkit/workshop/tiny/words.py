"""The words of the corpus, and the small grammar that builds sentences from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

CHOICE = re.compile(r"\[([^\[\]]*)\]")
VOWELS = "aeiou"


def fill(rng: Random, frame: str, **fields: object) -> str:
    """Fill a frame: `[one|other]` is a random choice (nesting is possible), `{name}` a field."""
    while CHOICE.search(frame):
        frame = CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), frame, count=1)
    return frame.format(**fields)


def a(noun: str) -> str:
    """Return the noun with its indefinite article."""
    starts_with_a_vowel = noun[0].lower() in VOWELS and not noun.startswith("uni")
    return f"an {noun}" if starts_with_a_vowel else f"a {noun}"


def split_words(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def plural(noun: str) -> str:
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in VOWELS:
        return noun[:-1] + "ies"
    return noun + "s"


def count(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else plural(noun)}"


def join(parts: list[str], word: str = "and") -> str:
    """Join words as `x`, `x and y`, or `x, y and z`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {word} {parts[-1]}"


@dataclass(frozen=True, slots=True)
class Being:
    """A character in a text: a child, a grown-up or an animal with a name."""

    name: str
    female: bool
    kind: str

    def words(self, prefix: str = "") -> dict[str, str]:
        """Return name, kind and pronouns as fields of a frame; capitalised forms have capitalised names."""
        he, him, his = ("she", "her", "her") if self.female else ("he", "him", "his")
        return {
            f"{prefix}name": self.name, f"{prefix}kind": self.kind,
            f"{prefix}who": f"{self.name} the {self.kind}" if self.kind not in ("girl", "boy") else self.name,
            f"{prefix}he": he, f"{prefix}him": him, f"{prefix}his": his, f"{prefix}He": he.capitalize(),
            f"{prefix}His": his.capitalize(), f"{prefix}himself": "herself" if self.female else "himself",
        }  # fmt: skip


GIRLS = split_words(
    "Lily Mia Anna Zoe Ruby Emma Nora Ella Ivy Clara Rosa Alice Maya Lucy Sara Tara Olivia Sophie Grace Hannah Julia "
    "Laura Eva Elena Amy Chloe Freya Greta Helen Iris Jane Kate Lena Marie Nina Paula Rachel Sofia Tina Vera Wendy "
    "Yara Amina Aisha Priya Mei Yuki Fatima Ingrid Carmen Bianca Diana Esther Flora Heidi Leila Martha Naomi Stella"
)
BOYS = split_words(
    "Tom Ben Max Leo Sam Jack Finn Oscar Noah Hugo Theo Adam Omar Ravi Kai Luke Alex Peter Paul John James David "
    "Daniel Henry George Felix Emil Jonas Lukas Simon Martin Victor Ivan Erik Lars Nils Pablo Diego Carlos Marco Luca "
    "Mario Ali Hassan Amir Arjun Chen Hiro Kenji Samuel Thomas William Edward Frank Harry Isaac Jacob Robert Will"
)
SHE_ANIMALS = split_words("Coco Daisy Hazel Bella Poppy Luna Dotty Olive Mimi Pearl")
HE_ANIMALS = split_words("Pip Rusty Milo Pepper Bruno Toby Charlie Biscuit Otto Basil")
ANIMALS = split_words(
    "cat dog rabbit bear fox mouse duck owl frog hedgehog turtle squirrel penguin lion elephant monkey"
)
BEASTS = split_words(
    "horse pony cow pig goat sheep hen goose swan parrot crow snail bee ant butterfly spider beetle wolf tiger zebra "
    "giraffe camel panda koala kangaroo dolphin whale shark crab octopus seal otter beaver badger deer moose hamster "
    "lizard"
)
FIGURES = split_words(
    "dragon robot princess prince knight wizard witch pirate fairy unicorn ghost giant mermaid elf king queen monster "
    "astronaut clown troll baker farmer sailor painter teacher doctor gardener snowman dinosaur"
)
HEROES = (*ANIMALS, *BEASTS, *FIGURES)
PETS = split_words("cat dog rabbit hamster parrot turtle pony goldfish")
GROWN_UPS = split_words(
    "baker teacher farmer doctor painter gardener pilot singer writer sailor builder nurse cook driver"
)
COLOURS = split_words("red blue green yellow white black brown orange purple pink grey")
TOYS = split_words(
    "ball kite boat hat book drum bell lamp cup scarf bag box puzzle key umbrella whistle clock coat "
    "balloon basket blanket bike brush bucket button candle chair coin cloak crown doll feather flag flute guitar "
    "hammer jacket ladder mask map mirror necklace pencil pillow ring rope shell shoe spoon stone sword telescope "
    "train truck wagon watch"
)
FOODS = split_words(
    "apples pears carrots berries bread cheese cake plums nuts cookies grapes tomatoes pancakes "
    "muffins cherries peaches"
)
COUNTABLE = split_words("apple pear cookie shell stone flower leaf egg button coin star pencil marble nut berry fish")
IRREGULAR = {
    "leaf": "leaves", "fish": "fish", "mouse": "mice", "sheep": "sheep", "child": "children", "goldfish": "goldfish",
}  # fmt: skip
PLACES = tuple(
    (place.partition(" ")[0], place.partition(" ")[2])
    for place in phrases(
        "in the park, in the forest, in the garden, in the meadow, in the village, in the valley, by the river, "
        "by the lake, by the sea, by the old mill, on the hill, on the farm, at the beach, at the market, near "
        "the old bridge, near the tall tree, in the mountains, in the desert, in the jungle, in the castle, in "
        "the city, in the cave, on the island, on the moon, at the harbour, at the zoo, at the school, at the "
        "station, behind the waterfall, behind the church, near the volcano, by the pond"
    )
)
CITIES = split_words("Paris London Rome Oslo Cairo Lima Tokyo Berlin Madrid Vienna Dublin Prague")
TRAITS = ("kind", "brave", "curious", "shy", "clever", "cheerful", "gentle", "quiet", "playful", "careful", "busy")
TIMES = phrases(
    "One morning, One sunny day, One afternoon, One rainy morning, One cold day, One warm evening, One day, On a "
    "windy day, Early one morning, One Sunday, After lunch one day"
)
WEEKDAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = split_words("January February March April May June July August September October November December")
HOBBIES = split_words("reading swimming painting singing dancing running cooking fishing drawing skating")


SHE, HE = split_words("princess witch fairy mermaid queen hen cow"), split_words("prince wizard king")
INVENTED = 0.3  # share of invented names, so that a name must be copied and cannot be known
SYLLABLES = split_words(
    "ba be bo da do fa fi ka ki ko la li lo ma mi mo na ni no pa ra ri ro sa so ta ti to va vi za zo "
    "bri cla dra fen gar hel jo ju kel lum mar nel or pim qui ral sen tir ul ver wen xa yor zin che sha thu bo du fe "
    "go gu ha he hi ho hu ja ku le lu me mu ne nu pe pi po re ru se si su te tu ve vo wa we wi ya yo ze"
)


def invented_name(rng: Random) -> str:
    """Return an invented name, so that text about it can be copied but not known."""
    name = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()
    return name + rng.choice(("", "n", "s", "l"))


def child(rng: Random, exclude: tuple[str, ...] = ()) -> Being:
    female = rng.random() < 0.5
    name = rng.choice([name for name in (GIRLS if female else BOYS) if name not in exclude])
    if rng.random() < INVENTED:
        name = invented_name(rng)
    return Being(name, female, "girl" if female else "boy")


def animal(rng: Random, exclude: tuple[str, ...] = ()) -> Being:
    female = rng.random() < 0.5
    names = (*SHE_ANIMALS, *GIRLS[:40]) if female else (*HE_ANIMALS, *BOYS[:40])
    name = rng.choice([name for name in names if name not in exclude])
    if rng.random() < INVENTED:
        name = invented_name(rng)
    kind = rng.choice([kind for kind in HEROES if kind not in exclude])
    if rng.random() < INVENTED / 3:
        kind = invented_name(rng).lower()
    female = kind in SHE or (female and kind not in HE)
    return Being(name, female, kind)


def being(rng: Random, exclude: tuple[str, ...] = ()) -> Being:
    return child(rng, exclude) if rng.random() < 0.35 else animal(rng, exclude)
