"""Typical mistakes in a real notebook: each is shown in at most four lines, with the user's own line and a fix."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from helpers.kernels_under_test import Kernel, kernel
from helpers.thorough import by_default

# jupyter_client leaves event loops and their sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MOST = 4
LONGEST = 420  # characters of a line
SETUP = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
import copy, pickle
import jax, jax.numpy as jnp, numpy as np
import rekindle
from helpers.sessions import fake_session
def cut(logits, context):
    return logits[:, :5]
def other(logits, context):
    return logits + jnp.zeros(7)
def plain(logits, context):
    return np.asarray(logits)
Processor = rekindle.LogitsProcessor
session, closed = fake_session(), fake_session()
await closed.aclose()
"""
# What is written, the error, and words that its message has to hold.
MISTAKES = {
    "a misspelled option of open": ("await rekindle.open('tiny', max_reqests=4)", "ConfigError", "max_requests"),
    "a misspelled sampling option": ("await session.generate('x', temprature=1)", "InvalidRequest", "temperature"),
    "a prompt of None": ("await session.generate(None)", "InvalidRequest", "prompt=None"),
    "a number as prompt": ("await session.generate(123)", "InvalidRequest", "prompt=123"),
    "a wrong path": ("await rekindle.open('/no/such/folder')", "CheckpointError", "/no/such/folder"),
    "a hub id offline": ("await rekindle.open('nowhere/nothing')", "CheckpointError", "nowhere/nothing"),
    "a prompt that is too long": ("await session.generate('x' * 5000)", "PromptTooLong", "max_model_len"),
    "one of a list is too long": ("await session.generate(['a', 'x' * 5000])", "PromptTooLong", "prompt[1]"),
    "an empty prompt": ("await session.generate('')", "InvalidRequest", "no tokens"),
    "one of a list is empty": ("await session.generate(['a', 'b', ''])", "InvalidRequest", "prompt[2]"),
    "a forgotten await": ("session.generate('x').text", "InvalidRequest", "await"),
    "a closed session": ("await closed.generate('x')", "SessionClosed", "Open another one"),
    "an unknown dtype": ("await rekindle.open('tiny', dtype='float8')", "ConfigError", "'bfloat16'"),
    "a snapshot that isn't there": (
        "await rekindle.open('tiny', restore='yesterday', max_model_len=64, device_pages=8)", "StoreError", "yesterday"
    ),
    "a snapshot's wrong name": ("await session.save('../up')", "StoreError|ConfigError|InvalidRequest", "../up"),
    "chat without a template": ("await session.chat([{'role': 'user', 'content': 'x'}])", "InvalidRequest", "template"),
    "n of zero": ("await session.generate('x', n=0)", "InvalidRequest", "n=0"),
    "a huge n": ("await session.generate('x', n=10**9)", "InvalidRequest", "n=1000000000"),
    "an empty stop string": ("await session.generate('x', stop='')", "InvalidRequest", "stop"),
    "a negative temperature": ("await session.generate('x', temperature=-1)", "InvalidRequest", "temperature=-1"),
    "an option of open in a request": ("await session.generate('x', dtype='int8')", "InvalidRequest", "open("),
    "async for on a list": ("await session.stream(['a', 'b'])", "InvalidRequest", "prompt="),
    "errors=return without a list": ("await session.generate('x', errors='return')", "InvalidRequest", "[prompt]"),
    "eight bits as a dtype": ("await rekindle.open('tiny', dtype='int8')", "ConfigError", "quantize='int8'"),
    "a dtype with a slip": ("await rekindle.open('tiny', dtype='bflaot16')", "ConfigError", "mean 'bfloat16'"),
    "a misspelled model": ("await rekindle.open('tinny')", "CheckpointError", "Did you mean 'tiny'"),
    "bits that there are not": ("await rekindle.open('tiny', quantize='int5')", "ConfigError", "'int4'"),
    "a policy of another engine": ("await rekindle.open('tiny', policy='fifo')", "ConfigError", "'fcfs'"),
    "an option of vLLM": ("await rekindle.open('tiny', gpu_memory_utilization=0.9)", "ConfigError", "device_memory"),
    "a number as text": ("await rekindle.open('tiny', max_requests='4')", "ConfigError", "Pass an int"),
    "no number of requests": ("await rekindle.open('tiny', max_requests=0)", "ConfigError", "Use 1 or more"),
    "a mesh of no devices": ("await rekindle.open('tiny', mesh=0)", "ConfigError", "mesh=0"),
    "a processor that cuts": (
        "await rekindle.open('tiny', processors=[Processor(cut, name='cut')])", "ConfigError", "the same shape"),
    "a processor that fails": (
        "await rekindle.open('tiny', processors=[Processor(other, name='it')])", "ConfigError", "in its line 2"),
    "a processor of numpy": (
        "await rekindle.open('tiny', processors=[Processor(plain, name='it')])", "ConfigError", "Use jax.numpy"),
    "a bare processor": ("await rekindle.open('tiny', processors=[cut])", "ConfigError", "LogitsProcessor(function"),
    "a pickled session": ("pickle.dumps(session)", "NotPicklable", "Open a session in each process"),
    "a copied session": ("copy.deepcopy(session)", "NotPicklable", "Open a session in each process"),
    "a pickled handle": ("pickle.dumps(session.submit('x'))", "NotPicklable", "Open a session in each process"),
    "a hot temperature": ("await session.generate('x', temperature='hot')", "InvalidRequest", "Pass a float"),
    "a share above one": ("await session.generate('x', top_p=1.5)", "InvalidRequest", "Use a share such as 0.95"),
    "a least beyond the most": (
        "await session.generate('x', max_tokens=4, min_tokens=9)", "InvalidRequest", "Raise max_tokens"),
    "an option of transformers": ("await session.generate('x', max_new_tokens=9)", "InvalidRequest", "Use max_tokens"),
    "a bias as a list": ("await session.generate('x', logit_bias=[1, 2])", "InvalidRequest", "Pass a dict"),
    "a yes that is a number": ("await session.generate('x', ignore_eos=1)", "InvalidRequest", "ignore_eos=True"),
    "a negative seed": ("await session.generate('x', seed=-1)", "InvalidRequest", "at least 0"),
    "a long text": ("await session.generate('x ' * 500_000)", "PromptTooLong", "tokens"),
    "a conversation's slip": ("session.conversation(temprature=1)", "InvalidRequest", "'temperature'"),
    "a conversation not there": ("session.conversation(restore='none.json')", "InvalidRequest", "chat.save(path)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        started.ok(SETUP)
        yield started


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_shown_in_four_lines(notebook: Kernel, mistake: str) -> None:
    code, error, words = MISTAKES[mistake]
    cell = notebook.run(f"# {mistake}\n{code}")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", cell.traceback)
    print(f"\n{shown}")
    assert re.fullmatch(error, cell.error), shown
    lines = shown.split("\n")
    assert len(lines) <= MOST, shown
    assert max(map(len, lines)) <= LONGEST, "a line is wrapped over several"
    assert re.fullmatch(r"Cell In ?\[\d+\], line 2", lines[0]), shown
    assert lines[1] == f"----> 2 {code}"
    assert words in shown.split(f"{cell.error}: ", 1)[1], shown


CALLS = {
    "generate": ("done = await slow.generate('x', max_tokens=400)", "CancelledError", "text"),
    "a list": ("done = await slow.generate(['x', 'y'], max_tokens=300)", "CancelledError", "texts"),
    "chat": ("done = await slow.conversation(template='{{ messages[0].content }}').say('x')", "CancelledError", "text"),
    "sync": ("done = slow.generate_sync('x', max_tokens=400)", "KeyboardInterrupt", "text"),
    "a stream": ("for delta in slow.stream_sync('x', max_tokens=400): pass", "KeyboardInterrupt", "text"),
    "map": ("done = await slow.map([{'a': 'x'}] * 999, '{a}', max_tokens=9)", "CancelledError", "answers"),
    "map_sync": ("done = slow.map_sync([{'a': 'x'}] * 999, '{a}', max_tokens=9)", "KeyboardInterrupt", "answers"),
}  # fmt: skip


@pytest.mark.parametrize("name", by_default(CALLS, 2))
def test_an_interrupted_cell_keeps_its_text_and_says_where(notebook: Kernel, name: str) -> None:
    code, error, words = CALLS[name]
    notebook.ok("slow = slow if 'slow' in globals() else fake_session(step_seconds=0.01)\nslow.last = None")

    def interrupt() -> None:
        time.sleep(1.0)
        notebook.manager.interrupt_kernel()

    cell = notebook.run(f"print('runs')\n{code}", during=interrupt)
    assert cell.error == error, cell.traceback
    shown = re.sub(r"\x1b\[[0-9;]*m", "", cell.traceback)
    assert len(shown.split("\n")) <= MOST, shown
    assert f"----> 2 {code}" in shown
    after = r"\d+ of 999 rows; their" if words == "answers" else r"\d+ tokens; the"
    assert re.search(rf"{error}: stopped after {after} {words} (is|are) kept as session\.last", shown), shown
    if words == "answers":
        assert notebook.ok("print(len(slow.last.texts) > 5, slow.last.errors)") == "True {}"
        return
    kept = "slow.last[0]" if name == "a list" else "slow.last"
    assert notebook.ok(f"print({kept}.finish_reason, len({kept}.text) > 5, {kept}.prompt)") == "aborted True x"
    notebook.ok(f"{kept}._repr_html_(), repr({kept})")
    if name == "generate":  # and it can go on from there
        go = "rest = await slow.fork(slow.last, at=len(slow.last.token_ids), max_tokens=5)\nprint(len(rest.token_ids))"
        assert notebook.ok(go) == "5"


def test_chat_mistakes(notebook: Kernel) -> None:
    notebook.ok("from rekindle import tiny\nfrom rekindle._src.text.chat import ChatTemplate")
    notebook.ok(
        "chatting = fake_session()\nchatting._front = chatting._front._replace(chat=ChatTemplate.load(tiny.folder()))"
    )
    for code in ("chatting.chat(7)", "chatting.chat([{'role': 'wizard', 'content': 3}])", "chatting.chat([])"):
        cell = notebook.run(f"await {code}")
        assert cell.error == "InvalidRequest", cell.traceback
        assert cell.traceback.count("\n") < MOST, cell.traceback


def test_all_frames_come_back_where_they_are_asked_for(notebook: Kernel) -> None:
    notebook.ok("%xmode Verbose")
    try:
        assert "requests.py" in notebook.run("await session.generate(None)").traceback
    finally:
        notebook.ok("%xmode Context")


def test_the_cause_is_named_in_a_line(notebook: Kernel) -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise rekindle.StepFailed('it failed') from error"
    cell = notebook.run(code)
    assert cell.traceback.endswith("caused by ZeroDivisionError: division by zero")


def test_errors_stand_in_place_of_completions(notebook: Kernel) -> None:
    shown = notebook.ok("""
many = await session.generate(['a', '', 'x' * 5000, 'b', 5], errors='return', max_tokens=3)
print([type(one).__name__ for one in many])
print(*(one.index for one in many if isinstance(one, rekindle.RekindleError)))
""")
    assert shown == "['Completion', 'InvalidRequest', 'PromptTooLong', 'Completion', 'InvalidRequest']\n1 2 4"
