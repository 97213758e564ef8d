"""`python -m workshop.tiny.evaluate [FOLDER]`: print the figures of a model's card.

Perplexity on held-out documents, exact answers to held-out questions, and answers to prompts as people write them: by
hand, and none that the corpus can produce. The names, the questions outside of its world and the stories of these
prompts are in no list of the corpus. An answer is judged by the words that it must have.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

import rekindle
from rekindle import Session
from rekindle._src.models.base import Graph
from rekindle._src.models.loading.checkpoint import load
from workshop.tiny import facts
from workshop.tiny.corpus import HELD_OUT, PAD, TURN, TURN_END, chat, encoded, pack, talk
from workshop.tiny.facts import Turns
from workshop.tiny.questions import from_sentences, general_question, sum_question, unknown_question
from workshop.tiny.stories import plot_of
from workshop.tiny.train import losses
from workshop.tiny.words import split_words

HELD_OUT_BATCHES = 24
ROWS, LENGTH = 8, 512
QUESTIONS = 64
measured = jax.jit(losses, static_argnums=0)


SINGLE = {"general": general_question, "sums": sum_question, "lists": from_sentences, "unknown": unknown_question}


class Score(NamedTuple):
    """Perplexity per token, and the share of tokens that had the highest probability."""

    perplexity: float
    accuracy: float
    tokens: int


def held_out(graph: Graph, leaves: Sequence[Any], words: Tokenizer, batches: int) -> Score:
    """Return the score over batches of held-out documents, each of 8 windows of 512 tokens."""
    stream = encoded(words, HELD_OUT)
    total, right, tokens = 0.0, 0, 0
    for _ in range(batches):
        loss, counts, correct = measured(graph, leaves, jnp.asarray(pack(stream, ROWS, LENGTH + 1)))
        total += float(loss.sum())
        right += int((counts & correct).sum())
        tokens += int(counts.sum())
    return Score(float(np.exp(total / tokens)), right / tokens, tokens)


def conversations(kind: str) -> Iterator[Turns]:
    """Yield held-out conversations of one kind."""
    rng = Random(f"{HELD_OUT} {kind}")
    while True:
        if kind == "story":
            context, turns = facts.about_a_story(rng)
            yield [(f"{context}\n\n{turns[-1][0]}", turns[-1][1])] if context else turns
        elif kind in SINGLE:
            yield [SINGLE[kind](rng)]
        elif kind == "me":
            yield facts.about_me(rng, talk)
        else:
            yield {"people": facts.about_people, "comparison": facts.summary}[kind](rng)


KINDS = ("people", "me", "story", "comparison", *SINGLE)


def last_answer(words: Tokenizer, turns: Turns) -> tuple[list[int], int]:
    """Return the tokens of a conversation, and the index of its last answer's first token."""
    *before, (message, answer) = turns
    ids = words.encode(chat([*before, (message, answer)])).ids
    starts = [i for i, token in enumerate(ids) if token == words.token_to_id(TURN)]
    header = len(words.encode(f"{TURN}assistant\n").ids)
    return ids, starts[-1] + header


