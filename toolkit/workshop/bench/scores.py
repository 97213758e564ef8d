"""Questions/s of scoring choices: four-way questions after shared examples.

    python scores.py [MODEL] [--questions 100] [--whole 16] [--dtype float32]

`score` computes the examples and each question once. `whole` scores each choice with its whole prompt, as a request
for the log-probabilities of all of its tokens does; it takes fewer questions, since each takes longer. `same_choice`
compares them.
`by pairs` scores one question at a time, so that only its own choices share a batch.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import harness

THINGS = ["river", "mountain", "city", "animal", "plant", "metal", "planet", "language", "instrument", "colour"]
NAMES = ["Amber", "Basalt", "Cedar", "Delta", "Ember", "Falcon", "Granite", "Harbour", "Iris", "Juniper", "Kestrel"]


def question(rng: random.Random) -> tuple[str, list[str]]:
    names = rng.sample(NAMES, 4)
    thing, year = rng.choice(THINGS), rng.randrange(1800, 2000)
    text = (
        f"Question: In {year} a traveller wrote four names into a book, {', '.join(names)}. Which of them is most "
        f"likely the name of a {thing} that was described there?\nAnswer:"
    )
    return text, [f" {name}, the {thing}." for name in names]


def questions(count: int, shots: int) -> list[tuple[str, list[str]]]:
    """Return prompts that end in a question after the same examples, and the choices of each."""
    rng = random.Random(0)
    examples = "\n\n".join(f"{text}{choices[0]}" for text, choices in (question(rng) for _ in range(shots)))
    return [(f"{examples}\n\n{text}", choices) for text, choices in (question(rng) for _ in range(count))]


def main() -> None:
    import rekindle

    arguments = harness.options(__doc__, "model", model="tiny", questions=100, whole=16, shots=5, dtype="auto")
    prompts, choices = zip(*questions(arguments.questions, arguments.shots), strict=True)
    options: dict[str, Any] = {"max_model_len": 1024, "dtype": arguments.dtype, "quiet": True}
    with rekindle.open_sync(arguments.model, **options) as session:
        session.score_sync([*prompts[:8]], [*choices[:8]])  # whatever has to be compiled
        session.generate_sync([prompts[0]] * 4, max_tokens=0, prompt_logprobs=1)
        session.cache.clear().result_sync()
        start = time.perf_counter()
        scores = session.score_sync([*prompts], [*choices])
        together = time.perf_counter() - start
        hits = sum(score.cached_tokens for result in scores for score in result)
        tokens = sum(score.prompt_tokens for result in scores for score in result)

        session.cache.clear().result_sync()
        start = time.perf_counter()
        for prompt, entries in zip(prompts[: arguments.whole], choices, strict=False):
            session.score_sync(prompt, entries)
        alone = time.perf_counter() - start

        encode = session.tokenizer.encode
        texts = [prompt + entry for prompt, entries in zip(prompts, choices, strict=True) for entry in entries]
        start = time.perf_counter()
        done = session.generate_sync(texts[: 4 * arguments.whole], max_tokens=0, prompt_logprobs=1)
        whole = time.perf_counter() - start
        same = 0
        for number in range(arguments.whole):
            totals = []
            for place in range(4):
                entries_ = done[4 * number + place].prompt_logprobs or ()
                count = len(encode(texts[4 * number + place])) - scores[number][place].prompt_tokens
                totals.append(sum(entry.logprob for entry in entries_[-count:]))
            same += totals.index(max(totals)) == scores[number].rank()[0]
        rates = {
            "score": arguments.questions / together,
            "by pairs": arguments.whole / alone,
            "whole": arguments.whole / whole,
        }
        report = {
            "model": session.model, "prompt_tokens": tokens // (4 * len(prompts)), "cached": hits / tokens,
            "same_choice": f"{same} of {arguments.whole}",
            "questions_per_second": {name: round(rate, 2) for name, rate in rates.items()},
            "score_over_whole": round(rates["score"] / rates["whole"], 2),
        }  # fmt: skip
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
