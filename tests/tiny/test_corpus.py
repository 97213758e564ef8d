"""The corpus is the same everywhere, and what it says is right."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import islice
from random import Random

import pytest

from workshop.tiny import evaluate, facts, questions
from workshop.tiny.corpus import HELD_OUT, SHARES, TRAIN, documents, talk
from workshop.tiny.facts import FACTS, WHO, ask, people, state
from workshop.tiny.stories import plot_of, request, story
from workshop.tiny.words import BOYS, GIRLS, HEROES, a, count, fill, join, plural

CALCULATION = re.compile(r"(\d+) (plus|minus|times|[-+*]) (\d+)")


def test_a_seed_gives_the_same_documents() -> None:
    first = list(islice(documents("a seed"), 200))
    assert first == list(islice(documents("a seed"), 200))
    assert first != list(islice(documents("another seed"), 200))


def test_the_stream_has_not_changed_since_the_weights_were_made() -> None:
    text = "\0".join(islice(documents(f"{TRAIN} 0"), 500))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "37b7d3215bb00b2c"


def test_documents_are_varied() -> None:
    found = list(islice(documents(HELD_OUT), 2000))
    assert len(set(found)) > 1850
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_no_document_shows_a_seam() -> None:
    for text in islice(documents("seams"), 1500):
        plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
        prose = re.sub(r"^.*\{.*$", "", plain, flags=re.MULTILINE)  # records have braces of their own
        prose = re.sub(r"^(\d+ [-+*] \d+ =) \?$", r"\1", prose, flags=re.MULTILINE)  # a sum may ask with a mark alone
        assert not re.search(r"[{}\[\]|]|  |\bNone\b| [.,?!]", prose), prose
        assert not re.search(r"\b[Aa] [aeio]\w+|\b[Aa]n (?!hour)[^aeiou\W]\w*", prose), prose


@pytest.mark.parametrize("seed", range(40))
def test_a_story_keeps_its_facts(seed: int) -> None:
    told = story(Random(seed))
    answers = dict.fromkeys(answer for _, answer in told.questions)
    assert told.hero.name != told.friend.name
    assert told.text.count(told.hero.name) >= 3
    assert told.friend.name in told.text
    assert told.thing in told.text
    toy = told.thing.split()[-1]
    assert set(re.findall(rf"(\w+) {toy}\b", told.text)) <= {told.thing.split()[0], "the", "The"}
    assert f"{told.hero.name}'s {toy} was {told.thing.split()[0]}." in answers
    named = set(re.findall(r"\b[A-Z][a-z]+\b", request(Random(seed), told)))
    assert told.hero.name in named or told.friend.name not in named


@pytest.mark.parametrize("seed", range(20))
def test_people_share_no_fact_and_answers_repeat_what_was_said(seed: int) -> None:
    rng = Random(seed)
    group = people(rng, 4)
    for field in ("name", "city", "food", "age", "job", "pet", "hobby"):
        assert len({getattr(person, field) for person in group}) == 4
    for person in group:
        for fact in FACTS:
            said = state(rng, person, fact)
            question, answer = ask(rng, person, fact)
            assert person.name in said and person.name in answer
            assert question.endswith("?")
            if fact not in WHO:
                assert person.name in question
            key = {"thing": " ".join(person.thing), "colour": person.thing[0], "pet": person.pet[0]}.get(fact)
            known = str(key or getattr(person, fact, ""))
            assert known in said and known in answer + question


def test_conversations_ask_for_what_was_told() -> None:
    rng = Random(0)
    for _ in range(300):
        turns = facts.about_people(rng)
        told = turns[0][0]
        for _, answer in turns:
            value = answer.removesuffix(".").split()[-1]
            assert value in told or answer.startswith(("I do not know", "Thank", "I see", "Okay")), (told, answer)


def test_comparisons_are_right() -> None:
    rng = Random(0)
    seen = 0
    for _ in range(200):
        ((said, answer),) = facts.summary(rng)
        ages = {name: int(age) for name, age in re.findall(r"(\w+) is (\d+) years old", said)}
        if ages:
            best = (max if "old" in said.split("Who is the ")[1] else min)(ages, key=lambda name: ages[name])
            assert answer.startswith(f"{best} is the ")
            seen += 1
        else:
            for word in re.findall(r"\w+ (?:lives in|likes|loves|likes to eat|home is in) (\w+)", said):
                assert word == "to" or word in answer
    assert seen > 50


def test_sums_are_right() -> None:
    rng = Random(0)
    operations = {"+": int.__add__, "plus": int.__add__, "-": int.__sub__, "minus": int.__sub__}
    for _ in range(500):
        asked, answer = questions.sum_question(rng)
        if found := CALCULATION.search(asked):
            left, sign, right = found.groups()
            result = operations.get(sign, int.__mul__)(int(left), int(right))
            assert 0 <= result <= 100
            assert re.findall(r"-?\d+", answer)[-1] == str(result), (asked, answer)
        elif found := re.search(r"Which number is (larger|smaller), (\d+) or (\d+)", asked):
            best = (max if found[1] == "larger" else min)(int(found[2]), int(found[3]))
            assert answer == f"{best} is {found[1]}."
        else:
            numbers = [int(value) for value in re.findall(r"\d+", asked)]
            result = numbers[0] + numbers[1] if "more" in asked else numbers[0] - numbers[1]
            assert (str(result) if result else "no ") in answer, (asked, answer)


def test_records_and_lists_say_what_was_asked() -> None:
    rng = Random(0)
    for _ in range(200):
        asked, answer = questions.from_sentences(rng)
        record = json.loads(answer)
        assert all(str(value) in asked for value in record.values())
        asked, answer = questions.listing(rng)
        if asked.startswith("Sort"):
            values = [int(value) for value in re.findall(r"\d+", asked)]
            assert answer == ", ".join(map(str, sorted(values)))
        elif found := re.match(r"Count from (\d+) to (\d+)", asked):
            assert answer.split(", ") == [str(value) for value in range(int(found[1]), int(found[2]) + 1)]
        else:
            items = [line.split(" ", 1)[1] for line in answer.splitlines()]
            assert len(set(items)) == len(items) >= 2


def test_copying_is_exact() -> None:
    rng = Random(0)
    for _ in range(50):
        asked, answer = questions.repeat(rng)
        assert asked.endswith(f": {answer}")
        assert len(set(questions.copies(rng).splitlines())) == 1
    found = list(islice(documents("copies", 0.5), 400))
    assert 120 < sum(len(set(text.split("\n"))) == 1 and "\n" in text for text in found) < 280


def test_a_general_question_has_one_answer() -> None:
    rng = Random(0)
    answers: dict[str, set[str]] = {}
    for _ in range(5000):
        kind = rng.choice([kind for kind in questions.TABLES if kind is not questions.chatter])
        asked, answer = kind(rng)
        answers.setdefault(asked, set()).add(answer)
    assert len(answers) > 250
    assert {asked: found for asked, found in answers.items() if len(found) > 1} == {}


def test_words() -> None:
    assert [a(noun) for noun in ("owl", "red kite", "orange kite", "umbrella")] == [
        "an owl",
        "a red kite",
        "an orange kite",
        "an umbrella",
    ]
    assert [plural(noun) for noun in ("box", "berry", "mouse", "key", "shell", "leaf")] == [
        "boxes",
        "berries",
        "mice",
        "keys",
        "shells",
        "leaves",
    ]
    assert (count(1, "egg"), count(0, "egg")) == ("1 egg", "0 eggs")
    assert (join(["a"]), join(["a", "b", "c"])) == ("a", "a, b and c")
    assert fill(Random(0), "[x|x] {name}[|] [[y|y]|y]", name="n") == "x n y"


def test_a_story_can_be_told_in_hundreds_of_ways_and_its_plot_is_found_again() -> None:
    told = [story(Random(seed)) for seed in range(800)]
    found = [(one.plot.removesuffix(" 0").removesuffix(" 1"), plot_of(one.text)) for one in told]
    assert len({plot for plot, _ in found}) > 200
    assert sum(plot == marked for plot, marked in found) > 790


def test_what_is_asked_for_is_in_the_story() -> None:
    for seed in range(400):
        told = story(Random(seed))
        said = request(Random(seed), told)
        for name in set(re.findall(r"\b[A-Z][a-z]+\b", said)) & {told.hero.name, told.friend.name}:
            assert name in told.text
        for kind in {kind for kind in HEROES if re.search(rf"\b{kind}\b", said)}:
            assert kind in told.text, (said, told.text)
        if found := re.search(r"(?:about|and) an? (\w+ \w+)[.,?]", said):
            assert found[1] in told.text or "named" in said or "called" in said, (said, told.text)


def test_a_name_is_told_first_and_asked_for_after_other_talk() -> None:
    rng = Random(0)
    turns = [facts.about_me(rng, talk) for _ in range(200)]
    assert max(map(len, turns)) >= 7
    for conversation in turns:
        question, answer = conversation[-1]
        assert question.endswith("?")
        if "do not know" in answer:
            continue
        value = answer.removesuffix(".").split()[-1].removesuffix("s")
        assert any(value in said for said, _ in conversation[:-1]), conversation


def test_questions_outside_the_world_have_one_answer() -> None:
    rng = Random(0)
    asked = {questions.unknown_question(rng) for _ in range(4000)}
    assert len(asked) > 1200
    assert {answer for _, answer in asked} == {questions.UNKNOWN_ANSWER}
    known = {questions.general_question(rng)[0] for _ in range(4000)}
    assert not known & {question for question, _ in asked}


def test_what_is_asked_by_hand_is_not_in_the_corpus() -> None:
    rng = Random(0)
    assert not set(evaluate.NAMES) & {*GIRLS, *BOYS}
    asked = {questions.unknown_question(rng)[0] for _ in range(20_000)}
    assert not set(evaluate.OUTSIDE) & asked
    text = "\n".join(islice(documents(TRAIN), 1000))
    assert not [name for name in evaluate.NAMES if re.search(rf"\b{name}\b", text)]
