"""The benchmarks' harness: options, random models, child processes, alternating rounds, and tables of figures."""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PATHS = [str(ROOT / name) for name in ("toolkit", "kernels", "tests", "toolkit/workshop/bench")]
if Path(sys.path[0]).name != "toolkit":  # which `child` puts there for a process of another tree
    sys.path[:0] = PATHS[:2]
sys.path += PATHS[2:]


def options(about: str | None, positional: str = "", /, **fields: Any) -> argparse.Namespace:
    """Parse the command line by defaults: a list takes several values, False is a flag, a type has no default.

    `(default, choices)` and `(default, "help")` say more of an option.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in fields.items():
        value, extra = value if isinstance(value, tuple) else (value, None)
        more: dict[str, Any] = {"help": extra} if isinstance(extra, str) else {"choices": extra and list(extra)}
        if value is False:
            more = {"action": "store_true", "help": more.get("help")}
        elif isinstance(value, list):
            more |= {"nargs": "+", "type": type(value[0]) if value else str, "default": value}
        else:
            more |= {"type": value} if isinstance(value, type) else {"type": type(value), "default": value}
        if name in positional.split():
            parser.add_argument(name, **more, **({"nargs": "?"} if "default" in more and "nargs" not in more else {}))
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", **more)
    return parser.parse_args()


def llama(layers: int, hidden: int, **fields: Any) -> Any:
    """A random Llama in bfloat16."""
    from rekindle._src.models.placement import random_model
    from rekindle._src.models.registry import config_from_hf

    raw = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16384, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 192),
        "intermediate_size": 3 * hidden, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, **fields,
    }  # fmt: skip
    return random_model(config_from_hf(raw), seed=0, dtype="bfloat16")


def model(name: str, **options: Any) -> Any:
    """`tiny`, a folder or a file as it is; a shape of `rekindle bench` with random weights."""
    from rekindle._src.bench.shapes import SHAPES, random_shape

    if name.lower() in SHAPES:
        return random_shape(name.lower(), **options)
    if name != "tiny" and not Path(name).exists():
        sys.exit(f"unknown model {name!r}: pass tiny, a folder, a file, or a shape: {', '.join(SHAPES)}")
    return name


def child(
    function: Callable[..., Any], *arguments: Any, python: str = sys.executable, root: Path = ROOT, **environment: str
) -> Any:
    """Run a function of a benchmark in a child process and return its result; both ways as JSON."""
    file = Path(inspect.getfile(function))
    paths = [str(root / name) for name in ("toolkit", "kernels")] + [str(ROOT / "tests"), str(file.parent)]
    code = f"import json, sys; sys.path[:0] = {paths!r}; import {file.stem} as it; "
    code += f"print(json.dumps(it.{function.__name__}(*json.loads(sys.argv[1]))))"
    environment = {"PYTHONPATH": os.pathsep.join(paths), **environment}
    command = [python, "-c", code, json.dumps(arguments, default=str)]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{function.__name__} of {file.name} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def turns(names: Iterable[Any], rounds: int, warm_up: int = 1) -> Iterator[tuple[int, Any]]:
    """Each round's number with each name, in an order that rotates; numbers below zero are rounds to warm up."""
    order = list(names)
    for number in range(-warm_up, rounds):
        first = number % len(order)
        yield from ((number, name) for name in order[first:] + order[:first])


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Each round's own ratio."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Format the median and the range of values."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def medians(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each figure; every record must have all of them."""
    return {name: statistics.median(record[name] for record in records) for name in records[0]}


def table(*heads: str) -> None:
    """Print the head of a table in Markdown."""
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def gaps(times: Sequence[float]) -> list[float]:
    return [later - before for before, later in itertools.pairwise(times)]


def memory(name: str = "VmHWM") -> int:
    """Bytes of this process: the largest resident size since it was executed, or another line of its status."""
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
