"""A machine that was never used before finds what others have made: programs, weights and snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.thorough import by_default
from helpers.tiered import ask, opened
from rekindle import ConfigError, Session
from rekindle._src.core.shared_cache import SharedCache
from rekindle._src.models.loading import prepared
from rekindle_kernels import private_files, read_through


def backing(folder: Path) -> SharedCache:
    found = read_through.backing_of(folder)
    assert isinstance(found, SharedCache)
    return found


def kept(folder: Path) -> int:
    """How many entries are kept once nothing is left to do."""
    assert backing(folder).wait(60) and not backing(folder).failed
    return backing(folder).stored


@pytest.fixture(params=by_default(["private", "signed"]))
def shared(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "private":
        monkeypatch.delenv(private_files.KEY_VARIABLE, raising=False)
        return str(tmp_path / "shared")
    pytest.importorskip("fsspec", reason="the extra `shared`")
    key = tmp_path / "key"
    key.write_bytes(b"a secret of these tests")
    key.chmod(0o600)
    monkeypatch.setenv(private_files.KEY_VARIABLE, str(key))
    return f"memory://{tmp_path.name}"


def origins(session: Session) -> set[str]:
    return {record.origin for record in session.programs()}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of these sessions, without any shared cache."""
    folder = tmp_path_factory.mktemp("programs")
    with opened(folder) as session:
        ask(session, 0)
        assert session.stats().compilations > 0
    return folder / "programs"


def machine(folder: Path, programs: Path) -> Path:
    """A machine that has had such sessions before."""
    shutil.copytree(programs, folder / "programs")
    return folder


def test_a_fresh_machine_compiles_nothing(tmp_path: Path, shared: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with opened(one, shared_cache=shared) as session:
        ask(session, 0)
        assert session.stats().compilations > 0
    made = kept(one)
    assert made > 0
    with opened(two, shared_cache=shared) as session:
        ask(session, 0)
        stats = session.stats()
        assert (stats.compilations, stats.traces, origins(session)) == (0, 0, {"loaded"})
    assert backing(two).fetched > 0 and kept(two) == 0
    with opened(two) as session:  # what was fetched is there without the shared cache, too
        ask(session, 0)
        assert session.stats().compilations == 0


@pytest.mark.thorough
def test_what_a_machine_had_before_is_shared_too(tmp_path: Path, programs: Path) -> None:
    shared = tmp_path / "shared"
    with opened(machine(tmp_path / "one", programs), shared_cache=shared) as session:
        ask(session, 0)
        assert session.stats().compilations == 0
    assert kept(tmp_path / "one") > 0
    with opened(tmp_path / "two", shared_cache=shared) as session:
        ask(session, 0)
        assert session.stats().compilations == 0


@pytest.mark.thorough
def test_damage_costs_a_compilation(tmp_path: Path, programs: Path) -> None:
    shared = tmp_path / "shared"
    with opened(machine(tmp_path / "one", programs), shared_cache=shared) as session:
        ask(session, 0)
    kept(tmp_path / "one")
    for blob in (shared / "programs").iterdir():
        content = bytearray(blob.read_bytes())
        content[len(content) // 2] ^= 1
        blob.write_bytes(content)
    with opened(tmp_path / "two", shared_cache=shared) as session:
        ask(session, 0)
        assert session.stats().compilations > 0
    assert backing(tmp_path / "two").refused > 0


@pytest.mark.thorough
def test_a_snapshot_is_restored_on_another_machine(tmp_path: Path, shared: str, programs: Path) -> None:
    one, two = machine(tmp_path / "one", programs), tmp_path / "two"
    with opened(one, shared_cache=shared) as session:
        ask(session, 0), ask(session, 1)
        session.save("chats").result_sync()
    kept(one)
    with opened(two, shared_cache=shared, restore="chats") as session:
        assert ask(session, 0) == 64
        assert ask(session, 1) == 64


def test_an_untrusted_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(private_files.KEY_VARIABLE, raising=False)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="shared_cache"):
        opened(tmp_path / "one", shared_cache=tmp_path / "open")


@pytest.mark.thorough
def test_kept_weights_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import rekindle
    from helpers import checkpoints, mesh_models

    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    monkeypatch.setattr(prepared, "DELAY", 0.0)
    folder = checkpoints.write(tmp_path / "model", mesh_models.raw("llama", 2))
    given: dict[str, Any] = {
        "dtype": "float32", "page_size": 8, "device_pages": 17, "max_requests": 2, "max_tokens_per_step": 32,
        "max_model_len": 128, "precompile": "lazy", "shared_cache": tmp_path / "shared", "disk_memory": 0,
    }  # fmt: skip
    texts = []
    for name in ("one", "two"):
        with rekindle.open_sync(folder, cache_dir=tmp_path / name, **given) as session:
            texts.append(session.generate_sync([5, 6, 7], max_tokens=8).token_ids)
            assert prepared.wait(60)
        kept(tmp_path / name)
    assert texts[0] == texts[1]
    assert len(list((tmp_path / "shared" / "weights").iterdir())) == 1
    assert len(list((tmp_path / "two" / "weights").iterdir())) == 1
    assert (backing(tmp_path / "two").stored, backing(tmp_path / "two").fetched > 1) == (0, True)


def test_a_model_is_known_before_its_weights_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from helpers import checkpoints, mesh_models
    from rekindle._src.core import shared_cache
    from rekindle._src.models.loading import checkpoint, known_models

    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    monkeypatch.setattr(prepared, "DELAY", 0.0)
    folder = checkpoints.write(tmp_path / "model", mesh_models.raw("llama", 2))

    def described(name: str) -> checkpoint.CheckpointPlan:
        shared_cache.attach(str(tmp_path / "shared"), [tmp_path / name])
        return checkpoint.describe(folder, cache_dir=tmp_path / name)

    def weights(name: str) -> bool:
        return (tmp_path / name / "weights").exists()

    first = described("one")
    assert first.reads is not None
    checkpoint.read(first)
    assert prepared.wait(60) and kept(tmp_path / "one") == 2
    again = described("two")
    assert again.reads is None and not weights("two"), "only the description was fetched"
    assert (again.graph, again.shapes, again.dtype) == (first.graph, first.shapes, first.dtype)
    model = checkpoint.read(again)
    assert weights("two") and len(model.leaves) == len(first.shapes)
    (description,) = (tmp_path / "shared" / known_models.FOLDER).iterdir()
    description.unlink()
    assert described("three").reads is None and weights("three"), "as from a cache of an earlier version"
    checkpoint.read(described("three"))
    assert kept(tmp_path / "three") == 1 and description.exists()
    damaged = described("four")
    entry = tmp_path / "four" / known_models.FOLDER / description.name
    entry.write_bytes(entry.read_bytes()[:-1])
    assert "is not used" not in caplog.text
    damaged = described("four")
    assert damaged.reads is None and weights("four") and not entry.exists() and "is not used" in caplog.text
