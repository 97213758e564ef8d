"""Two trained models, as files that people download: their numbers compared with llama.cpp's, and what a session does.

`tests/golden/real/make.py` wrote llama.cpp's numbers. The files come from the package index.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

import rekindle
from helpers import real_checkpoints
from helpers.chatting import HERMES
from helpers.kernels_under_test import kernel
from rekindle import Session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GOLDEN = Path(__file__).parents[1] / "golden" / "real"
OPTIONS: dict[str, Any] = {"quiet": True, "max_model_len": 1024, "max_requests": 4}


class Opened(NamedTuple):
    """A session of a real file, the file, and what llama.cpp makes of it."""

    session: Session
    path: Path
    golden: dict[str, Any]
    cache: Path


@pytest.fixture(scope="module", params=list(real_checkpoints.REAL))
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    path = real_checkpoints.path_or_reason(request.param)
    if isinstance(path, str):
        pytest.skip(path)
    golden = json.loads((GOLDEN / "llama_cpp.json").read_text())[request.param]
    cache = tmp_path_factory.mktemp("cache")
    with rekindle.open_sync(path, cache_dir=cache, **OPTIONS) as session:
        yield Opened(session, path, golden, cache)


def test_texts_have_llama_cpps_tokens(opened: Opened) -> None:
    encode = opened.session.tokenizer.encode
    assert {text: encode(text) for text in opened.golden["tokens"]} == opened.golden["tokens"]
    ids = opened.golden["ids"]
    assert encode((GOLDEN / "text.txt").read_text())[: len(ids)] == ids


def test_a_long_prompt_in_a_notebook_leaves_the_kernel_answering() -> None:
    path = real_checkpoints.path_or_reason("smollm2")
    if isinstance(path, str):
        pytest.skip(path)
    with kernel() as notebook:
        notebook.ok(f"import asyncio, rekindle; session = await rekindle.open({str(path)!r}, quiet=True)", timeout=300)
        notebook.ok("request = asyncio.ensure_future(session.generate('x ' * 3000, max_tokens=4))")
        assert [notebook.ok("print(1 + 1)") for _ in range(20)] == ["2"] * 20
        assert notebook.ok("print((await request).usage.prompt_tokens)", timeout=300) == "3001"


def test_a_texts_perplexity_is_that_of_float32(opened: Opened) -> None:
    """Within 1 %, and at most 1 % above llama.cpp's, which rounds the same weights' products in its own way."""
    done = opened.session.generate_sync(opened.golden["ids"], max_tokens=0, prompt_logprobs=1)
    scored = done.prompt_logprobs
    perplexity = math.exp(-np.mean([token.logprob for token in scored]))
    likeliest = [token.top_ids[0] for token in scored]
    agreed = np.mean(np.equal(likeliest, opened.golden["likeliest"][: len(likeliest)]))
    float32, theirs = opened.golden["float32"], opened.golden["perplexity"]
    print(f"{opened.path.name}: {perplexity:.3f}, float32 {float32:.3f}, llama.cpp {theirs:.3f}, agreed {agreed:.3f}")
    assert abs(perplexity / float32 - 1) < 0.01
    assert perplexity < 1.01 * theirs
    assert agreed > 0.9


def test_greedy_texts_begin_as_llama_cpps(opened: Opened) -> None:
    """Two likeliest tokens may be as likely as each other; from there on texts are two texts."""
    prompts, wanted = zip(*opened.golden["greedy"].items(), strict=True)
    found = opened.session.generate_sync(list(prompts), max_tokens=len(wanted[0]), ignore_eos=True)
    alike = [
        next((at for at, pair in enumerate(zip(done.token_ids, ids, strict=True)) if len({*pair}) > 1), len(ids))
        for done, ids in zip(found, wanted, strict=True)
    ]
    print(opened.path.name, "tokens in common:", alike)
    assert np.mean(alike) > len(wanted[0]) / 3


def test_an_answer_by_the_models_own_template(opened: Opened) -> None:
    if "Instruct" not in opened.path.name:
        pytest.skip("a base model, whose file has no chat template")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    done = opened.session.chat(question, temperature=0, max_tokens=16).result_sync()
    assert done.prompt is not None
    assert done.prompt.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert done.text.startswith("L'Étoile, la Cité, la"), "that is what llama.cpp answers with this file"


@dataclasses.dataclass
class City:
    continent: Literal["Africa", "Asia", "Europe"]
    capital: bool


def weather(city: str, days: int = 1) -> str:
    """The weather forecast of a city."""
    return f"{days} days of rain in {city}"


def test_an_object_and_a_call_of_a_tool(opened: Opened) -> None:
    pytest.importorskip("llguidance", reason="the extra `structured`")
    done = opened.session.generate_sync("Paris as JSON: ", schema=City, max_tokens=60)
    assert isinstance(done.parsed, City)
    reply = opened.session.chat(
        [{"role": "user", "content": "How is the weather in Paris?"}],
        tools=[weather], tool_choice="required", template=HERMES, max_tokens=60, temperature=0.0,
    ).result_sync()  # fmt: skip
    call, *_ = reply.tool_calls  # a base model may go on with others
    assert call.name == "weather"
    assert isinstance(call.arguments["city"], str)


def test_a_restart_goes_on_with_what_was_computed(opened: Opened) -> None:
    ids = opened.golden["ids"][:256]
    first = opened.session.generate_sync(ids, max_tokens=16, ignore_eos=True)
    opened.session.save("real").result_sync()
    with rekindle.open_sync(opened.path, cache_dir=opened.cache, restore="real", **OPTIONS) as again:
        second = again.generate_sync(ids, max_tokens=16, ignore_eos=True)
    assert second.usage.cached_tokens >= 200
    assert second.token_ids == first.token_ids


WRITING = """
import sys
import rekindle
from rekindle._src.programs import layered, warming

