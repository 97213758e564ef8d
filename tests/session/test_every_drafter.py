"""The same tokens with every drafter and with none: 200 prompts, greedy and drawn, with all that a request may ask for.

Each of two models gets a hundred prompts that share beginnings, ten for each combination of options. One model has
states in most layers and a draft head, the other has windows, an assistant and a head of EAGLE-3. There are fewer pages
than the requests that run at once may need, so that some wait for room or are preempted. Then the session is opened
again from what it saved, and serves a few of each kind. Each drafter's own file tests that nothing is compiled while
serving.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers import adapters, assistants, block_heads, checkpoints, eagle
from helpers.draft_heads import with_head
from helpers.sessions import eventually
from helpers.small import LEAST
from rekindle import Completion, Handle, Session, tiny
from rekindle._src.drafts import resting
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.registry import config_from_hf
from rekindle._src.scheduling.drafting.costs import StepCosts
from session.test_state_cache import tokens

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
pytestmark = [pytest.mark.usefixtures("shared_programs"), pytest.mark.thorough]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 6, "max_tokens_per_step": 32, "max_model_len": 128, "page_size": 16,
    "device_pages": 14, "host_memory": 64 << 20, "disk_memory": 1 << 28, "precompile": "lazy", "seed": 0, "quiet": True,
    "max_adapters": 1, "max_adapter_rank": 8, "processors": [LEAST],
}  # fmt: skip
SIZES = {"vocab_size": 2048, "max_position_embeddings": 128}
RAW: dict[str, dict[str, Any]] = {
    "states": {**with_head("qwen3.5"), **SIZES},
    "windows": {**checkpoints.CASES["gemma4-values-of-keys"], **SIZES, "sliding_window": 24},
}  # fmt: skip
FEW = dict.fromkeys((300, 301, 302), 60.0)
SCHEMA = {
    "type": "object", "required": ["kind", "name"], "additionalProperties": False,
    "properties": {"kind": {"enum": ["story", "poem"]}, "name": {"type": "string", "pattern": "^[a-z]{1,6}$"}},
}  # fmt: skip
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "repeating": {"ignore_eos": True, "logit_bias": FEW},
    "schema": {"schema": SCHEMA, "max_tokens": 40},
    "regex": {"regex": "(the cat sat on the mat, )+the end", "max_tokens": 30},
    "stopped": {"logit_bias": FEW, "stop_token_ids": [301], "min_tokens": 6},
    "stopped by text": {"stop": ["a", "e"], "ignore_eos": True},
    "penalised": {"ignore_eos": True, "logit_bias": FEW, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
    "processed": {"ignore_eos": True, "processors": [LEAST.name], "logit_bias": dict.fromkeys(FEW, -60.0)},
    "adapted": {"ignore_eos": True, "adapter": "own"},
    "measured": {"ignore_eos": True, "logprobs": 1, "logit_bias": FEW},
    "reasoning": {"ignore_eos": True, "reasoning_budget": 7, "logit_bias": FEW},
    "reasoning, then a schema": {"reasoning_budget": 4, "schema": SCHEMA, "max_tokens": 44},
    "reasoning, adapted": {"ignore_eos": True, "reasoning_budget": 3, "adapter": "own"},
}
OPENS_REASONING = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{% if false %}</think>{% endif %}"
SPLIT = 4  # most tokens by which a budget waits for the end of a character: these models write any bytes
EACH = 10  # prompts that ask for the same; every second one is drawn
DRAFTERS = {
    "lookup": "states",
    "mtp": "states",
    "suffix": "windows",
    "model": "windows",
    "assistant": "windows",
    "eagle3": "windows",
    "dflash": "windows",
}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in every step, as much as there is room for."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    monkeypatch.setattr(resting, "PLAIN_STEPS", 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The two models, a small model, an assistant and a head; the first three with the embedded model's tokenizer."""
    root = tmp_path_factory.mktemp("models")
    found = {
        "assistant": assistants.write(root / "assistant", assistants.raw_of(RAW["windows"])),
        "eagle3": eagle.write(root / "eagle3", eagle.raw_of(RAW["windows"], draft_vocab_size=1500)),
    }
    blocks = block_heads.raw_of(RAW["windows"])
    found["dflash"] = eagle.write(root / "dflash", blocks, block_heads.tensors(blocks))
    for name, raw in {**RAW, "model": {**checkpoints.CASES["llama"], **SIZES}}.items():
        stored = {key: value for key, value in raw.items() if key != "draft_head"}
        found[name] = str(checkpoints.write(root / name, stored, checkpoints.tensors(raw)))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny.folder() / file, found[name])
    for name in RAW:
        found[f"{name} adapter"] = str(adapters.write(root / f"{name}-adapter", trunk(name), seed=1))
    return found


