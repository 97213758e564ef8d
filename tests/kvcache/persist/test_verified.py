"""Pages from outside are believed only as far as they can be verified: on import, on a scan, in a snapshot."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.bounds import Within
from helpers.faults import full_disk
from helpers.stored_pages import IDENTITY, Pair, chain, same
from rekindle._src.core.atomic_checkpoint import DAMAGED, ITEM
from rekindle._src.kvcache import PagePool, PrefixCache, page_digest
from rekindle._src.kvcache.eviction import EvictionQueue
from rekindle._src.kvcache.persist import prefix_file, segment, snapshot
from rekindle._src.kvcache.persist.segment import leaves_of
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle.errors import SnapshotRefused, StoreError

STRICT = dataclasses.replace(IDENTITY, leaves=leaves_of(chain(0, 1)[0][1]), vocab_size=1000)


def other_tokens(pairs: list[Pair]) -> list[Pair]:
    """Another's KV under my tokens."""
    return [(page._replace(tokens=page.tokens + 1), payload) for page, payload in pairs]


def other_leaves(pairs: list[Pair]) -> list[Pair]:
    return [(page, tuple(leaf[:, :-1] for leaf in payload)) for page, payload in pairs]


def beyond_the_vocabulary(pairs: list[Pair]) -> list[Pair]:
    found, parent = [], IDENTITY.root
    for number, (page, payload) in enumerate(pairs):
        tokens = np.full(IDENTITY.page_size, 10**6 + number, np.int32)
        digest = page_digest(parent, tokens)
        found.append((page._replace(digest=digest, parent=parent, tokens=tokens), payload))
        parent = digest
    return found


FORGED = {
    "other tokens": (other_tokens, "digest"),
    "other leaves": (other_leaves, "laid out"),
    "beyond the vocabulary": (beyond_the_vocabulary, "it has token 100000"),
}


@pytest.mark.parametrize(("forge", "reason"), FORGED.values(), ids=FORGED)
def test_a_forged_prefix_is_not_imported(tmp_path: Path, forge: Any, reason: str) -> None:
    prefix_file.write(tmp_path / "prefix", IDENTITY, forge(chain(0, 3)))
    with pytest.raises(StoreError, match=reason):
        prefix_file.read(tmp_path / "prefix", STRICT)


def test_an_honest_prefix_is_imported(tmp_path: Path) -> None:
    prefix_file.write(tmp_path / "prefix", IDENTITY, chain(0, 3))
    found, states = prefix_file.read(tmp_path / "prefix", STRICT)
    assert not states
    assert [page.digest for page, _ in found] == [page.digest for page, _ in chain(0, 3)]
    assert all(same(mine, theirs) for (_, mine), (_, theirs) in zip(found, chain(0, 3), strict=True))
    with pytest.raises(SnapshotRefused):
        prefix_file.read(tmp_path / "prefix", dataclasses.replace(STRICT, fingerprint="other"))


def test_pages_that_do_not_follow_each_other_are_not_imported(tmp_path: Path) -> None:
    prefix_file.write(tmp_path / "prefix", IDENTITY, chain(0, 3)[1:])
    with pytest.raises(StoreError, match="does not follow"):
        prefix_file.read(tmp_path / "prefix", STRICT)


@pytest.mark.parametrize("cut", [-1, 7])
def test_a_prefix_of_another_length_is_an_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "prefix"
    prefix_file.write(path, IDENTITY, chain(0, 3))
    data = path.read_bytes()
    path.write_bytes(data[:cut] if cut < 0 else data + b"x" * cut)
    with pytest.raises(StoreError, match="should have"):
        prefix_file.read(path, STRICT)


def sparse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.truncate(path, 1 << 40)


