"""Three experiments inside a model, compared with nnsight, TransformerLens and pyvene: lines of code and seconds.

    python tap_peers.py FOLDER [--peer nnsight=PYTHON transformer_lens=PYTHON pyvene=PYTHON] [--rounds 3]
    PYTHON tap_peers.py FOLDER --engine nnsight

The model is a folder with a Llama in float32. The logit lens is that of a sentence: the likeliest token at each layer
and position. Activation patching of a name puts one prompt's residual stream into another's, at each layer and each
position, and measures by how much the model prefers the first name. The steering vector is the mean difference of two
sets of prompts; it is added at three scales while texts of 32 tokens are generated greedily. Each engine runs in a
process of its own, by the interpreter that `--peer` names, does each experiment as its own documentation does, and gets
the same tokens. Printed are the lines of each experiment, the seconds of its first run and the median of later ones
(of one that takes 40 seconds there is only one), and how far the results are those of rekindle.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np

SENTENCE = "The capital of France is Paris, and the capital of Italy is"
CLEAN = "When Tom and Mia went to the park, Mia gave the ball to"
OTHER = "When Sam and Mia went to the park, Mia gave the ball to"
NAMES = (" Tom", " Sam")
THINGS = ("film", "food", "book", "town", "song", "game", "house", "car")
GOOD = [f"I love this {thing}, because it is" for thing in THINGS]
BAD = [f"I hate this {thing}, because it is" for thing in THINGS]
BEGINNINGS = [f"We talked about the {thing} for a week, and it was" for thing in THINGS]
LAYER, SCALES, NEW = 20, (-2.0, 0.0, 2.0), 32
LONG = 40.0  # seconds of an experiment that is done once


class Rekindle:
    def __init__(self, model: str, threads: int) -> None:
        import rekindle

        self.session = rekindle.open_sync(model, dtype="float32", max_requests=32, max_model_len=1024, quiet=True)

    def reset(self) -> None:
        self.session.cache.clear().result_sync()

    def close(self) -> None:
        self.session.close()

    async def lens(self, prompt: list[int]) -> Any:
        lens = await self.session.view.lens(prompt)
        return lens.token_ids[..., 0]

    async def patch(self, clean: list[int], other: list[int], first: int, second: int) -> Any:
        import rekindle

        source = (await self.session.generate(clean, max_tokens=1, capture={"residual": "all"})).captured
        layers, last = len(source), rekindle.Capture({"logits": -1}, positions=-1)
        places = itertools.product(range(layers), range(len(other)))
        patches = [source.select(layers=layer, positions=position) for layer, position in places]
        calls = [self.session.generate(other, max_tokens=1, capture=last, patch=patch) for patch in patches]
        logits = [done.captured["logits", layers - 1][0] for done in await asyncio.gather(*calls)]
        return np.reshape([row[first] - row[second] for row in logits], (layers, -1))

    async def steer(self, good: list[list[int]], bad: list[list[int]], prompts: list[list[int]]) -> Any:
        import rekindle

        last = rekindle.Capture({"residual": LAYER}, positions=-1)
        ends = await self.session.generate([*good, *bad], max_tokens=1, capture=last)
        streams = np.stack([done.captured["residual", LAYER][0] for done in ends])
        vector = streams[: len(good)].mean(axis=0) - streams[len(good) :].mean(axis=0)
        options = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        steers = [rekindle.Steer(LAYER, vector, scale) for scale in SCALES]
        texts = await asyncio.gather(*(self.session.generate(prompts, steer=steer, **options) for steer in steers))
        return [[done.token_ids for done in many] for many in texts]


class Nnsight:
    def __init__(self, model: str, threads: int) -> None:
        import torch
        from nnsight import LanguageModel

        torch.set_num_threads(threads)
        self.model = LanguageModel(model, device_map="cpu", dtype=torch.float32, dispatch=True)

    def lens(self, prompt: list[int]) -> Any:
        model = self.model
        with model.trace(prompt):
            heads = [model.lm_head(model.model.norm(layer.output)) for layer in model.model.layers]
            found = [head.argmax(dim=-1) for head in heads].save()
        return [tokens[0].tolist() for tokens in found]

    def patch(self, clean: list[int], other: list[int], first: int, second: int) -> Any:
        model, count = self.model, len(self.model.model.layers)
        with model.trace(clean):
            source = [layer.output for layer in model.model.layers].save()
        found = []
        for index in range(count):
            with model.trace() as tracer:
                row = [].save()
                for position in range(len(other)):
                    with tracer.invoke(other):
                        model.model.layers[index].output[:, position] = source[index][:, position]
                        logits = model.lm_head.output[0, -1]
                        row.append(logits[first] - logits[second])
            found.append([float(value) for value in row])
        return found

    def steer(self, good: list[list[int]], bad: list[list[int]], prompts: list[list[int]]) -> Any:
        model, means = self.model, []
        for many in (good, bad):
            with model.trace(many):
                mean = model.model.layers[LAYER].output[:, -1].mean(dim=0).save()
            means.append(mean)
        found = []
        for scale in SCALES:
            change = scale * (means[0] - means[1])
            with model.generate(prompts, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False) as tracer:
                for _ in tracer.iter[:NEW]:
                    model.model.layers[LAYER].output[:] += change
                out = tracer.result.save()
            found.append(out[:, len(prompts[0]) :].tolist())
        return found


class TransformerLens:
    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformer_lens.model_bridge import TransformerBridge

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model = TransformerBridge.boot_transformers(model, device="cpu", dtype=torch.float32)

    def lens(self, prompt: list[int]) -> Any:
        import torch

        _, cache = self.model.run_with_cache(torch.tensor([prompt]))
        streams = torch.stack([cache["resid_post", layer][0] for layer in range(self.model.cfg.n_layers)])
        return self.model.unembed(self.model.ln_final(streams)).argmax(dim=-1)

    def patch(self, clean: list[int], other: list[int], first: int, second: int) -> Any:
        import torch
        from transformer_lens import patching

        _, cache = self.model.run_with_cache(torch.tensor([clean]))
        return patching.generic_activation_patch(
            self.model, torch.tensor([other]), cache,
            patching_metric=lambda logits: logits[0, -1, first] - logits[0, -1, second],
            patch_setter=patching.layer_pos_patch_setter, activation_name="resid_post",
            index_axis_names=("layer", "pos"),
        )  # fmt: skip

    def steer(self, good: list[list[int]], bad: list[list[int]], prompts: list[list[int]]) -> Any:
        import torch
        from transformer_lens.utilities import get_act_name

        name, means = get_act_name("resid_post", LAYER), []
        for many in (good, bad):
            _, cache = self.model.run_with_cache(torch.tensor(many), names_filter=name)
            means.append(cache[name][:, -1].mean(dim=0))
        options = {"max_new_tokens": NEW, "do_sample": False, "stop_at_eos": False, "verbose": False}
        found = []
        for scale in SCALES:
            change = scale * (means[0] - means[1])
            with self.model.hooks(fwd_hooks=[(name, lambda stream, hook, change=change: stream + change)]):
                out = self.model.generate(torch.tensor(prompts), return_type="tokens", **options)
            found.append(out[:, len(prompts[0]) :].tolist())
        return found


class Pyvene:
    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def collect(self, prompts: list[list[int]], layers: list[int], positions: list[int]) -> Any:
        import pyvene
        import torch

        kind = pyvene.CollectIntervention(keep_last_dim=True)
        places = [{"layer": layer, "component": "block_output", "intervention": kind} for layer in layers]
        collecting = pyvene.IntervenableModel(places, model=self.model)
        (_, found), _ = collecting({"input_ids": torch.tensor(prompts)}, unit_locations={"base": positions})
        return torch.stack(list(found)).reshape(len(layers), len(prompts), len(positions), -1)

    def lens(self, prompt: list[int]) -> Any:
        layers = list(range(self.model.config.num_hidden_layers))
        streams = self.collect([prompt], layers, list(range(len(prompt))))[:, 0]
        return self.model.lm_head(self.model.model.norm(streams)).argmax(dim=-1)

    def patch(self, clean: list[int], other: list[int], first: int, second: int) -> Any:
        import pyvene
        import torch

        found = []
        base, source = ({"input_ids": torch.tensor([ids])} for ids in (other, clean))
        for layer in range(self.model.config.num_hidden_layers):
            place = {"layer": layer, "component": "block_output", "intervention_type": pyvene.VanillaIntervention}
            patching = pyvene.IntervenableModel(place, model=self.model)
            for position in range(len(other)):
                _, out = patching(base, [source], {"sources->base": position})
                found.append(out.logits[0, -1, first] - out.logits[0, -1, second])
        return np.reshape(found, (-1, len(other)))

    def steer(self, good: list[list[int]], bad: list[list[int]], prompts: list[list[int]]) -> Any:
        import pyvene
        import torch

        ends = [self.collect(many, [LAYER], [len(many[0]) - 1])[0, :, 0].mean(dim=0) for many in (good, bad)]
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        found = []
        for scale in SCALES:
            change = scale * (ends[0] - ends[1])
            place = {"layer": LAYER, "component": "block_output"}
            added = {"intervention": lambda stream, _, change=change: stream + change}
            steering = pyvene.IntervenableModel(place | added, model=self.model)
            base = {"input_ids": torch.tensor(prompts)}
            _, out = steering.generate(base, unit_locations=None, intervene_on_prompt=True, **options)
            found.append(out[:, len(prompts[0]) :].tolist())
        return found


ENGINES: dict[str, Any] = {
    "rekindle": Rekindle, "nnsight": Nnsight, "transformer_lens": TransformerLens, "pyvene": Pyvene,
}  # fmt: skip
TASKS = ("lens", "patch", "steer")


def lines(kind: Any, task: str) -> int:
    """Return the lines of an experiment, without its head, its imports and empty ones; helpers count once."""
    found = inspect.getsource(getattr(kind, task)).splitlines()[1:]
    if task != "patch" and hasattr(kind, "collect"):
        found += inspect.getsource(kind.collect).splitlines()
    text = (line.strip() for line in found)
    return sum(bool(line) and not line.startswith(("import ", "from ", "#")) for line in text)


def measure(engine: str, model: str, threads: int, rounds: int) -> dict[str, Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    arguments: dict[str, Any] = {
        "lens": (encode(SENTENCE),),
        "patch": (encode(CLEAN), encode(OTHER), *(encode(name)[0] for name in NAMES)),
        "steer": tuple([encode(text) for text in texts] for texts in (GOOD, BAD, BEGINNINGS)),
    }
    for many in arguments["steer"]:
        assert len({len(ids) for ids in many}) == 1, "prompts of one length need no padding"
    start = time.perf_counter()
    peer = ENGINES[engine](model, threads)
    report: dict[str, Any] = {"engine": engine, "load": time.perf_counter() - start}
    for task in TASKS:
        seconds = []
        for _ in range(1 + rounds):
            if seconds and seconds[0] > LONG:
                break
            if hasattr(peer, "reset"):
                peer.reset()  # nothing of a round is in the next one's cache
            start = time.perf_counter()
            found = run(getattr(peer, task), arguments[task])
            seconds.append(time.perf_counter() - start)
        later = statistics.median(seconds[1:] or seconds)
        count = lines(type(peer), task)
        report[task] = {"lines": count, "first": seconds[0], "again": later, "result": np.asarray(found).tolist()}
        print(f"{engine:16} {task:6} {count:3} lines, first {seconds[0]:7.2f} s, again {later:7.2f} s", flush=True)
    if hasattr(peer, "close"):
        peer.close()
    return report


def run(function: Any, arguments: Any) -> Any:
    return asyncio.run(function(*arguments)) if inspect.iscoroutinefunction(function) else function(*arguments)


def compare(reports: list[dict[str, Any]]) -> None:
    first = reports[0]
    for report in reports[1:]:
        lens, steer = (np.mean(np.equal(report[task]["result"], first[task]["result"])) for task in ("lens", "steer"))
        patch = np.abs(np.subtract(report["patch"]["result"], first["patch"]["result"])).max()
        print(
            f"{report['engine']:16} {lens:.1%} of the lens's tokens, patched difference of logits within {patch:.1e}, "
            f"{steer:.1%} of the steered tokens as {first['engine']}"
        )


def main() -> None:
    options = harness.options(
        __doc__, "model", model=str, peer=([], "ENGINE=PYTHON, the interpreter that has it"), engine=(str, ENGINES),
        rounds=3, threads=2, out=Path,
    )  # fmt: skip
    if options.engine is not None:
        report = measure(options.engine, options.model, options.threads, options.rounds)
        if options.out is not None:
            options.out.write_text(json.dumps(report))
        return
    interpreters = {"rekindle": sys.executable, **dict(pair.split("=", 1) for pair in options.peer)}
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for engine, interpreter in interpreters.items():
            out = Path(folder) / f"{engine}.json"
            numbers = ["--rounds", str(options.rounds), "--threads", str(options.threads)]
            command = [interpreter, __file__, options.model, "--engine", engine, "--out", str(out), *numbers]
            if subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode == 0:
                reports.append(json.loads(out.read_text()))
    compare(reports)


if __name__ == "__main__":
    main()