path, folder, parts = sys.argv[1:]
warming.seconds_of_parts = lambda *_: 600
if parts == "False":
    layered.MANY_LAYERS = 1000
with rekindle.open_sync(path, cache_dir=folder, quiet=True) as session:
    done = session.generate_sync("The history of the city begins", max_tokens=40, ignore_eos=True, logprobs=2)
    programs = engine_of(session).runner.programs
    assert (parts == "True") == any(isinstance(one, layered.LayeredProgram) for one in programs.ledger.ready.values())
print(done.logprobs)
"""


def test_a_first_session_in_parts_has_the_bits_of_whole_programs(opened: Opened, tmp_path: Path) -> None:
    """In processes of their own, since the suite's level of optimisation joins no products and sums."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", WRITING, str(opened.path)]
    in_parts, whole = (
        subprocess.run(
            [*command, str(tmp_path / parts), parts], env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for parts in ("True", "False")
    )
    assert in_parts == whole


READING = """
import sys
import threading
import rekindle

path, folder = sys.argv[1:]
with rekindle.open_sync(path, cache_dir=folder, quiet=True) as session:
    for prompt in ("The capital of France is", "Once upon a time", "A list of three colours:"):
        session.generate_sync(prompt, max_tokens=60)
    for thread in threading.enumerate():
        if thread.name == "rekindle warming":
            thread.join()  # the compiler takes up to 80 MB while it works
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmRSS:")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is resident")
def test_a_file_in_four_bits_takes_its_size_and_400_megabytes(tmp_path: Path) -> None:
    """The first process packs the weights, and what its compiler keeps counts; the second maps the kept weights."""
    path = real_checkpoints.path_or_reason("gemma3")
    if isinstance(path, str):
        pytest.skip(path)
    for start, allowed in ("first", 420e6), ("second", 400e6):
        command = [sys.executable, "-c", READING, str(path), str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        held = int(done.stdout.split()[-1]) << 10
        print(f"{path.name}, {start} start: {held / 1e6:.0f} MB")
        assert held <= path.stat().st_size + allowed, start
