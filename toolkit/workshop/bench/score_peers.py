"""Four-way questions/s of `session.score` compared with transformers and llama-cpp-python, on the same texts.

    python score_peers.py rekindle FOLDER_OR_GGUF --questions 1000 --out ours.json
    python score_peers.py transformers FOLDER --questions 1000 --out theirs.json
    python score_peers.py transformers_plain FOLDER --questions 24 --out plain.json
    python score_peers.py llama_cpp FILE.gguf --questions 1000 --out llama.json
    python score_peers.py compare ours.json theirs.json llama.json

Each engine runs in an environment and a process of its own. All score the same questions after the same examples, and
choices by the sum of their tokens' log-probabilities. `transformers_plain` is the loop that most people write: the four
whole texts of a question as one padded batch. `transformers` computes the examples once and keeps their cache, a
question's prompt once, and its four choices as one padded batch on copies of that cache: the best that one would write
by hand. llama-cpp-python goes back to the common beginning of two prompts in one context, as its own `eval` does, and
then to the end of the prompt for each choice. A warm-up of eight questions comes before the clock. A run that is
interrupted, or ends after `--seconds`, goes on after the questions that its file has. `compare` prints questions/s and
how many choices are those of the first file.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from scores import questions

Question = tuple[str, list[str]]
Scorer = Callable[[Sequence[Question]], list[list[float]]]  # of each question, the log-probability of each choice
WARM_UP = 8


def rekindle_scorer(model: str, dtype: str, threads: int, **options: Any) -> Scorer:
    import rekindle

    session = rekindle.open_sync(model, dtype=dtype, max_model_len=1024, quiet=True, **options)

    def score(asked: Sequence[Question]) -> list[list[float]]:
        results = session.score_sync([prompt for prompt, _ in asked], [choices for _, choices in asked])
        return [[one.logprob for one in result] for result in results]

    return score


def _loaded(model: str, dtype: str, threads: int) -> tuple[Any, Any]:
    """Return the tokenizer and the network of a folder, in transformers."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
    return transformers.AutoTokenizer.from_pretrained(model), network


def _split(tokenizer: Any, prompt: str, choices: Sequence[str]) -> tuple[list[int], list[list[int]], int]:
    """Return the tokens of a prompt, of it with each choice, and how many are common: a choice may change the last."""
    ids, *ends = (tokenizer(text)["input_ids"] for text in (prompt, *(prompt + choice for choice in choices)))
    return ids, ends, min(len(_common([ids, end])) for end in ends)


def transformers_plain_scorer(model: str, dtype: str, threads: int) -> Scorer:
    import torch

    tokenizer, network = _loaded(model, dtype, threads)

    @torch.inference_mode()
    def score(asked: Sequence[Question]) -> list[list[float]]:
        results = []
        for prompt, choices in asked:
            _, ends, start = _split(tokenizer, prompt, choices)
            longest = max(map(len, ends))
            padded = torch.tensor([end + [0] * (longest - len(end)) for end in ends])
            logits = network(input_ids=padded, use_cache=False, logits_to_keep=longest - start + 1).logits
            logits = torch.log_softmax(logits.float(), -1)
            results.append(
                [
                    sum(float(logits[row, at, token]) for at, token in enumerate(end[start:]))
                    for row, end in enumerate(ends)
                ]
            )
        return results

    return score


def transformers_scorer(model: str, dtype: str, threads: int) -> Scorer:
    import torch

    tokenizer, network = _loaded(model, dtype, threads)
    kept: dict[str, Any] = {"ids": [], "cache": None}  # the common beginning of all prompts

    def run(ids: Any, cache: Any, **more: Any) -> Any:
        return network(input_ids=ids, past_key_values=cache, use_cache=True, **more)

    @torch.inference_mode()
    def score(asked: Sequence[Question]) -> list[list[float]]:
        results = []
        encoded = [tokenizer(prompt)["input_ids"] for prompt, _ in asked]
        if not kept["ids"]:
            kept["ids"] = _common(encoded)
            kept["cache"] = run(torch.tensor([kept["ids"]]), None).past_key_values
        for (prompt, choices), ids in zip(asked, encoded, strict=True):
            _, ends, start = _split(tokenizer, prompt, choices)
            begun = len(_common([kept["ids"], ids[: start - 1]]))
            cache = copy.deepcopy(kept["cache"])
            if begun < len(kept["ids"]):
                cache.crop(begun - len(kept["ids"]))  # below zero: how many tokens to remove
            rest = torch.tensor([ids[begun:start]])
            out = run(rest, cache, logits_to_keep=1)
            first = torch.log_softmax(out.logits[0, -1].float(), -1)
            tails = [end[start:] for end in ends]
            longest = max(map(len, tails))
            padded = torch.tensor([tail + [0] * (longest - len(tail)) for tail in tails])
            cache = out.past_key_values
            cache.batch_repeat_interleave(len(tails))
            logits = torch.log_softmax(run(padded, cache).logits.float(), -1)
            results.append(
                [
                    float(first[tail[0]]) + sum(float(logits[row, at, token]) for at, token in enumerate(tail[1:]))
                    for row, tail in enumerate(tails)
                ]
            )
        return results

    return score


