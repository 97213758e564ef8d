"""Other people's clients and suites against a live server with the embedded model; each in a process of its own.

They bring plugins of pytest and bounds on each other's versions, so they are best installed into an environment of
their own, whose Python is then named by $REKINDLE_CLIENTS.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import rekindle
from helpers.sessions import wait_until_idle
from rekindle import Session

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")

CLIENTS = Path(__file__).parent / "clients"
PYTHON = os.environ.get("REKINDLE_CLIENTS", sys.executable)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def require(*packages: str) -> None:
    """Skip the test unless the clients' Python has all of these."""
    code = f"import importlib.util as util; print([one for one in {packages!r} if util.find_spec(one) is None])"
    missing = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    if missing != "[]":
        pytest.skip(f"{missing} is not installed: the extra `clients`, and $REKINDLE_CLIENTS names its Python")


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    options = {"dtype": "float32", "max_model_len": 512, "cache_dir": str(tmp_path_factory.mktemp("cache"))}
    with rekindle.open_sync("tiny", max_requests=8, **options) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture(scope="module")
def url(session: Session) -> str:
    return session.serve(name="tiny").result_sync().url


def run(*command: str, url: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "REKINDLE_URL": url, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"OPENAI_API_KEY": "none", "LANGSMITH_TRACING": "false", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)
    done = subprocess.run([PYTHON, *command], capture_output=True, text=True, env=environment, timeout=450, cwd=cwd)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6_000:]
    return said


def test_langchain(url: str, tmp_path: Path) -> None:
    require("langchain_tests", "langchain_openai")
    suite = shutil.copy(CLIENTS / "langchain_suite.py", tmp_path)  # away from this project's own conftest.py
    said = run(
        "-m", "pytest", "-q", "-rsx", "-p", "no:codspeed", "--benchmark-disable", "-o", "asyncio_mode=auto",
        "-o", "asyncio_default_test_loop_scope=session",  # LangChain keeps connections, which belong to their loop
        "--rootdir", str(tmp_path), str(suite), url=url, cwd=tmp_path,
    )  # fmt: skip
    print(said[-4_000:])
    found = re.search(r"(\d+) passed", said)
    assert found is not None and int(found[1]) >= 30, said[-4_000:]


def test_litellm(url: str) -> None:
    require("litellm")
    assert "all right" in run(str(CLIENTS / "litellm_calls.py"), url=url)


TASK = """\
task: rekindle_facts
dataset_path: json
dataset_kwargs:
  data_files: {{"test": "{folder}/facts.jsonl"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
"""
FACTS = [
    {"question": "Once upon a time there was a", "choices": ["dog", "girl", "little"], "label": 2},
    {"question": "Tom had a red", "choices": ["ball", "cat", "of the"], "label": 0},
    {"question": "The dog ran", "choices": ["home", "to", "and and and"], "label": 1},
    {"question": "Anna said", "choices": ["hello", "she was happy", "that"], "label": 0},
]


def test_lm_eval(url: str, session: Session, tmp_path: Path) -> None:
    """Its log-likelihoods over HTTP are those of the session in this process."""
    require("lm_eval", "transformers", "datasets")
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    (tmp_path / "facts.yaml").write_text(TASK.format(folder=tmp_path))
    tokenizer = Path(rekindle.tiny.folder())
    arguments = f"model=tiny,base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=4,max_length=512"
    run(
        "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", "rekindle_facts",
        "--include_path", str(tmp_path), "--output_path", str(tmp_path / "results"), "--log_samples",
        url=url, cwd=tmp_path,
    )  # fmt: skip
    (samples,) = (tmp_path / "results").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(FACTS)
    for sample in found:
        for arguments_, response in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            context, continuation = arguments_["arg_0"], arguments_["arg_1"]
            before = len(session.tokenizer.encode(context))
            ids = session.tokenizer.encode(context + continuation)
            done = session.generate_sync(ids, max_tokens=1, prompt_logprobs=0)
            assert done.prompt_logprobs is not None
            expected = sum(entry.logprob for entry in done.prompt_logprobs[before - 1 :])
            assert float(response[0]) == pytest.approx(expected, abs=1e-4)


def test_schemathesis(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two thousand requests made of the OpenAPI document, and of what it forbids: none ends with a status of 5xx."""
    require("schemathesis")
    options = {"dtype": "float32", "max_model_len": 64, "cache_dir": str(tmp_path_factory.mktemp("cache"))}
    with rekindle.open_sync("tiny", max_requests=8, **options) as session:  # type: ignore[arg-type]
        url = session.serve(name="tiny").result_sync().url
        try:
            urllib.request.urlopen(f"{url}/openapi.json").close()
        except urllib.error.HTTPError as error:
            error.close()
            pytest.skip(f"the server has no OpenAPI document yet: {error}")
        said = run(
            str(Path(PYTHON).parent / "schemathesis"), "run", f"{url}/openapi.json", "--phases", "fuzzing",
            "--checks", "not_a_server_error", "--max-examples", "200", "--seed", "1", "--request-timeout", "60",
            "--suppress-health-check", "all", "--no-color",
            url=url,
        )  # fmt: skip
        print(said[-3_000:])
        found = re.search(r"(\d[\d,]*) generated", said)
        assert found is not None and int(found[1].replace(",", "")) >= 2_000, said[-3_000:]
        wait_until_idle(session)
