"""GGUF models by hub id: the one file of a repository, or one of its many, with all its parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers import checkpoints, gguf_files
from rekindle._src.models.loading import checkpoint, hub
from rekindle.errors import CheckpointError


class FakeHub:
    """A hub with one repository; what is asked for appears in a folder, as in the hub's own cache."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.cache = repository, cache
        self.asked: list[tuple[str, str | None]] = []

    def HfApi(self) -> FakeHub:  # noqa: N802 (the hub's own name)
        return self

    def list_repo_files(self, name: str, revision: str | None = None) -> list[str]:
        return sorted(str(path.relative_to(self.repository)) for path in self.repository.rglob("*") if path.is_file())

    def snapshot_download(self, name: str, **options: object) -> str:
        self.cache.mkdir(exist_ok=True)
        return str(self.cache)

    def hf_hub_download(self, name: str, file: str, revision: str | None = None) -> str:
        self.asked.append((file, revision))
        target = self.cache / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((self.repository / file).read_bytes())
        return str(target)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repository").mkdir()
    made = FakeHub(tmp_path / "repository", tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)  # other modules are still imported
    return made


def put(fake: FakeHub, *names: str) -> None:
    made = gguf_files.convert(
        checkpoints.write(fake.cache.parent / "made", checkpoints.CASES["qwen3"]), Path("one.gguf")
    )
    for name in names:
        target = fake.repository / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(made.read_bytes())


def test_the_only_file_of_a_repository(fake: FakeHub) -> None:
    put(fake, "model-Q8_0.gguf", "mmproj-model.gguf")
    assert checkpoint.inspect("owner/name@v2").folder == fake.cache / "model-Q8_0.gguf"
    assert fake.asked == [("model-Q8_0.gguf", "v2")]
    assert checkpoint.inspect("owner/name@v2").folder == fake.cache / "model-Q8_0.gguf", "it is there already"
    assert len(fake.asked) == 1


def test_one_of_several_is_named(fake: FakeHub) -> None:
    put(fake, "a-Q4_0.gguf", "a-Q8_0.gguf", "BF16/a.gguf")
    with pytest.raises(CheckpointError, match=r"owner/name has 3 models.*Pass one of them: owner/name/BF16/a\.gguf"):
        checkpoint.inspect("owner/name")
    assert fake.asked == [], "none was downloaded"
    assert checkpoint.inspect("owner/name/a-Q8_0.gguf").folder == fake.cache / "a-Q8_0.gguf"
    assert checkpoint.inspect("owner/name/BF16/a.gguf@main").folder == fake.cache / "BF16" / "a.gguf"
    assert fake.asked == [("a-Q8_0.gguf", None), ("BF16/a.gguf", "main")]


def test_all_parts_are_downloaded(fake: FakeHub) -> None:
    names = [f"a-{number:05d}-of-00002.gguf" for number in (1, 2)]
    put(fake, *names)
    assert hub.locate("owner/name").path == fake.cache / names[0]
    assert [name for name, _ in fake.asked] == names


def test_a_path_to_a_file_that_is_not_there_is_no_hub_id(fake: FakeHub) -> None:
    for wrong in ("models/typo.gguf", "typo.gguf", "/models/typo.gguf"):
        with pytest.raises(CheckpointError, match=r"typo\.gguf does not exist"):
            hub.locate(wrong)
