"""Attributions compared with captum and TransformerLens: equal within rounding, lines of code and seconds.

    python attribution_peers.py FOLDER [--peer captum=PYTHON transformer_lens=PYTHON] [--rounds 3]
    python attribution_peers.py random OUT --tokenizer FOLDER
    python attribution_peers.py FOLDER --ranking [--exact 300]

The model is a folder with a Llama in float32; `random` writes one whose heads do not share keys, with the tokenizer of
another folder, since TransformerLens has edges of such models alone. The number is the difference of two names' logits
after a sentence about who gets a ball; the source is the same sentence with the other name. "input" is gradients times
embeddings, "integrated" 32 places from the embeddings of the token that ends a text, "nodes" and "edges" are estimates
of patches. Each engine runs in a process of its own, by the interpreter that `--peer` names; printed are lines, the
seconds of the first run and the median of later ones, and the largest difference from rekindle's scores, as a share of
the largest score.

`--ranking` compares the estimates with exact patches, in rekindle alone: the rank correlation of sizes over the nodes
or edges that were patched, and how many of the ten strongest of the one are among the ten strongest of the other.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
from tap_peers import CLEAN, NAMES, OTHER, lines, run

STEPS = 32
SITES: dict[str, object] = {"heads": "all", "mlp": "all"}


class Rekindle:
    def __init__(self, model: str, threads: int) -> None:
        import rekindle

        options: dict[str, Any] = {"disk_memory": 0, "precompile": "lazy", "max_model_len": 256, "max_requests": 2}
        self.session = rekindle.open_sync(model, dtype="float32", quiet=True, **options)

    def close(self) -> None:
        self.session.close()

    async def input(self, ids: list[int], other: list[int], of: Any, end: int) -> Any:
        a = await self.session.attribute(ids, of=of, at={"mlp": 0})
        return a.scores

    async def integrated(self, ids: list[int], other: list[int], of: Any, end: int) -> Any:
        a = await self.session.attribute(ids, of=of, method="integrated", steps=STEPS, baseline=end, at={"mlp": 0})
        return a.scores

    async def nodes(self, ids: list[int], other: list[int], of: Any, end: int) -> Any:
        a = await self.session.attribute(ids, of=of, method="patching", source=other)
        return {f"{key[0]} {key[1]}": a[key].tolist() for key in a if isinstance(key, tuple)}

    async def edges(self, ids: list[int], other: list[int], of: Any, end: int) -> Any:
        a = await self.session.attribute(ids, of=of, method="patching", source=other, at={"mlp": 0}, edges=True)
        pairs = [(source, target) for source in a.edges.sources for target in a.edges.targets]
        return {
            f"{source}, {target}": float(score)
            for (source, target), score in zip(pairs, a.edges.scores.flat, strict=True)
        }


class Captum:
    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        models: Any = AutoModelForCausalLM
        self.model = models.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()

    def forward(self, of: Any) -> Any:
        def difference(ids: Any) -> Any:
            logits = self.model(ids).logits[:, -1]
            return logits[:, of.token] - logits[:, of.minus]

        return difference

    def input(self, ids: list[int], other: list[int], of: Any, end: int) -> Any:
        import torch
        from captum.attr import LayerGradientXActivation

        method = LayerGradientXActivation(self.forward(of), self.model.model.embed_tokens)
        return method.attribute(torch.tensor([ids])).sum(dim=-1)[0].detach()

    def integrated(self, ids: list[int], other: list[int], of: Any, end: int) -> Any:
        import torch
        from captum.attr import LayerIntegratedGradients

        method = LayerIntegratedGradients(self.forward(of), self.model.model.embed_tokens)
        inputs, baselines = torch.tensor([ids]), torch.full((1, len(ids)), end)
        return method.attribute(inputs, baselines, n_steps=STEPS).sum(dim=-1)[0].detach()


class TransformerLens:
    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformer_lens.model_bridge import TransformerBridge

        torch.set_num_threads(threads)
        self.model = TransformerBridge.boot_transformers(model, device="cpu", dtype=torch.float32)
        self.model.eval()

    def patch(self, ids: list[int], other: list[int], of: Any, granularity: Any) -> Any:
        import torch
        from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch

        def metric(logits: Any) -> Any:
            return logits[0, -1, of.token] - logits[0, -1, of.minus]

        clean, corrupt = torch.tensor([other]), torch.tensor([ids])
        return attribution_patch(self.model, clean, corrupt, metric, EdgeAttributionConfig(granularity=granularity))

    def nodes(self, ids: list[int], other: list[int], of: Any, end: int) -> Any:
        result, found = self.patch(ids, other, of, "node"), dict[str, Any]()
        for node, score in result.node_scores.items():
            if node.kind == "mlp_out":
                found.setdefault(f"mlp {node.layer}", [0.0] * len(ids))[node.position] = score
            elif node.kind == "attn_head_out":
                heads = found.setdefault(f"heads {node.layer}", [[0.0] * self.model.cfg.n_heads for _ in ids])
                heads[node.position][node.head] = score
        return found

    def edges(self, ids: list[int], other: list[int], of: Any, end: int) -> Any:
        result, found = self.patch(ids, other, of, "edge"), dict[str, float]()
        for (source, target), score in result.edge_scores.items():
            name = f"{_name(source)}, {_name(target)}"
            found[name] = found.get(name, 0.0) + float(score)
        return found


def _name(node: Any) -> str:
    """Return our name of one of TransformerLens's nodes."""
    if node.kind in ("embed", "logits"):
        return {"embed": "embedding", "logits": "output"}[node.kind]
    site = {"attn_head_out": "heads", "mlp_out": "mlp", "mlp_in": "mlp"}.get(node.kind, node.kind[0])
    return f"layer {node.layer}, {site}" + ("" if node.head is None else f" {node.head}")


