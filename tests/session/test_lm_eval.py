"""The evaluation harness over a session, in this process: its log-likelihoods and texts are those of its own `hf`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rekindle
from rekindle import Session
from rekindle.tiny import folder

pytest.importorskip("lm_eval", reason="the harness is the extra `lm-eval`")
pytestmark = pytest.mark.filterwarnings("ignore")  # other people's packages deprecate as they like
FEW = "Tom had a red ball. Lily had a blue boat. They went to the park to play. " * 4
PAIRS = [
    (f"{FEW}{name} was very", end) for name in ("Tom", "Lily") for end in (" happy", " sad", " tired and went home")
]
PAIRS += [("", "Once upon a time"), ("Once upon a ", "time"), ("Once", " upon a time there was a little girl")]
STORIES = ["Once upon a time, there was a little girl named Lily.", "Tom " + FEW * 6]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    options: dict[str, Any] = {"max_requests": 4, "max_tokens_per_step": 64, "max_model_len": 256, "precompile": "lazy"}
    path = str(tmp_path_factory.mktemp("cache"))
    with rekindle.open_sync("tiny", dtype="float32", cache_dir=path, generation_config="greedy", **options) as made:
        yield made


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:  # it needs more packages than the harness
        pytest.skip(str(error))

    path: Path = folder()
    return HFLM(pretrained=str(path), dtype=torch.float32, device="cpu", batch_size=1, max_length=255)


def test_it_answers_what_the_harness_asks(session: Session) -> None:
    from rekindle.lm_eval import RekindleLM

    model = RekindleLM(session)
    results = model.loglikelihood([asked(*pair) for pair in PAIRS], disable_tqdm=True)
    assert len(results) == len(PAIRS) and all(logprob < 0 for logprob, _ in results)
    hits = session.stats().scheduler.cached_tokens
    assert hits >= 256, "the examples are computed once"
    short, long = model.loglikelihood_rolling([asked(text) for text in STORIES], disable_tqdm=True)
    assert long < short < 0
    texts = model.generate_until(
        [
            asked("Once upon a time", {"until": ["."], "max_gen_toks": 24}),
            asked("Tom", {"until": [], "max_gen_toks": 4}),
        ],
        disable_tqdm=True,
    )
    assert texts[0] and "." not in texts[0] and texts[1]
    assert RekindleLM.create_from_arg_string("pretrained=tiny,max_model_len=64", {"batch_size": 1}).max_length == 63


def test_all_requests_may_have_an_adapter(session: Session) -> None:
    from rekindle.lm_eval import RekindleLM

    before, end = PAIRS[0]
    base = RekindleLM(session).loglikelihood([asked(before, end)], disable_tqdm=True)
    session.tune("loud", ["Tom was very LOUD."], steps=4, batch=4, learning_rate=5e-3).result_sync()
    model = RekindleLM(session, adapter="loud")
    ((logprob, _),) = model.loglikelihood([asked(before, end)], disable_tqdm=True)
    ids, ends = model.tok_encode(before), model.tok_encode(before + end)
    (score,) = session.score_sync(ids, [ends[len(ids) :]], adapter="loud")
    assert logprob == pytest.approx(score.logprob, abs=1e-5) and abs(logprob - base[0][0]) > 1e-3
    (text,) = model.generate_until([asked("Tom was", {"until": [], "max_gen_toks": 6})], disable_tqdm=True)
    assert text == session.generate_sync("Tom was", adapter="loud", max_tokens=6).text


def test_scores_and_texts_are_those_of_hf(session: Session, theirs: Any) -> None:
    from rekindle.lm_eval import RekindleLM

    model = RekindleLM(session)
    ours = model.loglikelihood([asked(*pair) for pair in PAIRS], disable_tqdm=True)
    expected = theirs.loglikelihood([asked(*pair) for pair in PAIRS], disable_tqdm=True)
    for (logprob, greedy), (logprob_hf, greedy_hf) in zip(ours, expected, strict=True):
        assert logprob == pytest.approx(logprob_hf, abs=1e-4) and greedy == greedy_hf
    rolling = model.loglikelihood_rolling([asked(text) for text in STORIES], disable_tqdm=True)
    assert rolling == pytest.approx(
        theirs.loglikelihood_rolling([asked(text) for text in STORIES], disable_tqdm=True), rel=1e-5
    )
    options = {"until": ["."], "max_gen_toks": 20, "do_sample": False}
    prompts = [asked(text, dict(options)) for text in ("Once upon a time", "Tom and Lily", "The dog")]
    assert model.generate_until(prompts, disable_tqdm=True) == theirs.generate_until(
        [asked(text.args[0], dict(options)) for text in prompts], disable_tqdm=True
    )
