"""GRPO on a reward that counts: answers of exactly three words, before and after a training.

    python rewards.py MODEL [--steps 24] [--rate 3e-4] [--deterministic]

Printed are the share of answers of three words and their mean number of words, over 16 drawn answers to each of eight
questions, without the adapter and with it; the mean reward of each step; and the largest difference between the
log-probabilities that tokens were drawn with and the training's own. The reward falls with the distance from three.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import harness

QUESTIONS = (
    "What is the capital of France?", "What colour is the sky?", "What do cats like?", "Who wrote Hamlet?",
    "What is water made of?", "Name three fruits.", "What do bees make?", "How are you today?",
)  # fmt: skip
ASK = " Answer in exactly three words."


def words(text: str) -> int:
    return len(text.split())


def reward(prompt: Any, text: str) -> float:
    return max(0.0, 1.0 - abs(words(text) - 3) / 3)


def shares(session: Any, chats: list[Any], **options: Any) -> str:
    drawn = [
        words(one.text)
        for chat in chats
        for one in session.generate(
            session.render(chat), n=16, max_tokens=16, temperature=1.0, seed=7, **options
        ).result_sync()
    ]
    three = statistics.mean(float(count == 3) for count in drawn)
    return f"{three:.0%} of {len(drawn)} answers have three words, {statistics.mean(drawn):.1f} on average"


def main() -> None:
    import rekindle

    options = harness.options(__doc__, "model", model=str, steps=24, rate=3e-4, deterministic=False)
    chats: list[Any] = [[{"role": "user", "content": question + ASK}] for question in QUESTIONS]
    own: dict[str, Any] = {"dtype": "float32", "precompile": "lazy", "disk_memory": 0, "quiet": True}
    own |= {"max_model_len": 256, "max_requests": 16, "deterministic": options.deterministic}
    with rekindle.open_sync(options.model, **own) as session:
        print(f"before: {shares(session, chats)}", flush=True)
        start = time.perf_counter()
        run = session.tune(
            "three", chats, loss="grpo", reward=reward, rank=8, steps=options.steps, batch=4, generations=8,
            max_tokens=16, learning_rate=options.rate, every=1_000_000,
        )  # fmt: skip
        run.result_sync()
        print(f"{options.steps} steps in {time.perf_counter() - start:.0f} s")
        print(f"rewards: {' '.join(f'{step.reward:.2f}' for step in run.history)}")
        print(f"differences: {' '.join(f'{step.difference:.1e}' for step in run.history)}")
        print(f"after: {shares(session, chats, adapter='three')}", flush=True)


if __name__ == "__main__":
    main()