def trunk(name: str) -> ModelConfig:
    """The config of a model without its head."""
    return config_from_hf({key: value for key, value in RAW[name].items() if key != "draft_head"})


def opened(folders: dict[str, str], name: str, drafter: str, cache: Path, **more: Any) -> Session:
    drafts: dict[str, Any] = {"lookup": {"prompt_lookup": 3}}.get(drafter, {"drafts": folders.get(drafter, drafter)})
    session = rekindle.open_sync(folders[name], **OPTIONS, **drafts, cache_dir=str(cache), **more)
    session.load_adapter("own", folders[f"{name} adapter"]).result_sync()
    return session


def submitted(session: Session, ids: list[int], options: dict[str, Any]) -> Handle[Completion]:
    """A request with these tokens, or a chat with their text if its reasoning has a budget."""
    if "reasoning_budget" not in options:
        return session.submit(ids, **options)
    question = session.tokenizer.decode(ids[:12])
    handle: Handle[Completion] = session.chat(question, template=OPENS_REASONING, **options)
    handle.submit()
    return handle


def texts(session: Session, each: int) -> dict[str, Any]:
    """The tokens of so many prompts of each kind, and of forks. Kinds with a program of their own are apart: each
    combination of them would be programs, too."""
    done: dict[int, Completion] = {}
    handles: dict[int, Handle[Completion]] = {}
    adapted = {name for name in REQUESTS if "adapted" in name}
    for apart in ({"processed"}, adapted, REQUESTS.keys() - {"processed"} - adapted):
        for number in range(each):
            for kind, name in enumerate(REQUESTS):
                place = number * len(REQUESTS) + kind
                ids = [*tokens(20 + number, seed=number % 3), *tokens(3 + kind, seed=place)]
                drawn = {"temperature": 1.0 + kind % 2, "seed": place} if number % 2 else {"temperature": 0.0}
                if name in apart:
                    handles[place] = submitted(session, ids, {"max_tokens": 18, **REQUESTS[name], **drawn})
        done |= {place: handle.result_sync() for place, handle in handles.items()}
    found: dict[str, Any] = {str(place): list(one.token_ids) for place, one in done.items()}
    several = session.generate_sync(tokens(30, seed=99), n=3, temperature=1.0, seed=5, max_tokens=18, ignore_eos=True)
    found["forks"] = [list(one.token_ids) for one in several]
    asked: dict[str, Any] = {"template": OPENS_REASONING, "n": 3, "temperature": 1.0, "seed": 6, "max_tokens": 18}
    thoughtful = session.chat("a b a b a", reasoning_budget=5, ignore_eos=True, **asked).result_sync()
    assert all(reasoned(one, 5) for one in thoughtful), [one.text for one in thoughtful]
    found["forks of reasoning"] = [list(one.token_ids) for one in thoughtful]
    fork = session.fork(done[2], at=3, seed=11)
    found["a fork of a text"] = list(fork.result_sync().token_ids)
    kind = list(REQUESTS).index("reasoning, then a schema")
    assert done[kind].reasoning and done[kind].parsed is not None, done[kind].text
    for at in (2, 9):
        found[f"a fork of reasoning at {at}"] = list(session.fork(handles[kind], at=at).result_sync().token_ids)
        assert tuple(found[f"a fork of reasoning at {at}"]) == done[kind].token_ids[at:], at
    session.check_integrity()
    return found