TOO_MUCH = {
    "a FIFO": (os.mkfifo, "not a regular file"),
    "nothing": (lambda path: sparse(path, b""), "not an exported prefix"),
    "a long index": (
        lambda path: sparse(path, prefix_file.MAGIC + (1 << 39).to_bytes(8, "little")), "an index has 549,755,813,888"
    ),
    "more than the session keeps": (lambda path: sparse(path, prefix_file.MAGIC), "hold 1,000,000 at most"),
}  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no FIFOs")
@pytest.mark.parametrize(("make", "reason"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_file_that_is_no_prefix_costs_neither_time_nor_memory(
    tmp_path: Path, make: Any, reason: str, within: Within
) -> None:
    """It would be read in the thread that saves, which waited for the FIFO for ever."""
    make(tmp_path / "prefix")
    most = 1_000_000 if "hold" in reason else None
    with within(20), pytest.raises(StoreError, match=reason):
        prefix_file.read(tmp_path / "prefix", STRICT, most=most)


def test_the_values_of_an_index_are_bounded(tmp_path: Path) -> None:
    """They would hold the interpreter's lock while streams run, and its records are not among them."""
    fields = IDENTITY.fields() | {"leaves": STRICT.leaves, "lists": [[]] * (1 << 19)}
    index = segment.encode(fields, segment.records_of([chain(0, 1)[0][0]], IDENTITY.page_size))
    with pytest.raises(StoreError, match=r"makes no sense \(ValueError\('a header of 2,[\d,]+ bytes"):
        segment.decode(index)


def test_no_payload_is_read_before_its_index_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "prefix"
    prefix_file.write(path, IDENTITY, FORGED["other tokens"][0](chain(0, 3)))
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(StoreError, match="digest"):
        prefix_file.read(path, STRICT)


HEADERS: dict[str, dict[str, Any]] = {
    "a dtype of many digits": IDENTITY.fields() | {"leaves": [[[1], "9" * 5000 + "f4"]]},
    "a dtype of many parts": IDENTITY.fields() | {"leaves": [[[1], "f4," * 5000]]},
    "objects": IDENTITY.fields() | {"leaves": [[[1], "O"]]},
    "a class": IDENTITY.fields() | {"leaves": [[[1], "finfo"]]},
    "no dtype": IDENTITY.fields() | {"leaves": [[[1], None]]},
    "a dtype of a gigabyte": IDENTITY.fields() | {"leaves": [[[1], "V1000000000"]]},
    "no identity": {"leaves": []},
    "an identity of another kind": {"identity": {"fingerprint": 1}, "leaves": []},
    "leaves without a dtype": IDENTITY.fields() | {"leaves": [[[1], "evil"]]},
    "leaves of a size of many digits": IDENTITY.fields() | {"leaves": [[[10**4000] * 2, "int8"]]},
    "leaves of many axes": IDENTITY.fields() | {"leaves": [[[1 << 39] * 9000, "int8"]]},
    "leaves of negative size": IDENTITY.fields() | {"leaves": [[[-5], "int8"]]},
    "no list of leaves": IDENTITY.fields() | {"leaves": 3},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_makes_no_sense_is_a_typed_error(tmp_path: Path, header: dict[str, Any]) -> None:
    index = segment.encode(header, segment.records_of([chain(0, 1)[0][0]], IDENTITY.page_size))
    path = tmp_path / "prefix"
    path.write_bytes(prefix_file.MAGIC + len(index).to_bytes(8, "little") + index)
    with pytest.raises(StoreError):
        prefix_file.read(path, STRICT)
    if header.get("leaves"):
        with pytest.raises(StoreError, match="no layout of pages"):
            segment.leaves_in(header)


@pytest.mark.parametrize(("forge", "reason"), FORGED.values(), ids=FORGED)
def test_a_forged_segment_is_set_aside(
    tmp_path: Path, forge: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    DiskTier(tmp_path, 1 << 20, IDENTITY).write(forge(chain(0, 3)))
    disk = DiskTier(tmp_path, 1 << 20, STRICT)
    assert disk.scan() == 0 and disk.damaged == 1
    assert reason in caplog.text
    assert [path.name.startswith(DAMAGED) for path in disk.pages_folder.iterdir()] == [True]


def test_a_segment_under_the_name_of_another_model_is_set_aside(tmp_path: Path) -> None:
    other = dataclasses.replace(IDENTITY, fingerprint="other")
    DiskTier(tmp_path, 1 << 20, other).write(chain(0, 3, other))
    (path,) = (tmp_path / "pages").iterdir()
    path.rename(path.with_name(path.name.replace(other.root.hex(), IDENTITY.root.hex())))
    disk = DiskTier(tmp_path, 1 << 20, STRICT)
    assert disk.scan() == 0 and disk.damaged == 1


@pytest.mark.parametrize("forge", [other_tokens, beyond_the_vocabulary])
def test_a_forged_snapshot_is_refused(tmp_path: Path, forge: Any) -> None:
    snapshot.save(tmp_path, "mine", IDENTITY, [page for page, _ in forge(chain(0, 3))])
    with pytest.raises(StoreError, match="can't be restored"):
        snapshot.pages_of_snapshot(tmp_path, STRICT, "mine")


def test_a_page_that_was_not_verified_is_found_under_no_payload() -> None:
    cache = PrefixCache(PagePool(8), IDENTITY.page_size, IDENTITY.root)
    forged = [page for page, _ in other_tokens(chain(0, 3))]
    assert snapshot.graft(cache, forged) == 0
    assert not {cache.digest_of(node) for node in cache} & {page.digest for page in forged}
    cache.check_integrity()


def test_find_does_not_lose_a_race_with_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only version that was listed goes before it is opened: the one that took its place is found."""
    pages = [page for page, _ in chain(0, 3)]
    snapshot.save(tmp_path, "mine", IDENTITY, pages)
    listed, left = snapshot.kept_versions, [3]

    def stale(folder: Path, name: str) -> list[Path]:
        found = listed(folder, name)
        if left[0]:
            left[0] -= 1
            with monkeypatch.context() as patch:
                patch.setattr(snapshot, "kept_versions", listed)
                snapshot.save(folder, name, IDENTITY, pages)
        return found

    monkeypatch.setattr(snapshot, "kept_versions", stale)
    assert len(snapshot.find(tmp_path, "mine").records) == 3
    assert not left[0]


def test_a_full_disk_is_a_typed_error_and_leaves_nothing(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 1 << 20, IDENTITY)
    disk.write(chain(0, 1))
    snapshot.save(tmp_path, "mine", IDENTITY, [chain(0, 1)[0][0]])
    before = {path for path in tmp_path.rglob("*") if path.is_dir()}
    with full_disk():
        for action in (
            lambda: disk.write(chain(1, 3)),
            lambda: snapshot.save(tmp_path, "mine", IDENTITY, []),
            lambda: prefix_file.write(tmp_path / "prefix", IDENTITY, chain(0, 3)),
        ):
            with pytest.raises(StoreError, match="No space left"):
                action()
    assert {path for path in tmp_path.rglob("*") if path.is_dir()} == before
    assert not list(tmp_path.glob("*prefix*"))
    assert len(snapshot.pages_of_snapshot(tmp_path, IDENTITY, "mine")) == 1


@pytest.mark.parametrize("visits", [-(2**31), -2, 2**31 - 1])
@pytest.mark.parametrize("used", [float("nan"), -float("inf"), float("inf"), 1e300, -5.0])
def test_visits_and_times_of_others_are_put_within_bounds(tmp_path: Path, visits: int, used: float) -> None:
    """No digest covers these two fields, so a file can hold any value.

    A page with fewer than -1 visits made each request that found it fail, a page with the largest count made each save
    fail, and a time of NaN broke the order in which pages leave the device.
    """
    pairs = [(page._replace(visits=visits, last_use=used), payload) for page, payload in chain(0, 3)]
    snapshot.save(tmp_path, "mine", IDENTITY, [page for page, _ in pairs])
    pages = snapshot.pages_of_snapshot(tmp_path, IDENTITY, "mine")
    cache = PrefixCache(PagePool(8), IDENTITY.page_size, IDENTITY.root)
    assert snapshot.graft(cache, pages) == 3
    assert all(0 <= page.visits <= segment.MAX_VISITS and 0 <= page.last_use < segment.LAST_TIME for page in pages)
    queue = EvictionQueue(cache.pool)
    for node in cache:
        node.visits += 1
        queue.record_use(node, 1.0)
        assert math.isfinite(node.score)
    snapshot.save(tmp_path, "mine", IDENTITY, [page._replace(visits=page.visits + 1) for page in pages])


@pytest.mark.parametrize("saved", ["x", None, [1], True, 1e300, -1e300, float("nan"), 10**400])
def test_a_snapshot_is_listed_whatever_it_says_of_its_time(tmp_path: Path, saved: Any) -> None:
    path = snapshot.save(tmp_path, "mine", IDENTITY, [chain(0, 1)[0][0]])
    header, records = segment.decode((path / ITEM / "index").read_bytes())
    (path / ITEM / "index").write_bytes(segment.encode({**header, "saved": saved}, records))
    (info,) = snapshot.describe_all(tmp_path, IDENTITY)
    assert info.saved == 0 and "1970" in str(info)


def test_a_snapshot_is_listed_under_a_name_that_can_be_printed(tmp_path: Path) -> None:
    named = dataclasses.replace(IDENTITY, model="a\x1b]52;c;QQ==\x07\ud800" + "b" * 1000)
    snapshot.save(tmp_path, "mine", named, [chain(0, 1)[0][0]])
    (info,) = snapshot.describe_all(tmp_path, IDENTITY)
    assert info.model.startswith("a\ufffd]52;c;QQ==\ufffd\ufffdbbb") and len(info.model) == 256
    assert info._repr_html_().encode()
    other = dataclasses.replace(IDENTITY, fingerprint="other", model="pirate")
    assert IDENTITY.mismatch(other) == "it belongs to weights 'other' of 'pirate', this session has 'weights'"
    assert str(other.mismatch(IDENTITY)).endswith("this session has 'other' of 'pirate'")
    other = dataclasses.replace(IDENTITY, layout="x" * 10_000)
    assert len(IDENTITY.mismatch(other) or "") < 400


def test_a_name_with_digits_that_are_none_is_another_version(tmp_path: Path) -> None:
    """`isdigit` is true of a superscript, which `int` refuses: nothing could be saved or listed any more."""
    snapshot.save(tmp_path, "mine", IDENTITY, [chain(0, 1)[0][0]])
    (tmp_path / "snapshots" / "mine@²-x").mkdir()
    snapshot.save(tmp_path, "mine", IDENTITY, [chain(0, 1)[0][0]])
    assert [info.name for info in snapshot.describe_all(tmp_path, IDENTITY)] == ["mine"]
