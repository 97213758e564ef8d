"""Tokens that steps compute for the questions of `score_peers.py`: the scheduler's own plans, without a model.

    python score_tokens.py TOKENIZER.json [--questions 100] [--max-requests 16 32 64]

`computed` are the tokens of rows. `padded` are those of the programs that steps of 512 tokens run in: what is computed
where kernels do not skip padding, as in float32.
"""

from __future__ import annotations

import harness
from scores import questions
from tokenizers import Tokenizer

from helpers.fakes import make_request
from helpers.scheduling import LoopBuilder
from rekindle._src.core.config import EngineConfig
from rekindle._src.programs.buckets import bucket_for, lattice, prefill_rows


def count(tokenizer: Tokenizer, number: int, max_requests: int, page_size: int) -> tuple[float, float, int]:
    """Return the tokens of rows and of programs for each question, and the number of steps."""
    config = EngineConfig(max_requests=max_requests, max_tokens_per_step=512)
    prefills = prefill_rows(512, max_requests)
    loop = (
        LoopBuilder(
            pages=4000,
            page_size=page_size,
            max_requests=max_requests,
            max_tokens_per_step=512,
            max_prefill_rows=prefills,
        )
        .queue(max_queue=4 * number)
        .loop()
    )
    for prompt, choices in questions(number, 5):
        start = len(tokenizer.encode(prompt).ids)
        for choice in choices:
            ids = tokenizer.encode(prompt + choice).ids
            loop.submit(make_request(ids, max_tokens=1, prompt_logprobs=1, logprob_start=start))
    loop.run()
    programs, padded = lattice(config), 0
    for plan in loop.runner.plans:
        size = {"rows": len(plan.decode), "tokens": plan.prefill_tokens, "prefills": len(plan.prefill)}
        padded += bucket_for(programs, max_requests, **size).cost
    return sum(loop.runner.computed.values()) / number, padded / number, len(loop.runner.plans)


def main() -> None:
    arguments = harness.options(
        __doc__, "tokenizer", tokenizer=str, questions=100, max_requests=[16, 32, 64], page_size=32
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(arguments.tokenizer)
    for most in arguments.max_requests:
        computed, padded, steps = count(tokenizer, arguments.questions, most, arguments.page_size)
        print(f"max_requests={most}: {computed:.1f} tokens a question computed, {padded:.1f} padded, {steps} steps")


if __name__ == "__main__":
    main()
