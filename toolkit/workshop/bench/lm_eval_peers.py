"""Seconds and scores of lm-eval over a session, over its own `hf`, and over a session's HTTP server.

    python lm_eval_peers.py rekindle FOLDER --out ours.json
    python lm_eval_peers.py hf FOLDER --out hf.json
    python lm_eval_peers.py http FOLDER --out http.json
    python lm_eval_peers.py compare hf.json ours.json http.json

Three tasks are made here, in float32: four-way questions after shared examples (their accuracy and the log-likelihoods
of all choices), perplexity of texts, and greedy texts (exact match with a made answer, and the texts themselves).
`http` is lm-eval's `local-completions` with eight requests at once. Models are loaded, and programs compiled by a run
over two documents of each task, before the clock. `seconds` are those of a task, of which the harness itself takes some
in each; `of_the_model` are those of its calls to the model.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
from scores import questions

KINDS = ("rekindle", "hf", "http")
STORY = (
    "In {year} a traveller came to the village of {name}. The people there kept a {thing} that nobody had seen before, "
    "and they told her how it had come to them. She wrote down what they said, and left on the next day. "
)


def documents(count: int, shots: int) -> dict[str, list[dict[str, Any]]]:
    """Return the documents of each task."""
    rng = random.Random(1)
    asked = questions(count, shots)
    stories = []
    for _ in range(max(2, count // 3)):
        parts = [
            STORY.format(year=rng.randrange(1500, 2000), name=rng.choice(["Alder", "Birch", "Cray"]), thing=thing)
            for thing in rng.sample(["clock", "river stone", "letter", "machine", "book", "bell"], 4)
        ]
        stories.append({"text": "".join(parts)})
    sums = [(rng.randrange(2, 50), rng.randrange(2, 50)) for _ in range(max(2, count // 2))]
    return {
        "local_choice": [
            {"question": prompt, "choices": [choice.removeprefix(" ") for choice in choices], "label": 0}
            for prompt, choices in asked
        ],
        "local_perplexity": stories,
        "local_text": [{"question": f"{a} + {b} is", "answer": str(a + b)} for a, b in sums],
    }


def tasks(count: int, shots: int) -> list[dict[str, Any]]:
    import datasets

    data = documents(count, shots)

    def held(name: str) -> Any:
        return lambda **_: datasets.DatasetDict({"test": datasets.Dataset.from_list(data[name])})

    def task(name: str, kind: str, shown: str, target: str, *metrics: str, **more: Any) -> dict[str, Any]:
        return {
            "task": name, "custom_dataset": held(name), "test_split": "test", "num_fewshot": 0, "output_type": kind,
            "doc_to_text": shown, "doc_to_target": target, "metric_list": [{"metric": one} for one in metrics], **more,
        }  # fmt: skip

    generation = {"until": ["\n"], "max_gen_toks": 32, "do_sample": False}
    question, choices = "{{question}}", "{{choices}}"
    return [
        task("local_choice", "multiple_choice", question, "label", "acc", "acc_norm", doc_to_choice=choices),
        task("local_perplexity", "loglikelihood_rolling", "", "{{text}}", "word_perplexity", "bits_per_byte"),
        task("local_text", "generate_until", question, "{{answer}}", "exact_match", generation_kwargs=generation),
    ]


def model_of(kind: str, folder: str, batch_size: int) -> tuple[Any, Any]:
    """Return a model of lm-eval, and what ends it."""
    if kind == "hf":
        import torch
        from lm_eval.models.huggingface import HFLM

        torch.set_num_threads(2)
        return HFLM(pretrained=folder, dtype=torch.float32, device="cpu", batch_size=batch_size), lambda: None
    import rekindle

    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "quiet": True}
    session = rekindle.open_sync(folder, generation_config="greedy", **options)
    if kind == "rekindle":
        from rekindle.lm_eval import RekindleLM

        return RekindleLM(session), session.close
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    server = session.serve(name="local").result_sync()
    model = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model="local", tokenizer_backend="huggingface", tokenizer=folder,
        num_concurrent=8, max_length=1023,
    )  # fmt: skip
    return model, lambda: (server.close(), session.close())


def timed(model: Any) -> list[float]:
    """Return a list to which the seconds of each call of the harness to a model are added."""
    seconds: list[float] = []

    def wrapped(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds.append(time.perf_counter() - start)

        return call

    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(model, name, wrapped(getattr(model, name)))
    return seconds


def measure(arguments: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    model, end = model_of(arguments.kind, arguments.folder, arguments.batch_size)
    manager = TaskManager()  # reads the harness's own tasks, which takes seconds
    options: dict[str, Any] = {"model": model, "log_samples": True, "bootstrap_iters": 0, "task_manager": manager}
    wanted = tasks(arguments.questions, arguments.shots)
    lm_eval.simple_evaluate(tasks=wanted, limit=2, **options)
    report: dict[str, Any] = {"kind": arguments.kind, "seconds": {}, "of_the_model": {}, "scores": {}, "values": {}}
    calls = timed(model)
    for task in wanted:
        calls.clear()
        start = time.perf_counter()
        results: Any = lm_eval.simple_evaluate(tasks=[task], **options)
        name = task["task"]
        report["seconds"][name] = round(time.perf_counter() - start, 2)
        report["of_the_model"][name] = round(sum(calls), 2)
        scores = results["results"][name]
        report["scores"][name] = {key: value for key, value in scores.items() if isinstance(value, float)}
        samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        report["values"][name] = [
            [one[0] if isinstance(one, list | tuple) else one for one in sample["filtered_resps"]] for sample in samples
        ]
    end()
    return report


def compare(files: list[str]) -> None:
    reports = [json.loads(Path(file).read_text()) for file in files]
    first = reports[0]
    for report in reports:
        for name, seconds in report["seconds"].items():
            own, other = report["values"][name], first["values"][name]
            if isinstance(own[0][0], str):
                same = sum(one == two for one, two in zip(own, other, strict=True))
                difference = f"{same} of {len(own)} texts the same"
            else:
                largest = np.abs(np.asarray(own, float) - np.asarray(other, float)).max()
                difference = f"largest difference of a log-likelihood {largest:.1e}"
            own_seconds = report.get("of_the_model", {}).get(name, 0.0)
            print(
                f"{report['kind']:9} {name:17} {seconds:7.2f} s, {own_seconds:7.2f} of the model  "
                f"{report['scores'][name]}  {difference}"
            )


def main() -> None:
    if sys.argv[1:2] == ["compare"]:
        compare(sys.argv[2:])
        return
    arguments = harness.options(
        __doc__, "kind folder", kind=(str, KINDS), folder=str, questions=24, shots=5, batch_size=(4, "of hf"), out=Path
    )  # fmt: skip
    report = measure(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report))
    print(json.dumps({name: report[name] for name in ("kind", "seconds", "of_the_model", "scores")}, indent=1))


if __name__ == "__main__":
    main()
