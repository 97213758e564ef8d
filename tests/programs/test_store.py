"""The executable store: loads without tracing, survives every kind of damage, stays within its bounds."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rekindle._src.core.atomic_checkpoint import PARTIAL, orbax
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.loading.fingerprint import files_digest
from rekindle._src.programs import store as program_store
from rekindle._src.programs.store import FORMAT, META, PROGRAM, ExecutableStore
from rekindle.errors import StoreError

TRACES = 0


def function(weights: list[Any], x: Any) -> tuple[Any, dict[str, Any]]:
    global TRACES
    TRACES += 1
    return weights[0] @ x, {"more": x + 1}


def compiled() -> Any:
    return jax.jit(function, donate_argnums=1).lower([jnp.ones((4, 4))], jnp.ones(4)).compile()


def save(store: ExecutableStore, key: str = "a" * 32) -> str:
    assert store.save(key, compiled(), name="r2t0", model="llama", compile_seconds=1.5)
    return key


def call(program: Any) -> float:
    out, more = program([jnp.ones((4, 4))], jnp.arange(4.0))
    assert more["more"][3] == 4.0
    return float(out[0])


def test_a_stored_program_loads_without_tracing(tmp_path: Path) -> None:
    store = ExecutableStore(tmp_path)
    key = save(store)
    before = TRACES
    assert call(ExecutableStore(tmp_path).load(key)) == 6.0
    assert before == TRACES
    (entry,) = store.stored()
    assert (entry.key, entry.name, entry.model, entry.compile_seconds) == (key, "r2t0", "llama", 1.5)


def test_another_process_loads_it(tmp_path: Path) -> None:
    key = save(ExecutableStore(tmp_path))
    code = (
        "import sys, pathlib, jax.numpy as jnp; from rekindle._src.programs.store import ExecutableStore\n"
        f"program = ExecutableStore(pathlib.Path({str(tmp_path)!r})).load({key!r})\n"
        "print(float(program([jnp.ones((4, 4))], jnp.arange(4.0))[0][0]))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout.split() == ["6.0"], done.stderr


def payload_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def replace(path: Path) -> None:
    path.write_bytes(b"something else entirely" * 50)


@pytest.mark.parametrize("damage", [truncate, flip, replace, Path.unlink], ids=lambda f: f.__name__)
def test_a_damaged_program_is_said_once_dropped_and_saved_again(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = ExecutableStore(tmp_path)
    key = save(store)
    largest = max(payload_files(tmp_path), key=lambda path: path.stat().st_size)
    damage(largest)
    with caplog.at_level(logging.WARNING, "rekindle.store"), pytest.raises(StoreError):
        store.load(key)
    assert len(caplog.records) == 1
    with pytest.raises(StoreError, match="not stored yet"):
        store.load(key)
    save(store)
    assert call(store.load(key)) == 6.0


def test_any_single_flipped_byte_is_found_or_harmless(tmp_path: Path) -> None:
    """Whatever is hit, the program either loads and computes the right thing or is refused."""
    store = ExecutableStore(tmp_path / "store")
    key = save(store)
    originals = {path: path.read_bytes() for path in payload_files(tmp_path)}
    logging.getLogger("rekindle.store").setLevel(logging.ERROR)
    try:
        for path in originals:
            for other, content in originals.items():
                other.parent.mkdir(parents=True, exist_ok=True)
                other.write_bytes(content)
            flip(path)
            try:
                program = store.load(key)
            except StoreError:
                continue
            assert call(program) == 6.0
    finally:
        logging.getLogger("rekindle.store").setLevel(logging.NOTSET)


def test_a_foreign_format_is_refused(tmp_path: Path) -> None:
    store = ExecutableStore(tmp_path)
    key = save(store)
    meta = tmp_path / key / META
    meta.write_text(meta.read_text().replace(f'"format": {FORMAT}', '"format": 99'))
    with pytest.raises(StoreError, match="99"):
        store.load(key)


def test_a_folder_that_can_not_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    store = ExecutableStore(tmp_path / "file" / "store")
    with caplog.at_level(logging.WARNING, "rekindle.store"):
        for _ in range(3):
            assert not store.save("k", compiled(), name="r2t0", model="m", compile_seconds=0.0)
    assert len(caplog.records) == 1
    assert str(tmp_path / "file") in caplog.text


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    store = ExecutableStore(tmp_path)
    assert not store.save("k", compiled(), name="r2t0", model="m", compile_seconds=0.0)
    assert list(tmp_path.iterdir()) == []


UNSERIALISABLE = """
import sys, jax, jax.monitoring
from jax.experimental import serialize_executable
def serialize(compiled):
    raise ValueError("not implemented on this backend")
