"""Small sums, as formulas and as word problems."""

from __future__ import annotations

from random import Random

from rekindle._src.tiny_training.words import COUNTABLE, child, count, fill, plural

SIGNS = {"+": "plus", "-": "minus", "*": "times"}


def numbers(rng: Random) -> tuple[int, str, int, int]:
    """Numbers and sign of `left sign right = result`, with results from 0 to 60."""
    sign = rng.choice("++-*")
    if sign == "*":
        left, right = rng.randint(1, 6), rng.randint(1, 10)
        left, right = (left, right) if rng.random() < 0.5 else (right, left)
        return left, sign, right, left * right
    small, large = rng.randint(0, 10), rng.randint(0, 12)
    if sign == "+":
        left, right = (small, large) if rng.random() < 0.5 else (large, small)
        return left, sign, right, left + right
    low, high = sorted((small, large))
    return high, sign, low, high - low


def question(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.4:
        return word_problem(rng)
    left, sign, right, result = numbers(rng)
    kind = rng.random()
    if kind < 0.5:
        return fill(rng, f"What is {left} {sign} {right}?"), f"{left} {sign} {right} = {result}"
    if kind < 0.75:
        return fill(
            rng, f"[How much is|What is] {left} {SIGNS[sign]} {right}?"
        ), f"{left} {SIGNS[sign]} {right} is {result}."
    if kind < 0.9:
        return f"{left} {sign} {right} =", f"{left} {sign} {right} = {result}"
    high, low = max(left, right), min(left, right)
    if high == low:
        high += 1
    word = rng.choice(("larger", "smaller"))
    shown = rng.sample((high, low), 2)
    return f"Which number is {word}, {shown[0]} or {shown[1]}?", f"{high if word == 'larger' else low} is {word}."


def word_problem(rng: Random) -> tuple[str, str]:
    first = child(rng)
    second = child(rng, taken=(first.name,))
    noun = rng.choice(COUNTABLE)
    left, right = rng.randint(1, 10), rng.randint(1, 8)
    words = {**first.words(), **second.words("p"), "things": plural(noun)}
    if rng.random() < 0.5:
        frame = "{name} has {left}. {pname} gives {him} {right} more. How many {things} does {name} have[ now|]?"
        result = left + right
    else:
        left = left + right
        gone = "[gives {right} to {pname}|loses {right}]"
        frame = "{name} has {left}. {He} " + gone + ". How many {things} does {name} have[ left|]?"
        result = left - right
    asked = fill(rng, frame, **words, left=count(left, noun), right=right)
    return asked, f"{first.name} has {count(result, noun)}." if result else f"{first.name} has no {plural(noun)}."


def lines(rng: Random) -> str:
    """Several sums, one per line, as plain text."""
    sheet = [numbers(rng) for _ in range(rng.randint(3, 8))]
    return "\n".join(f"{left} {sign} {right} = {result}" for left, sign, right, result in sheet)
