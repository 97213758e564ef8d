"""Drafts of models with states, and of their own heads, with grammars and every other option: the same tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest

import rekindle
from helpers import checkpoints
from helpers.draft_heads import with_head
from helpers.small import LEAST
from rekindle import Session
from rekindle._src.drafts import resting
from rekindle._src.scheduling.drafting.costs import StepCosts

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
pytestmark = [pytest.mark.usefixtures("shared_programs"), pytest.mark.thorough]
anyio_test = pytest.mark.anyio
TINY = Path(rekindle.__file__).parent / "tiny" / "model"
TEMPLATE = (
    "{% if false %}{{ tools }}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": WORD, "tags": {"type": "array", "items": WORD, "maxItems": 3}, "kind": {"enum": ["story", "poem"]},
    },
    "required": ["title", "tags", "kind"],
    "additionalProperties": False,
}  # fmt: skip
FEW = dict.fromkeys((20, 21, 22), 60.0)  # of which the head says the right one at times
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}
REPEATED: dict[str, Any] = {"regex": "(the cat sat on the mat, (and|or) )+the end", "max_tokens": 60}
REQUESTS: dict[str, dict[str, Any]] = {
    "schema": {"schema": SCHEMA},
    "drawn schema": {"schema": SCHEMA, **DRAWN},
    "regex": REPEATED,
    "drawn regex": REPEATED | DRAWN,
    "choice": {"choice": ["a cat and a dog", "a cat and a bird"], **DRAWN},
    "penalised": {"schema": SCHEMA, "frequency_penalty": 0.8, "repetition_penalty": 1.2, **DRAWN},
    "processed": {"schema": SCHEMA, "processors": [LEAST.name]},
    "measured": {"schema": SCHEMA, "logprobs": 2, **DRAWN},
    "stopped": REPEATED | {"stop": ["or the end", "and the cat"]},
    "captured": {"schema": SCHEMA, "capture": {"residual": [1]}},
    "free": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30},
}
KINDS: dict[str, dict[str, Any]] = {
    "mtp": {"drafts": "mtp"}, "suffix": {"drafts": "suffix"}, "lookup": {"prompt_lookup": 3},
}  # fmt: skip


def paint(colour: Literal["red", "blue"], coats: Literal[1, 2] = 1) -> str:
    """Paint a ball."""
    return f"{colour} {coats}"


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes every draft that there is room for."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    monkeypatch.setattr(resting, "PLAIN_STEPS", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with states, a head and the embedded model's tokenizer."""
    raw = with_head("qwen3.5") | {"vocab_size": 2048, "max_position_embeddings": 512}
    written = {key: value for key, value in raw.items() if key != "draft_head"}
    place = checkpoints.write(tmp_path_factory.mktemp("hybrid"), written, checkpoints.tensors(raw))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, place)
    return str(place)


def opened(folder: str, **options: Any) -> Session:
    return rekindle.open_sync(
        folder, dtype="float32", max_requests=4, max_tokens_per_step=32, max_model_len=256, page_size=16, seed=0,
        disk_memory=0, precompile="lazy", quiet=True, processors=[LEAST], **options,
    )  # fmt: skip


async def texts(session: Session) -> dict[str, Any]:
    """The tokens of all requests, alone and together, of a chat with a tool, and of forks."""
    alone = await session.generate("Alone:", max_tokens=40, temperature=0.0, ignore_eos=True, logit_bias=FEW)
    found: dict[str, Any] = {"alone": list(alone.token_ids)}
    prompts = {name: f"{name}: a story of the cat and the dog, as JSON" for name in REQUESTS}
    options = {name: {"max_tokens": 60} | options for name, options in REQUESTS.items()}
    for turn in range(2):  # the second finds prompts and texts in the cache
        handles = {name: session.submit(prompts[name], **options[name]) for name in REQUESTS}
        for name, handle in handles.items():
            done = await handle
            found[f"{name} {turn}"] = list(done.token_ids)
            if name == "measured":
                found[f"values {turn}"] = [round(one.logprob, 3) for one in done.logprobs]
    whole = await session.generate(prompts["schema"], **options["drawn schema"])
    fork = await session.fork(whole, at=5, seed=11)
    found["fork"] = list(fork.token_ids)
    found["several"] = [list(one.token_ids) for one in await session.generate("One:", n=3, **options["drawn regex"])]
    for place, drawing in enumerate(({"temperature": 0.0}, DRAWN)):
        reply = await session.chat(
            [{"role": "user", "content": "Who?"}], tools=[paint], tool_choice="required", template=TEMPLATE,
            max_tokens=60, **drawing,
        )  # fmt: skip
        found[f"tool {place}"] = list(reply.token_ids)
    session.check_integrity()
    return found


@anyio_test
@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_those_without_drafts(folder: str, kind: str) -> None:
    with opened(folder, drafts="none") as session:
        expected = await texts(session)
    with opened(folder, **KINDS[kind]) as session:
        assert await texts(session) == expected
        stats = session.stats()
    assert stats.drafters["forced"].accepted > 20, stats.drafters
    if kind == "mtp":
        assert stats.drafters["mtp"].drafted > 0, stats.drafters
