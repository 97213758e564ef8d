"""Bounds on adapters."""

from __future__ import annotations

from project.bounds.records import SHOWN, SMALL, Bound, Other, within

STEPS = Other("steps of expressions over names, of all that one adapter has: tests/models/adapters feeds the dearest")

BOUNDS: list[Bound] = []

OTHERS: dict[str, dict[str, Other]] = {
    "models/adapters/budget.py": {"MAX_STEPS": STEPS},
    "models/adapters/expressions.py": {"MAX_LENGTH": STEPS, "_MAX_DEPTH": SMALL, "_MAX_REPEATS": STEPS},
    "models/adapters/peft.py": {
        "_LARGEST_CONFIG": STEPS,
        "_MOST_SURPLUS": SHOWN,
        "_LONGEST_START": SHOWN,
        "_LONGEST_PRECISION": SHOWN,
    },
    "models/adapters/reading.py": {"_MOST_HEADER": within("values of a checkpoint's JSON")},
}
