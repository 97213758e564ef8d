"""Rows/s of `session.decide`, compared with a schema that has an enum for each question, on the same texts.

    python decisions.py FOLDER_OR_GGUF --rows 200

Both ask the same three questions about each row: yes or no, one of four kinds, a number from 1 to 5. The schema
makes a JSON object of the three, by greedy decoding. `apart` asks one question with one property at a time, as `decide`
does. The two take turns in one session, three times, after a warm-up of eight rows; medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import rekindle

QUESTIONS = {
    "urgent": ("Does the customer need an answer today?", bool),
    "kind": ["bug", "question", "praise", "request"],
    "stars": range(1, 6),
}
PROPERTIES: dict[str, Any] = {
    "urgent": {"enum": ["yes", "no"]},
    "kind": {"enum": ["bug", "question", "praise", "request"]},
    "stars": {"enum": [1, 2, 3, 4, 5]},
}
SUBJECTS = ("The export", "My invoice", "The new editor", "The phone app", "Your support")
STATES = ("does not open any more", "is a joy to use", "was charged twice", "could have a dark theme", "is slow today")


def rows_of(count: int) -> list[str]:
    """Return texts of some forty tokens that differ from each other."""
    return [
        f"{SUBJECTS[n % 5]} {STATES[n // 5 % 5]}, and I have tried it {n} times since Monday. Please tell me what I "
        "should do now, and whether others have seen the same."
        for n in range(count)
    ]


async def schema(session: rekindle.Session, rows: Sequence[str], *, apart: bool) -> None:
    """Ask by schemas, as chats."""
    jobs = []
    for row in rows:
        for names in [[name] for name in PROPERTIES] if apart else [[*PROPERTIES]]:
            wanted = {name: PROPERTIES[name] for name in names}
            shape = {"type": "object", "properties": wanted, "required": names, "additionalProperties": False}
            text = f"{row}\n\nAnswer as JSON: " + ", ".join(f"{name}: one of {wanted[name]['enum']}" for name in names)
            jobs.append(session.chat(text, temperature=0, max_tokens=64, schema=shape))
    await asyncio.gather(*jobs)


async def measure(model: str, count: int) -> None:
    async with await rekindle.open(model, max_model_len=1024, max_requests=32, quiet=True) as session:
        rows = rows_of(count + 8)
        seconds: dict[str, list[float]] = {"decide": [], "schema": [], "apart": []}
        for turn in range(4):
            part = rows[count:] if turn == 0 else rows[:count]
            for name, times in seconds.items():
                await session.cache.clear()
                begun = time.perf_counter()
                if name == "decide":
                    await session.decide(part, QUESTIONS)
                else:
                    await schema(session, part, apart=name == "apart")
                if turn:
                    times.append(time.perf_counter() - begun)
        for name, times in seconds.items():
            print(f"{name:8} {count / statistics.median(times):7.1f} rows/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=200)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.model, arguments.rows))