serialize_executable.serialize = serialize
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
from helpers.small import opening, prompt
with opening(max_requests=1, precompile="lazy", cache_dir=sys.argv[1]).result_sync() as session:
    tokens = session.generate_sync(prompt(1, 5), max_tokens=3, ignore_eos=True).token_ids
    print(len(hits), *{program.why for program in session.programs()}, sep="|")
    print(tokens)
"""


@pytest.mark.slow
def test_a_backend_that_can_not_serialise_leaves_its_programs_to_the_cache_of_jax(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", UNSERIALISABLE, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("can't be serialised") == 1, "it is said once"
        runs.append(done.stdout.splitlines())
    (first, *tokens), (second, *again) = runs
    assert first.startswith("0|")
    hits, *why = second.split("|")
    assert int(hits) >= 2 and tokens == again
    assert len(why) == 1 and "JAX's compilation cache" in why[0]


def test_the_least_recently_used_program_leaves_first(tmp_path: Path) -> None:
    store = ExecutableStore(tmp_path, capacity=2)
    for age, key in enumerate(("old", "new")):
        save(store, key)
        os.utime(tmp_path / key, (1e9 + age, 1e9 + age))
    store.load("old")
    save(store, "newest")
    assert {entry.key for entry in store.stored()} == {"old", "newest"}
    store.max_bytes = 1
    store.prune()
    assert store.stored() == []


def test_orbax_finds_the_checkpoint_that_is_read_without_it(tmp_path: Path) -> None:
    folder = orbax().load(tmp_path / save(ExecutableStore(tmp_path)))
    assert sorted(path.name for path in folder.iterdir()) == sorted(Path(name).name for name in (META, PROGRAM))


def test_what_nobody_can_read_is_dropped_when_it_is_old(tmp_path: Path) -> None:
    store = ExecutableStore(tmp_path)
    old, new = tmp_path / ("b" * 32), tmp_path / f"{PARTIAL}0"
    for path in (old, new):
        path.mkdir()
    os.utime(old, (1e9, 1e9))
    key = save(store)
    assert {path.name for path in tmp_path.iterdir()} == {key, new.name}


def test_a_folder_that_can_not_be_listed_now_costs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(self))

    store = ExecutableStore(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", failing)
        store.prune()
    key = save(store)
    assert call(ExecutableStore(tmp_path).load(key)) == 6.0


def test_many_writers_of_one_program(tmp_path: Path) -> None:
    stores = [ExecutableStore(tmp_path) for _ in range(6)]
    program = compiled()
    threads = [
        threading.Thread(
            target=store.save, args=("k", program), kwargs={"name": "r2t0", "model": "m", "compile_seconds": 0.0}
        )
        for store in stores
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["k"]
    assert call(stores[0].load("k")) == 6.0


OTHER_VALUES: dict[str, Any] = {
    "dtype": "float16", "kv_dtype": "int8", "quantize": "int8", "policy": "lpm", "precompile": "all",
    "cache_dir": "elsewhere", "shared_cache": "elsewhere", "restore": "name", "kernels": "reference",
    "prefix_cache": False, "quiet": True,
    "page_size": 128, "deterministic": True, "generation_config": "greedy",
    "structured": True, "projector": "elsewhere", "drafts": "none", "reply_format": "hermes", "rope_scaling": "yarn:4",
    "processes": 2, "coordinator": "127.0.0.1:7000",
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(EngineConfig)])
def test_every_option_changes_the_key_unless_it_is_known_not_to_matter(field: str) -> None:
    config = EngineConfig()
    value = OTHER_VALUES.get(field)
    if value is None:
        value = (getattr(config, field) or 1000) + 7
    together = (
        {"mesh": 2, "processes": 2, "coordinator": "127.0.0.1:7000"} if field in ("processes", "coordinator") else {}
    )
    changed = dataclasses.replace(config, **{**together, field: value})
    same = program_store.digest(program_store.config_fields(config)) == program_store.digest(
        program_store.config_fields(changed)
    )
    assert same == (field in program_store.NOT_IN_PROGRAMS)


def test_options_that_do_not_matter_exist() -> None:
    assert {field.name for field in dataclasses.fields(EngineConfig)} >= program_store.NOT_IN_PROGRAMS


def test_the_environment_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = program_store.environment()
    assert before == program_store.environment()
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=true")
    monkeypatch.setattr(program_store, "cpu_features", lambda: "other")
    monkeypatch.setattr(program_store.jax, "__version__", "9.9.9")
    changed = program_store.environment()
    assert {name for name in before if before[name] != changed[name]} == {"xla_flags", "cpu", "jax"}


def test_a_changed_source_changes_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "step.py"
    path.write_text("x = 1")
    before = files_digest([path])
    path.write_text("x = 2")
    assert files_digest([path]) != before
    assert len(program_store.source_digest()) == 32


MOVED = """
import sys
sys.path[:0] = {path!r}
import jax, jax.numpy as jnp
from pathlib import Path
from rekindle._src.programs import store as program_store
from rekindle._src.programs.store import ExecutableStore
first, second = jax.devices()
store, key = ExecutableStore(Path({folder!r})), "a" * 32
seen = program_store.environment()
with jax.default_device(second):
    assert program_store.environment() == seen, "a key says which device it is for"
