"""The options that editors see are those of the dataclasses, None is every option's default, garbage is refused."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle._src.cli.main import parser
from rekindle._src.cli.usage import engine_options, sampling_options
from rekindle._src.core import foreign_names
from rekindle._src.core.config import DraftSource, EngineConfig, OpenOptions
from rekindle._src.core.dtypes import DTypeLike, KVDTypeLike, Quantize
from rekindle._src.core.options import Place, Size, options_of, words_of
from rekindle._src.core.sampling import Sampling, SamplingOptions
from rekindle._src.core.taps import Capture, SteerLike
from rekindle._src.serve.openai_fields import SAMPLING
from rekindle._src.text import generation_config
from rekindle.errors import ConfigError, InvalidRequest

# Where an option takes more than the field holds.
WIDER = {
    "rope_scaling": str | Mapping[str, object] | None,
    "stop": str | Sequence[str] | None,
    "stop_token_ids": Sequence[int] | None,
    "allowed_token_ids": Sequence[int] | None,
    "bad_words": str | Sequence[str] | None,
    "processors": str | Sequence[str] | None,
    "samplers": str | Sequence[str] | None,
    "dry_sequence_breakers": str | Sequence[str] | None,
    "logprob_token_ids": Sequence[int] | None,
    "capture": Capture | Mapping[str, object] | None,
    "steer": SteerLike | Sequence[SteerLike] | None,
    "taps": str | Sequence[str] | None,
    "choice": Sequence[str] | None,
    "cache_dir": str | os.PathLike[str] | None,
    "projector": str | os.PathLike[str] | None,
    "drafts": DraftSource | str | os.PathLike[str] | None,
    "shared_cache": str | os.PathLike[str] | None,
    "quantize": Quantize | None,
    "dtype": DTypeLike | None,
    "kv_dtype": KVDTypeLike | None,
    **dict.fromkeys(("device_memory", "host_memory", "disk_memory", "capture_memory"), int | str | None),
}


def fields(record: type) -> dict[str, Any]:
    return {field.name: get_type_hints(record)[field.name] for field in dataclasses.fields(record)}


@pytest.mark.parametrize(
    ("options", "record", "apart"), [(SamplingOptions, Sampling, {"n"}), (OpenOptions, EngineConfig, set())]
)
def test_names_and_types_are_those_of_the_dataclass(options: type, record: type, apart: set[str]) -> None:
    hints, known = get_type_hints(options), fields(record)
    assert list(hints) == [name for name in known if name not in apart]
    for name, hint in hints.items():
        wanted = WIDER.get(name, known[name] | None)
        assert set(get_args(hint)) == set(get_args(wanted)), name


@pytest.mark.parametrize("record", [Sampling, EngineConfig])
def test_the_docstring_has_every_option_with_its_default(record: type) -> None:
    table = inspect.cleandoc(record.__doc__ or "").partition("Options:\n")[2]
    told = dict(re.findall(r"^    (\w+) \((.*?\)?)\): \S", table, re.MULTILINE))
    assert list(told) == [field.name for field in dataclasses.fields(record)]
    plain = record()
    for name, text in told.items():
        if name.endswith("_memory") and "iB" in text:
            count, unit = text.split()
            assert getattr(plain, name) == int(count) << {"MiB": 20, "GiB": 30}[unit]
        else:
            assert eval(text) == getattr(plain, name), name


@pytest.mark.parametrize("record", [Sampling, EngineConfig])
def test_the_words_of_an_option_are_those_of_the_docstring(record: type) -> None:
    words = words_of(record)
    assert list(words) == [option.name for option in options_of(record)]
    assert all(text.endswith(".") and "  " not in text for text in words.values())
    assert Sampling.__doc__ is not None and "Options:" in Sampling.__doc__
    assert words_of(Sampling)["top_p"] == (
        "draw from the most likely tokens that have this probability together; 1 is off."
    )


def test_an_option_is_offered_wherever_its_declaration_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line, the server's fields and the defaults of checkpoints come from the declarations alone."""

    def names(place: Place, record: type) -> set[str]:
        return {option.name for option in options_of(record) if place in option.also}

    every = {option.name for option in options_of(EngineConfig)} - {"prefix_cache"} | {"no-prefix_cache"}
    for command, flags in (
        ("generate", names("command", Sampling) | names("command", EngineConfig)),
        ("serve", every),
        ("warm", every),
    ):
        with pytest.raises(SystemExit):
            parser().parse_args([command, "--help"])
        shown = set(re.findall(r"^  --([\w-]+)", capsys.readouterr().out, re.MULTILINE))
        assert {name.replace("_", "-") for name in flags} <= shown
    chosen = parser().parse_args(["generate", "x", "--min-p", "0.25", "--top-k", "3", "--max-requests", "2"])
    assert sampling_options(chosen)["min_p"] == 0.25 and sampling_options(chosen)["top_k"] == 3
    assert engine_options(chosen)["max_requests"] == 2
    assert {field.option or field.name for field in SAMPLING} == names("http", Sampling)
    assert set(generation_config.NAMES) == names("checkpoint", Sampling)