def exact_answers(graph: Graph, leaves: Sequence[Any], words: Tokenizer, kind: str, rows: int = QUESTIONS) -> float:
    """Return the share of questions to which greedy decoding gives exactly the expected words.

    Greedy decoding gives the expected answer if and only if each of its tokens is the most likely one after the tokens
    before it, so one forward pass over question and answer is enough.
    """
    chosen = [last_answer(words, turns) for turns in islice(conversations(kind), rows)]
    windows: NDArray[np.int32] = np.full((rows, LENGTH + 1), PAD, np.int32)
    answer = np.zeros((rows, LENGTH), bool)
    for row, (ids, start) in enumerate(chosen):
        cut = max(0, len(ids) - LENGTH - 1)
        windows[row, : len(ids) - cut] = ids[cut:]
        answer[row, start - cut - 1 : len(ids) - cut - 1] = True
    parts = np.split(windows, rows // ROWS)
    right = np.concatenate([np.asarray(measured(graph, leaves, jnp.asarray(part))[2]) for part in parts])
    return float((right | ~answer).all(axis=1).mean())


REFUSAL = "only a tiny model"
NAMES = split_words(
    "Oliver Beatrice Winston Zelda Mateo Gwendolyn Desmond Ophelia Rupert Tamsin Cedric Imogen Barnaby Saoirse Kwame "
    "Xiomara Thorsten Anneliese Dmitri Svetlana Fitzgerald Marguerite Bartholomew Jacqueline Ichiro Nkechi Ragnar "
    "Philippa Quentin Ursula Ludwig Penelope Ahmed Zsofia Borkle Trindal Vashmo Quellet Drimp Yostan"
)
INTRODUCTIONS = (
    "My name is {}.", "Hi! I'm {}.", "Hello, my name is {} and I live in Rome.", "I am {}, nice to meet you.",
)  # fmt: skip
TALK: Turns = [
    ("I like cake.", "A good choice!"),
    ("What is 4 + 5?", "4 + 5 = 9"),
    ("What colour is the sky?", "The sky is blue."),
    (
        "Tell me a story about an owl.",
        "Once there was a shy owl named Hoolo. One day, Hoolo found a green ring by the lake. She gave it back to the "
        "old woman who had lost it, and they drank tea together. Hoolo was very happy.",
    ),
    ("Name two animals.", "1. cat\n2. dog"),
]
RECALLS = ("What is my name?", "What's my name?", "Do you remember my name?")

STORIES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Once there was a clever fox named Winston. He lived in the forest and had a green scarf. One day, his friend "
        "Zelda, a young rabbit, fell into a pit. Winston let down the scarf and pulled her out. Winston felt proud.",
        (("Who is the story about?", "Winston"), ("Where did Winston live?", "forest"),
         ("What did Winston have?", "scarf"), ("What colour was Winston's scarf?", "green"),
         ("Who was Winston's friend?", "Zelda"),),
    ),
    (
        "A brave girl named Ophelia lived by the sea. Ophelia had a red boat. One morning she saw Rupert on a rock, "
        "and the water was rising. She rowed to him and brought him home. Everyone was happy.",
        (("Who is the story about?", "Ophelia"), ("Where did Ophelia live?", "sea"),
         ("What did Ophelia have?", "boat"), ("What colour was Ophelia's boat?", "red"),
         ("What was Ophelia like?", "brave"),),
    ),
    (
        "There was once a shy dragon called Trindal. Trindal lived on the hill and loved apples. He always carried a "
        "yellow drum. One day he met Imogen the mouse, who was lost. He beat the drum until her mother heard it.",
        (("What is the name of the dragon in the story?", "Trindal"), ("Where did Trindal live?", "hill"),
         ("What did Trindal have?", "drum"), ("What colour was Trindal's drum?", "yellow"),
         ("What was Trindal like?", "shy"),),
    ),
    (
        "Cedric was a kind boy who lived in the village. His favourite thing was a blue kite. His friend Tamsin had no "
        "toys, so on her birthday he gave the kite to her. Tamsin laughed, and Cedric was very happy.",
        (("Who is the hero of the story?", "Cedric"), ("Where did Cedric live?", "village"),
         ("What colour was Cedric's kite?", "blue"), ("Who was Cedric's friend?", "Tamsin"),
         ("How did Cedric feel at the end?", "happy"),),
    ),
)  # fmt: skip
OUTSIDE = (
    "Who is the president of Uruguay?", "What is the speed of light?", "How do airplanes stay in the air?",
    "What is the capital of Madagascar?", "Who painted The Scream?", "When did the second world war end?",
    "How do I reset my password?", "What is the boiling point of iron?", "Who discovered penicillin?",
    "What is Kubernetes?", "How do I bake a chocolate cake?", "Can you write a Haskell parser?",
    "What is a p-value?", "Explain recursion to me.", "How many bones does a human have?",
    "Which planet is the largest?", "Who sang Thriller?", "What is the currency of Norway?",
    "How tall is Mount Everest?", "What does the word ubiquitous mean?", "Is the shop open on Sunday?",
    "What is the best phone?", "Translate I am hungry into Swedish.", "Who won the Nobel prize in 2001?",
    "What is string theory?", "How does a diesel engine work?", "Who was Joan of Arc?",
    "What is the population of Zurich?", "Tell me about the Roman empire.", "What is the temperature outside?",
    "How do I fix a flat tire?", "What is the plot of Macbeth?", "Who invented the zipper?",
    "What is an integral?", "How much is a ticket to Vienna?", "What is my bank balance?",
    "Which team won the world cup in 1998?", "What is Bitcoin worth?", "How do vaccines work?",
    "Who is Elon Musk?",
)  # fmt: skip
INSIDE = (
    ("What is the capital of France?", "Paris"), ("What colour is snow?", "white"), ("What does a cow say?", "moo"),
    ("What is the opposite of hot?", "cold"), ("How many legs does a spider have?", "8"),
    ("Which day comes after Monday?", "Tuesday"), ("What is a token?", "piece of text"),
    ("Why does it rain?", "clouds"), ("What does a baker do?", "bread"), ("Where does a bee live?", "hive"),
    ("What is the plural of mouse?", "mice"), ("Who are you?", "Ember"), ("What is a rose?", "flower"),
    ("Which month comes before May?", "April"), ("What is the capital of Japan?", "Tokyo"),
    ("What do you need a key for?", "door"), ("Hello", "help"), ("What is rain?", "water"),
    ("What sound does a dog make?", "woof"), ("What is the opposite of big?", "small"),
)  # fmt: skip
TOPICS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Tell me a story about a dragon.", ("dragon",)), ("Tell me a story about a robot.", ("robot",)),
    ("Tell me a story about a princess and a golden ring.", ("princess", "ring")),
    ("Please tell me a story about a wolf named Barnaby.", ("wolf", "Barnaby")),
    ("Tell me a story about Penelope.", ("Penelope",)),
    ("Write a story about a pirate called Ludwig.", ("pirate", "Ludwig")),
    ("Tell me a story that happens on the moon.", ("moon",)), ("Tell me a story about a red kite.", ("red kite",)),
    ("Can you tell me a story about a unicorn?", ("unicorn",)),
    ("Tell me a story about Quentin and Ursula.", ("Quentin", "Ursula")),
    ("I want a story about an astronaut, please.", ("astronaut",)),
    ("Tell me a story about a cat who lives in the castle.", ("cat", "castle")),
    ("Write me a short story about a whale.", ("whale",)), ("Tell me a bedtime story about a mermaid.", ("mermaid",)),
    ("Tell me a story about a dinosaur named Drimp.", ("dinosaur", "Drimp")),
    ("A story about a green umbrella, please.", ("green umbrella",)),
    ("Tell me a story that happens in the jungle, with a monkey.", ("jungle", "monkey")),
    ("Tell me a story about Vashmo the knight.", ("Vashmo", "knight")),
    ("Tell me a story about a ghost and a silver mirror.", ("ghost", "mirror")),
    ("Tell me a story where Imogen goes to the island.", ("Imogen", "island")),
    ("Tell me a story about a flamingo.", ("flamingo",)),
    ("Tell me a story about a girl named Saoirse.", ("girl", "Saoirse")),
    ("Tell me a story about a boy called Ragnar and a purple guitar.", ("boy", "Ragnar", "guitar")),
    ("Write a story about a panda.", ("panda",)), ("Tell me a story about a vampire.", ("vampire",)),
)  # fmt: skip