ENGINES: dict[str, Any] = {"rekindle": Rekindle, "captum": Captum, "transformer_lens": TransformerLens}
TASKS = ("input", "integrated", "nodes", "edges")


def prompts(model: str) -> tuple[list[int], list[int], Any, int]:
    """Return the corrupt prompt, the clean one, the number and the token that ends a text."""
    from tokenizers import Tokenizer

    import rekindle

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    names = [encode(name)[0] for name in NAMES]
    return encode(OTHER), encode(CLEAN), rekindle.logit_difference(*names), 0


def measure(engine: str, model: str, threads: int, rounds: int) -> dict[str, Any]:
    arguments, report = prompts(model), dict[str, Any](engine=engine)
    peer = ENGINES[engine](model, threads)
    for task in TASKS:
        if not hasattr(peer, task):
            continue
        seconds, found = [], None
        try:
            for _ in range(1 + rounds):
                start = time.perf_counter()
                found = run(getattr(peer, task), arguments)
                seconds.append(time.perf_counter() - start)
        except ValueError as error:
            print(f"{engine:16} {task:10} refused: {str(error)[:120]}", flush=True)
            continue
        helpers = [name for name in ("forward", "patch") if hasattr(peer, name)]
        count = lines(type(peer), task) + sum(lines(type(peer), name) for name in helpers)
        report[task] = {"result": found if isinstance(found, dict) else np.asarray(found).tolist()}
        later = statistics.median(seconds[1:] or seconds)
        print(f"{engine:16} {task:10} {count:3} lines, first {seconds[0]:7.2f} s, again {later:7.2f} s", flush=True)
    if hasattr(peer, "close"):
        peer.close()
    return report


def compare(reports: list[dict[str, Any]]) -> None:
    first = reports[0]
    for report in reports[1:]:
        for task in TASKS:
            if task not in report or task not in first:
                continue
            own, other = first[task]["result"], report[task]["result"]
            if isinstance(own, dict):
                keys = [key for key in own if key in other]
                own, other = ([value for key in keys for value in np.ravel(each[key])] for each in (own, other))
            share = np.abs(np.subtract(own, other)).max() / np.abs(own).max()
            print(f"{report['engine']:16} {task:10} {np.size(own):,} scores within {share:.1e} of rekindle's largest")


def ranks(values: Any) -> Any:
    return np.argsort(np.argsort(np.abs(values)))


async def ranking(model: str, exact: int) -> None:
    ids, other, of, _ = prompts(model)
    engine = Rekindle(model, 0)
    kinds: dict[str, dict[str, Any]] = {
        "patching": {"method": "patching"},
        "patching, 8 steps": {"method": "patching", "steps": 8},
        "atp_star": {"method": "atp_star"},
        "edges": {"method": "patching", "edges": True},
        "edges, 8 steps": {"method": "patching", "edges": True, "steps": 8},
    }
    for name, options in kinds.items():
        start = time.perf_counter()
        a = await engine.session.attribute(ids, of=of, source=other, exact=exact, **options)
        patched = a.patched if a.edges is None else a.edges.patched
        scores, right = (np.array([getattr(one, field) for one in patched]) for field in ("score", "exact"))
        rank, sizes = np.corrcoef(ranks(scores), ranks(right))[0, 1], np.corrcoef(scores, right)[0, 1]
        both = {*np.argsort(-np.abs(scores))[:10].tolist()} & {*np.argsort(-np.abs(right))[:10].tolist()}
        print(
            f"{name:18} {len(patched)} patched: rank correlation {rank:.3f}, correlation {sizes:.3f}, {len(both)} of "
            f"the ten strongest, {time.perf_counter() - start:.1f} s with compiling",
            flush=True,
        )
    engine.close()


def write_random(folder: Path, tokenizer: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 384}
    config: Any = LlamaConfig(vocab_size=49152, intermediate_size=1024, initializer_range=0.08, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, folder)


def main() -> None:
    options = harness.options(
        __doc__, "model out", model=str, out=(Path(), "where `random` writes, or a report"), ranking=False, exact=300,
        tokenizer=(Path(), "the folder with a tokenizer for `random`"), engine=(str, ENGINES), rounds=3, threads=2,
        peer=([], "ENGINE=PYTHON, the interpreter that has it"),
    )  # fmt: skip
    if options.model == "random":
        write_random(options.out, options.tokenizer)
        return
    if options.ranking:
        run(ranking, (options.model, options.exact))
        return
    if options.engine is not None:
        report = measure(options.engine, options.model, options.threads, options.rounds)
        if options.out.name:
            options.out.write_text(json.dumps(report))
        return
    interpreters = {"rekindle": sys.executable, **dict(pair.split("=", 1) for pair in options.peer)}
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for engine, interpreter in interpreters.items():
            out = Path(folder) / f"{engine}.json"
            numbers = ["--rounds", str(options.rounds), "--threads", str(options.threads)]
            command = [interpreter, __file__, options.model, str(out), "--engine", engine, *numbers]
            if subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode == 0:
                reports.append(json.loads(out.read_text()))
    compare(reports)


if __name__ == "__main__":
    main()