weights = jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((4,), "float32")
made = jax.jit(lambda w, x: w @ x, donate_argnums=1).lower(*weights).compile()
assert store.save(key, made, name="n", model="m", compile_seconds=1.0)
moved = store.load(key, [second])
given = jax.device_put((jnp.ones((4, 4)), jnp.arange(4.0)), second)
out = moved(*given)
assert out.devices() == {{second}} and float(out[0]) == 6.0, out
assert given[1].is_deleted()
print("moved")
"""


def test_a_program_runs_on_another_device_than_it_was_compiled_for(tmp_path: Path) -> None:
    path = [str(Path(__file__).parents[2] / name) for name in ("toolkit", "kernels")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    code = MOVED.format(path=path, folder=str(tmp_path / "programs"))
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.stdout == "moved\n", ended.stderr


def test_programs_are_kept_by_age_and_not_by_number(tmp_path: Path) -> None:
    store = ExecutableStore(tmp_path)
    made = compiled()
    for number in range(70):
        assert store.save(f"{number:032}", made, name="r2t0", model="llama", compile_seconds=1.5)
    assert len(store.stored()) == 70
    store.max_age = 3600.0
    os.utime(tmp_path / f"{3:032}", (1000.0, 1000.0))
    store.prune()
    assert len(store.stored()) == 69


def test_a_program_with_an_operation_that_has_no_stored_form_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are stored, and JAX's own cache stays off: what it gives back can't be serialised again."""

    def refuses(compiled: Any) -> Any:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: `LessThan` is not serializable.")

    kept = ExecutableStore(tmp_path / "programs")
    compiled = jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile()
    with monkeypatch.context() as patched:
        patched.setattr("rekindle._src.programs.store.serialize_executable.serialize", refuses)
        assert not kept.save("a", compiled, name="a", model="m", compile_seconds=0.0)
    assert not (tmp_path / "compilations").exists()
    assert kept.save("b", compiled, name="b", model="m", compile_seconds=0.0)