def llama_cpp_scorer(model: str, dtype: str, threads: int) -> Scorer:
    from llama_cpp import Llama

    llama = Llama(model, n_ctx=1024, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False)
    evaluated: list[int] = []  # the tokens in its context

    def evaluate(tokens: list[int], keep: int) -> None:
        llama.n_tokens = keep  # `eval` drops all tokens after these
        llama.eval(tokens[keep:])
        evaluated[:] = tokens

    def logprob(place: int, token: int) -> float:
        row = np.asarray(llama.scores[place], np.float64)
        largest = row.max()
        return float(row[token] - largest - np.log(np.exp(row - largest).sum()))

    def score(asked: Sequence[Question]) -> list[list[float]]:
        results = []
        for prompt, choices in asked:
            ids = llama.tokenize(prompt.encode())
            ends = [llama.tokenize((prompt + choice).encode()) for choice in choices]
            start = min(len(_common([ids, end])) for end in ends)
            evaluate(ids[:start], min(len(_common([evaluated, ids[:start]])), start - 1))
            totals = []
            for end in ends:
                evaluate(end, start)
                totals.append(sum(logprob(place - 1, end[place]) for place in range(start, len(end))))
            results.append(totals)
        return results

    return score


SCORERS: dict[str, Callable[..., Scorer]] = {
    "rekindle": rekindle_scorer,
    "transformers": transformers_scorer,
    "transformers_plain": transformers_plain_scorer,
    "llama_cpp": llama_cpp_scorer,
}


def _common(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the common beginning of sequences."""
    shared: list[int] = []
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        shared.append(tokens[0])
    return shared


def measure(arguments: Any) -> dict[str, Any]:
    asked = questions(arguments.questions + WARM_UP, arguments.shots)
    settings = {name: getattr(arguments, name) for name in ("engine", "dtype", "shots")}
    settings["model"] = Path(arguments.model).name
    report: dict[str, Any] = {**settings, "questions": 0, "seconds": 0.0, "choices": [], "logprobs": []}
    if arguments.out is not None and arguments.out.exists():
        report = json.loads(arguments.out.read_text())
        assert {name: report[name] for name in settings} == settings, f"{arguments.out} is of another run"
    own = {"page_size": arguments.page_size, "max_requests": arguments.max_requests}
    options = {name: value for name, value in own.items() if value is not None}
    score = SCORERS[arguments.engine](arguments.model, arguments.dtype, arguments.threads, **options)
    score(asked[:WARM_UP])
    end = time.monotonic() + arguments.seconds
    while report["questions"] < arguments.questions and time.monotonic() < end:
        first = WARM_UP + report["questions"]
        start = time.perf_counter()
        totals = score(asked[first : min(first + arguments.block, len(asked))])
        report["seconds"] += time.perf_counter() - start
        report["questions"] += len(totals)
        report["choices"] += [int(np.argmax(values)) for values in totals]
        report["logprobs"] += [[round(value, 5) for value in values] for values in totals]
        report["questions_per_second"] = round(report["questions"] / report["seconds"], 3)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(report))
    return report


def compare(files: Sequence[str]) -> None:
    reports = [json.loads(Path(file).read_text()) for file in files]
    first = reports[0]
    for report in reports:
        count = min(report["questions"], first["questions"])
        same = sum(map(int.__eq__, report["choices"], first["choices"]))
        differences = np.abs(np.subtract(report["logprobs"][:count], first["logprobs"][:count]))
        print(
            f"{report['engine']:14} {report['questions_per_second']:8.2f} questions/s, "
            f"{report['questions_per_second'] / first['questions_per_second']:.2f} of the first, same choice in "
            f"{same} of {count}, largest difference {differences.max():.1e}"
        )


def main() -> None:
    if sys.argv[1:2] == ["compare"]:
        compare(sys.argv[2:])
        return
    arguments = harness.options(
        __doc__, "engine model", engine=(str, SCORERS), model=str, questions=1000, shots=5,
        dtype=("float32", ("float32", "auto")), threads=2, page_size=(int, "of rekindle's session"),
        max_requests=(int, "the same"), block=(100, "questions of one call"),
        seconds=(420.0, "begins no call after these"), out=Path,
    )  # fmt: skip
    report = measure(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report))
    print(json.dumps({name: value for name, value in report.items() if name not in ("choices", "logprobs")}, indent=1))


if __name__ == "__main__":
    main()