def test_a_command_line_explains_an_option_in_the_words_of_its_declaration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in options_of(EngineConfig):
        words = words_of(EngineConfig)[option.name].removesuffix(".").replace("None", "the default")
        assert words.replace("…", "...") in shown.replace("- ", "-"), option.name
    assert "--host-memory SIZE" in shown and "(default 1GiB)" in shown and "(default background)" in shown
    shown.encode("ascii")  # a terminal may have no more


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0B"), (1 << 30, "1GiB"), (256 << 20, "256MiB"), (3 << 10, "3KiB"), (1001, "1001B")]
)
def test_a_size_is_written_as_it_is_read(size: int, text: str) -> None:
    assert Size.written(size) == text and Size()("size", text, ConfigError) == size


@pytest.mark.parametrize("record", [Sampling, EngineConfig])
def test_none_is_the_default_of_every_option(record: type) -> None:
    names = [field.name for field in dataclasses.fields(record)]
    assert record(**dict.fromkeys(names)) == record()
    for name in names:
        assert record(**{name: None}) == record()


def test_none_over_a_base_is_the_default() -> None:
    base = Sampling(temperature=0.7, seed=3, stop="x")
    assert Sampling.of(base, {"temperature": None, "seed": None}) == Sampling(stop="x")


class Hostile:
    """An object that can be asked for nothing."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __index__ = __float__ = __iter__ = __len__ = __bool__ = __eq__ = __repr__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(),
    st.text(max_size=5), st.binary(max_size=3),
    st.sampled_from(
        [10**5000, -(10**5000), Hostile(), object(), Hostile, len, np.zeros(2), np.float32(0.5), np.int64(3), np.True_]
    ),
)  # fmt: skip
KEYS = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.floats())
GARBAGE = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.lists(st.integers(0, 9), max_size=20),
    st.dictionaries(KEYS, PLAIN, max_size=3),
    st.lists(st.lists(PLAIN, max_size=2), max_size=2),
    st.tuples(PLAIN, PLAIN),
)


def refusal(make: typing.Callable[[], object], kind: type[Any]) -> Any:
    """The error that refuses it, if there is one; any error of another kind gets through."""
    try:
        make()
    except kind as error:
        return error
    return None


@example("adapter", {"first": 10**5_000})
@given(st.sampled_from(sorted(fields(Sampling))), GARBAGE)
def test_any_value_of_a_sampling_option_is_taken_or_refused(name: str, value: Any) -> None:
    error = refusal(lambda: Sampling.of(None, {name: value}), InvalidRequest)
    if error is not None:
        assert error.field == name or {error.field, name} == {"min_tokens", "max_tokens"}
        assert len(str(error)) < 400


@example("mesh", 10**5_000)  # Python refuses to print it
@example("mesh", {"data": 10**5_000})
@given(st.sampled_from(sorted(fields(EngineConfig))), GARBAGE)
def test_any_value_of_an_option_of_open_is_taken_or_refused(name: str, value: Any) -> None:
    error = refusal(lambda: EngineConfig.of({name: value}), ConfigError)
    if error is not None:
        assert error.field == name or {error.field, name} == {"processes", "coordinator"}
        assert len(str(error)) < 400


@pytest.mark.parametrize("name", sorted(fields(Sampling)))
def test_an_object_that_can_be_asked_for_nothing_is_refused(name: str) -> None:
    error = refusal(lambda: Sampling.of(None, {name: Hostile()}), InvalidRequest)
    assert error is not None and error.field == name


@pytest.mark.parametrize("wrong", [5, "greedy", {"temperature": 1}])
def test_the_positional_sampling_has_to_be_one(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="is not a Sampling"):
        Sampling.of(wrong, {})


FOREIGN = [
    *((name, hint, Sampling, InvalidRequest, lambda options: Sampling.of(None, options))
      for name, hint in foreign_names.SAMPLING.items()),
    *((name, hint, EngineConfig, ConfigError, EngineConfig.of) for name, hint in foreign_names.OPEN.items()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "hint", "record", "error", "make"), FOREIGN)
def test_a_foreign_name_leads_to_ours(
    name: str, hint: foreign_names.Hint, record: type, error: type[Exception], make: typing.Callable[[Any], Any]
) -> None:
    assert name not in fields(record)
    with pytest.raises(error) as caught:
        make({name: 4})
    assert str(caught.value).endswith(hint.fix)
    if hint.option:
        assert hint.option in fields(record) or hint.option == "processors"
        assert re.search(rf"\b{hint.option}\b", hint.fix), "the fix names our option"


def test_the_names_that_users_bring_most_are_known() -> None:
    assert foreign_names.OPEN.keys() >= {
        "torch_dtype", "device", "n_ctx", "max_batch", "max_batch_size", "load_in_8bit", "load_in_4bit",
        "tensor_parallel_size", "gpu_memory_utilization", "max_num_seqs", "n_gpu_layers", "quantization",
    }  # fmt: skip
    assert foreign_names.SAMPLING.keys() >= {
        "stop_sequences", "max_new_tokens", "max_completion_tokens", "num_return_sequences", "do_sample",
        "top_logprobs",
    }  # fmt: skip


def test_an_option_at_the_wrong_door_is_sent_to_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"session\.generate\(prompt, temperature=…\)"):
        EngineConfig.of({"temperature": 0.5})
    with pytest.raises(InvalidRequest, match=r"open\(…, max_requests=…\)"):
        Sampling.of(None, {"max_requests": 4})


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("fp16", "float16"), ("FP16", "float16"), ("half", "float16"), ("f16", "float16"), (np.float16, "float16"),
        ("bf16", "bfloat16"), ("BF16", "bfloat16"), ("torch.bfloat16", "bfloat16"), (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("bfloat16"), "bfloat16"), ("f32", "float32"), ("fp32", "float32"), (np.float32, "float32"),
        (np.dtype("float32"), "float32"), (jnp.float32, "float32"), (np.dtype("<f4"), "float32"), ("auto", "auto"),
    ],
)  # fmt: skip
def test_the_usual_names_of_a_dtype_are_the_same_thing(value: Any, name: str) -> None:
    assert EngineConfig(dtype=value).dtype == EngineConfig(kv_dtype=value).kv_dtype == name


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("fp8", "float8_e4m3fn"),
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
        (np.int8, "int8"),
        ("i8", "int8"),
        ("k8v4", "int8-int4"),
        ("Int8-Int4", "int8-int4"),
        (jnp.int4, "int4"),
    ],
)
def test_the_names_of_a_cache_dtype(value: Any, name: str) -> None:
    assert EngineConfig(kv_dtype=value).kv_dtype == name


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("int8", "quantize='int8'"), (np.int8, "quantize='int8'"), ("int4", "quantize='int4'"),
        ("bflaot16", "Did you mean 'bfloat16'"), ("float64", "Use one of"), (float, "'float32'"),
        (np.zeros(2), "'float32'"),
    ],
)  # fmt: skip
def test_what_is_no_dtype_of_weights_gets_a_fix(value: Any, fix: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fix)):
        EngineConfig(dtype=value)


def test_a_path_is_a_cache_folder(tmp_path: os.PathLike[str]) -> None:
    assert EngineConfig(cache_dir=tmp_path).cache_dir == str(tmp_path)
