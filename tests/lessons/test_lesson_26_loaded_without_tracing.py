"""A start with a warm store neither traces nor compiles anything, from opening to the hundredth request.

Upstream: https://github.com/vllm-project/tpu-inference/issues/606
Programs were compiled at every start although a cache folder was set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.counting import compiled_by_jax, counts, make_scoring_programs
from helpers.sessions import engine_of
from helpers.small import LEAST, opening, plain, prompt
from rekindle._src.programs.compiling import ProgramCompiler

OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "prompt_logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 7},
    {"repetition_penalty": 1.2, "logit_bias": {9: -1.0}},
    {"processors": "least"},
]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("precompile", "anyio_backend"), [("lazy", "trio"), pytest.param("all", "asyncio", marks=pytest.mark.slow)]
)
async def test_lesson_26_nothing_is_traced_from_open_to_the_hundredth_request(
    precompile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opening(processors=[LEAST], max_requests=2) as first:
        await first.generate(prompt(0, 5), max_tokens=2)
        make_scoring_programs(engine_of(first).runner.programs)
    plain(prompt(0, 9))

    def build(self: ProgramCompiler, key: object) -> None:
        raise AssertionError(f"{key} was traced")

    monkeypatch.setattr(ProgramCompiler, "build", build)
    with compiled_by_jax() as events:
        async with opening(processors=[LEAST], max_requests=2, precompile=precompile) as session:
            for batch in range(10):
                prompts = [prompt(10 * batch + index, 1 + 6 * index) for index in range(10)]
                handles = [
                    session.submit(ids, max_tokens=4, ignore_eos=True, **OPTIONS[index % len(OPTIONS)])
                    for index, ids in enumerate(prompts)
                ]
                for handle in handles:
                    await handle
            assert counts(session) == (0, 0)
            assert {program.origin for program in session.programs()} == {"loaded"}
            assert (await session.generate(prompt(0, 9), max_tokens=20)).token_ids == plain(prompt(0, 9), 20)
    assert events == []


SCRIPT = """
import sys
from helpers.counting import compiled_by_jax, counts
import rekindle
from helpers.small import opening, prompt
def open():
    if sys.argv[1] == "random":
        return opening(max_requests=2, precompile="lazy", cache_dir=sys.argv[2]).result_sync()
    return rekindle.open_sync("tiny", max_requests=2, max_model_len=64, max_tokens_per_step=32, cache_dir=sys.argv[2])
with compiled_by_jax() as events, open() as session:
    tokens = [session.generate_sync(prompt(i, 1 + i % 50), max_tokens=3, ignore_eos=True).token_ids for i in range(100)]
    origins = {program.origin for program in session.programs()}
    print(*counts(session), len(events), *origins)
    print(tokens)
    print(*(name for name in ("numba", "orbax.checkpoint", "optax") if name in sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["random", "tiny"])
def test_lesson_26_another_process_loads_them_too(model: str, tmp_path: Path) -> None:
    """It computes the same, and JAX sees no trace and no compilation in all of it."""
    paths = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": paths}  # native kernels are those of the other tests
    if model == "random":
        environment.pop("XLA_FLAGS", None)  # compiled as users do, in as many parts as XLA likes
    command = [sys.executable, "-c", SCRIPT, model, str(tmp_path)]
    lines = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.splitlines())
    (cold, first, _), (warm, second, imported) = lines
    traced, compiled, events, origin = cold.split()
    assert traced == compiled >= "2" and int(events) > 2 and origin == "compiled", f"all was still to do: {cold}"
    assert warm.split() == ["0", "0", "0", "loaded"]
    assert first == second
    assert not {"numba", "orbax.checkpoint"} & {*imported.split()}, "what only writers and compilers need"
