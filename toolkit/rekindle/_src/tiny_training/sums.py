"""Small arithmetic, bare and as word problems: every sum and difference of numbers from 0 to 100, and times tables."""

from __future__ import annotations

from random import Random

from rekindle._src.tiny_training.words import COUNTABLE, child, count, fill, plural

SIGNS = {"+": "plus", "-": "minus", "*": "times"}


def numbers(rng: Random) -> tuple[int, str, int, int]:
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


def question(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.25:
        return word_problem(rng)
    left, sign, right, result = numbers(rng)
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


def lines(rng: Random) -> str:
    """Return a sheet of sums, one per line, as plain text."""
    sheet = [numbers(rng) for _ in range(rng.randint(6, 24))]
    return "\n".join(f"{left} {sign} {right} = {result}" for left, sign, right, result in sheet)