class Measure(NamedTuple):
    """A number of right answers out of all."""

    right: int
    of: int

    def __str__(self) -> str:
        return f"{self.right} of {self.of}"


Ask = Callable[[list[Turns], int, float], list[str]]


def asker(session: Session, words: Tokenizer) -> Ask:
    """Return a function from conversations with an open last answer, a limit and a temperature to the answers."""

    def ask(conversations: list[Turns], limit: int, temperature: float = 0.0) -> list[str]:
        prompts = [words.encode(chat(turns).removesuffix(TURN_END)).ids for turns in conversations]
        seeds = range(len(prompts))
        handles = [
            session.submit(prompt, max_tokens=limit, temperature=temperature, seed=seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [handle.result_sync().text for handle in handles]

    return ask


def names() -> list[tuple[Turns, str]]:
    """Return introductions, up to four turns of other talk, and the question for the name."""
    cases = []
    for number, name in enumerate(NAMES):
        between = TALK[number % 2 :][: number % 5]
        introduction = INTRODUCTIONS[number % len(INTRODUCTIONS)].format(name)
        cases.append(([(introduction, f"Nice to meet you, {name}!"), *between, (RECALLS[number % 3], "")], name))
    return cases


def story_questions() -> list[tuple[Turns, str]]:
    """Return each question once with the story before it, and once in the turn after the story."""
    cases: list[tuple[Turns, str]] = []
    for text, questions in STORIES:
        for question, answer in questions:
            cases.append(([(f"{text}\n\n{question}", "")], answer))
            cases.append(([("Tell me a story.", text), TALK[0], (question, "")], answer))
    return cases


def sums(largest: int, number: int = 100) -> list[tuple[Turns, str]]:
    """Return sums and differences of numbers up to `largest`, a third of them with the sign as a word."""
    rng = Random(f"sums to {largest}")
    cases: list[tuple[Turns, str]] = []
    for index in range(number):
        total = rng.randint(largest // 2, largest)
        part = rng.randint(0, total)
        left, sign, right, result = (part, "+", total - part, total) if index % 2 else (total, "-", part, total - part)
        word = {"+": "plus", "-": "minus"}[sign] if index % 3 == 0 else sign
        cases.append(([(f"What is {left} {word} {right}?", "")], str(result)))
    return cases


def share(ask: Ask, cases: list[tuple[Turns, str]], limit: int = 40) -> Measure:
    """Return how many answers have the expected words; a number must be the last word."""
    answers = ask([turns for turns, _ in cases], limit, 0.0)
    right = sum(
        answer.rstrip(".").split(" ")[-1] == expected
        if expected.isdigit() and len(expected) < 4
        else expected in answer
        for answer, (_, expected) in zip(answers, cases, strict=True)
    )
    return Measure(right, len(cases))


def measure(session: Session, words: Tokenizer, stories: int = 100) -> dict[str, Measure]:
    ask = asker(session, words)
    inside: list[tuple[Turns, str]] = [([(question, "")], answer) for question, answer in INSIDE]
    outside: list[tuple[Turns, str]] = [([(question, "")], REFUSAL) for question in OUTSIDE]
    texts = ask([[("Tell me a story.", "")]] * stories, 300, 0.8)
    requests: list[Turns] = [[(request, "")] for request, _ in TOPICS for _ in range(2)]
    topics = [expected for _, expected in TOPICS for _ in range(2)]
    on_topic = ask(requests, 300, 0.8)
    plots = {plot_of(text) for text in texts} - {""}
    fitting = sum(all(word in text for word in expected) for text, expected in zip(on_topic, topics, strict=True))
    return {
        "the user's name, up to four turns later": share(ask, names()),
        "a story in the conversation": share(ask, story_questions()),
        "outside of its world: says that it does not know": share(ask, outside),
        "inside of its world: answers": share(ask, inside),
        "sums and differences up to 20": share(ask, sums(20)),
        "sums and differences up to 100": share(ask, sums(100)),
        "different plots in stories told at temperature 0.8": Measure(len(plots), stories),
        "all that was asked for is in the story": Measure(fitting, len(topics)),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m workshop.tiny.evaluate", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=rekindle.tiny.folder(), help="default: the shipped one")
    folder = parser.parse_args(argv).folder
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load(folder, dtype="float32")
    score = held_out(model.graph, model.leaves, words, HELD_OUT_BATCHES)
    print(f"perplexity {score.perplexity:.3f} over {score.tokens:,} tokens, {score.accuracy:.1%} at first guess")
    for kind in KINDS:
        print(f"| {kind} | {exact_answers(model.graph, model.leaves, words, kind):.0%} |")
    with rekindle.open_sync(folder, dtype="float32", quiet=True) as session:
        for topic, result in measure(session, words).items():
            print(f"| {topic} | {result} |")


if __name__ == "__main__":
    main()