def reasoned(done: Completion, budget: int) -> bool:
    """True if the end of reasoning was forced after so many tokens, and those that end a character."""
    used = done.forced.index(True) if True in done.forced else -1
    return budget <= used <= budget + SPLIT and done.usage.reasoning_tokens == used


def wait_for_drafts(session: Session, drafter: str) -> None:
    """Generate until there are drafts: they wait for programs that are compiled meanwhile."""

    def drafted() -> bool:
        session.generate_sync([*tokens(12, seed=7)] * 2, max_tokens=18, temperature=0.0, ignore_eos=True)
        counts = session.stats().drafters.get(drafter)
        return counts is not None and counts.drafted > 0

    eventually(drafted, 240)


_expected: dict[str, dict[str, Any]] = {}


def expected(folders: dict[str, str], name: str, cache: Path) -> dict[str, Any]:
    """The texts of a session without drafts."""
    if name not in _expected:
        with opened(folders, name, "none", cache) as session:
            _expected[name] = texts(session, EACH)
    return _expected[name]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_without_drafts(drafter: str, folders: dict[str, str], tmp_path: Path) -> None:
    name = DRAFTERS[drafter]
    wanted = expected(folders, name, tmp_path / "none")
    with opened(folders, name, drafter, tmp_path / "cache") as session:
        wait_for_drafts(session, drafter)
        found = texts(session, EACH)
        assert found == wanted
        stats = session.stats()
        counts = stats.drafters[drafter]
        assert counts.drafted > 0, stats.drafters  # how many are right depends on which requests run at once
        assert stats.drafters["forced"].accepted > 20, stats.drafters
        session.save("texts").result_sync()
    with opened(folders, name, drafter, tmp_path / "cache", restore="texts") as session:
        wait_for_drafts(session, drafter)
        few = texts(session, 2)
        assert few == {place: found[place] for place in few}
        stats = session.stats()
        assert stats.drafters[drafter].drafted > 0, stats.drafters


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_budgets_compile_nothing_while_serving(drafter: str, folders: dict[str, str], tmp_path: Path) -> None:
    """Their steps are those of grammars, which are compiled ahead."""
    name = DRAFTERS[drafter]
    small: dict[str, Any] = {"max_requests": 2, "max_model_len": 64, "max_adapters": 0, "processors": []}
    small |= {"precompile": "all", "structured": True, "cache_dir": str(tmp_path)}
    drafts: dict[str, Any] = {"lookup": {"prompt_lookup": 1}}.get(drafter, {"drafts": folders.get(drafter, drafter)})
    asked: dict[str, Any] = {"template": OPENS_REASONING, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    with rekindle.open_sync(folders[name], **OPTIONS | small | drafts) as session:
        wait_for_drafts(session, drafter)
        before, programs = session.stats(), {program.name for program in session.programs()}
        handles = [session.chat("a b a b", reasoning_budget=budget, **asked) for budget in (0, 3, 9)]
        for budget, handle in zip((0, 3, 9), handles, strict=True):
            assert reasoned(handle.result_sync(), budget), handle.text
        session.chat("a b a b", reasoning_budget=4, n=2, **asked | {"temperature": 1.0}).result_sync()
        session.chat("a b a b", reasoning_budget=4, schema=SCHEMA, **asked | {"ignore_eos": False}).result_sync()
        session.fork(handles[2], at=2).result_sync()
        after = session.stats()
        assert after.drafters[drafter].drafted > before.drafters[drafter].drafted
        assert {program.name for program in session.programs()} == programs
        assert (after.traces, after.compilations) == (before.traces, before.compilations)
