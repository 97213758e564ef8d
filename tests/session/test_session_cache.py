"""`session.cache`, `save` and `restore`, through the public API: every path of a page gives the plain loop's tokens."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.sessions import engine_of, writer_of
from helpers.thorough import by_default
from helpers.tiered import MODEL, NEW, ask, opened, plain, prompt
from rekindle._src.core.records import Status
from rekindle._src.kvcache import PrefixCache
from rekindle.errors import ConfigError, SnapshotRefused, StoreError

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")


def test_saved_pages_are_exact_in_the_next_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle._src.kvcache.tiers.tiers.AHEAD_BYTES", 0)
    with opened(tmp_path) as session:
        for index in (0, 1, 2):
            ask(session, index)
        tree = session.cache.tree()
        assert tree.tokens == 32 + 3 * 40
        assert {node.tier for node in tree.nodes} == {"device", "host"}
        assert str(tree).count("tokens at 32") == 3
        first = session.save("mine").result_sync()
        assert (first.pages, first.skipped) == (19, 0)
        assert first.written > 0
        second = session.save("mine").result_sync()
        assert (second.pages, second.written) == (19, 0), "nothing changed"
        ask(session, 3)
        third = session.save("mine").result_sync()
        assert (third.pages, third.written) == (24, 5), "only what changed"
        assert [info.name for info in session.cache.snapshots()] == ["mine"]
        session.cache.export_prefix(prompt(0), tmp_path / "prefix").result_sync()
        session.check_integrity()
    with opened(tmp_path, restore="mine") as session:
        there = session.cache.explain(prompt(1))
        assert (there.disk_tokens, there.cached_tokens, there.reused_tokens) == (64, 64, 64)
        assert "64 on disk" in str(there)
        assert [ask(session, index) for index in (0, 1, 0, 2, 3)] == [64] * 5
        stats = session.cache.stats()
        assert stats.disk_hit_tokens > 0
        assert stats.saved_tokens == 5 * 64
        assert stats.disk is not None
        assert stats.disk.damaged == 0
        session.check_integrity()
        # A mixture: a part is on the device, a part in host memory, a part nowhere.
        session.cache.clear(tier="disk").result_sync()
        session.cache.prune(to=6 * stats.page_bytes)
        assert [ask(session, index) > 0 for index in (0, 1, 2)] == [True] * 3
        session.cache.clear(tier="device").result_sync()
        assert session.cache.stats().device_pages == 0
        ask(session, 0)
        session.cache.clear().result_sync()
        assert session.cache.tree().nodes == ()
        assert session.cache.explain(prompt(0)).cached_tokens == 0
        # From a file.
        assert session.cache.import_prefix(tmp_path / "prefix").result_sync() == 64
        assert session.cache.explain(prompt(0)).host_tokens == 64
        assert ask(session, 0) == 64
        session.check_integrity()


def test_pages_for_something_else_are_refused_or_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as session:
        ask(session, 0)
        session.save("mine").result_sync()
        session.cache.export_prefix(prompt(0), tmp_path / "prefix").result_sync()
    other = dataclasses.replace(MODEL, fingerprint="other weights")
    for options, reason in (({}, "belongs to weights"), ({"page_size": 16}, "page size is 8")):
        with pytest.raises(SnapshotRefused, match=reason):
            opened(tmp_path, model=other if not options else MODEL, restore="mine", **options)
    with pytest.raises(StoreError, match="There are: 'mine'"):
        opened(tmp_path, restore="yours")
    with pytest.raises(ConfigError, match="disk_memory"):
        opened(tmp_path, restore="auto", disk_memory=0)
    caplog.set_level(logging.INFO, "rekindle.cache")
    with opened(tmp_path, model=other, restore="auto") as session:
        assert session.cache.explain(prompt(0)).cached_tokens == 0
        with pytest.raises(SnapshotRefused):
            session.cache.import_prefix(tmp_path / "prefix").result_sync()
    assert sum("nothing is kept for this model" in record.message for record in caplog.records) == 1


@pytest.mark.thorough
def test_configurations_and_models_have_their_own_snapshot_under_one_name(tmp_path: Path) -> None:
    other = dataclasses.replace(MODEL, fingerprint="other weights")
    for options, model in (({}, MODEL), ({"page_size": 16}, MODEL), ({}, other), ({}, MODEL)):
        with opened(tmp_path, model=model, **options) as session:
            ask(session, 0)
            assert session.save("mine").result_sync().pages > 0
    for options, model in (({}, MODEL), ({"page_size": 16}, MODEL), ({}, other)):
        with opened(tmp_path, model=model, restore="mine", **options) as session:
            assert ask(session, 0) == 64
            assert [info.refused is None for info in session.cache.snapshots()] == [True, False, False]
    with pytest.raises(
        SnapshotRefused, match=r'restore="auto" has every page that is kept.*save\(\'mine\'\) then adds'
    ):
        opened(tmp_path, restore="mine", kv_dtype="bfloat16")
    with opened(tmp_path) as session:
        assert session.cache.delete("mine")
        assert not session.cache.delete("mine")


def test_prompts_of_other_sessions_are_counted_and_shown_on_request(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        ask(session, 0)
        ask(session, 1)
        session.save("mine").result_sync()
        assert "of other sessions" not in str(session.cache.tree())
    with opened(tmp_path, restore="auto") as session:
        tree = session.cache.tree()
        assert (tree.nodes, tree.hidden_pages) == ((), tree.total_pages)
        assert f"{tree.total_pages} pages of other sessions: tree(restored=True) shows them" in str(tree)
        whole = session.cache.tree(restored=True)
        assert (whole.tokens, whole.hidden_pages) == (32 + 2 * 40, 0)
        secret = whole.nodes[-1].text
        view = session.view.tree()
        for shown in (view.picture, session.cache._repr_html_(), tree._repr_html_()):
            assert secret not in shown
            assert "of other sessions" in shown
        assert secret in session.view.tree(restored=True).picture
        assert ask(session, 0) == 64
        mine = session.cache.tree()
        assert (mine.tokens, mine.hidden_pages) == (32 + 40, 5), "what this session asked for, hit or not"
        session.check_integrity()


def test_damaged_pages_are_reported_once_and_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as session:
        for index in (0, 1):
            ask(session, index)
        session.save("mine").result_sync()
    for file in (tmp_path / "pages").rglob("rekindle/pages"):
        data = bytearray(file.read_bytes())
        for at in range(100, len(data), 6000):
            data[at] ^= 4
        file.write_bytes(data)
    with opened(tmp_path, restore="mine") as session:
        assert ask(session, 0) == 0, "its first page is damaged"
        assert 32 <= ask(session, 1) < 64, "what it shares was just computed, of the rest some is damaged"
        session.check_integrity()
        assert sum("does not match its checksum" in record.message for record in caplog.records) <= len(
            list((tmp_path / "pages").iterdir())
        )
        assert any("does not match its checksum" in record.message for record in caplog.records)


@pytest.mark.thorough
def test_what_was_computed_outlives_a_killed_process(tmp_path: Path) -> None:
    """Without any save: pages are kept in the background once they are cold."""
    script = Path(__file__).parents[1] / "helpers" / "tiered.py"
    with opened(tmp_path, disk_memory=0) as session:
        ask(session, 0)  # its programs are there for the other process
    with subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "saved", "the other process died"
        finally:
            process.kill()
    with opened(tmp_path, restore="auto") as session:
        there = session.cache.explain(prompt(0))
        assert there.host_tokens + there.disk_tokens == 64
        assert ask(session, 0) == 64
        session.check_integrity()


@pytest.mark.thorough
def test_pinned_prefixes_stay_through_pressure(tmp_path: Path) -> None:
    with opened(tmp_path, host_memory=0, disk_memory=0) as session:
        ask(session, 0)
        assert session.pin(prompt(0)) == 64
        for index in (1, 2, 3, 4):
            ask(session, index)
        assert ask(session, 0) == 64
        assert any(node.pinned for node in session.cache.tree().nodes)
        assert session.unpin(prompt(0)) == 64
        with pytest.raises(ConfigError, match="disk_memory"):
            session.save("mine").result_sync()
        session.check_integrity()


def test_a_request_waits_aside_while_its_pages_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as session:
        ask(session, 0)
        session.save("mine").result_sync()
    monkeypatch.setattr("rekindle._src.kvcache.tiers.tiers.AHEAD_BYTES", 0)
    with opened(tmp_path, restore="mine") as session:
        disk = writer_of(session).tiers.disk
        assert disk is not None
        load, read = disk.load_run, threading.Event()
        monkeypatch.setattr(disk, "load_run", lambda run, memory: load(run, memory) if read.wait(500) else [])
        slow = session.submit(list(prompt(0)), max_tokens=NEW, ignore_eos=True)
        other = [5, 6, 7]
        quick = session.generate_sync(other, max_tokens=1)
        assert quick.usage.cached_tokens == 0
        assert slow.status is Status.LOADING
        read.set()
        done = slow.result_sync()
        assert done.token_ids == plain(0)
        assert done.usage.cached_tokens == 64
        aborted = session.submit(list(prompt(0)), max_tokens=NEW)
        aborted.cancel()
        session.check_integrity()


@pytest.mark.thorough
def test_likely_pages_are_read_before_anybody_asks(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        for index in (0, 1):
            ask(session, index)
        session.save("mine").result_sync()
    with opened(tmp_path, restore="mine") as session:
        while session.cache.explain(prompt(1)).host_tokens < 64:
            time.sleep(0.01)
        assert session.cache.stats().disk_hit_tokens == 0, "nobody asked"
        assert [ask(session, index) for index in (0, 1)] == [64, 64]
        assert session.cache.stats().disk_hit_tokens == 12 * 8
        session.cache.clear(tier="device").result_sync()
        assert ask(session, 0) == 64
        assert session.cache.stats().disk_hit_tokens == 12 * 8, "that was host memory's"
        session.check_integrity()
    with opened(tmp_path, restore="mine", host_memory=3 * 6144) as session:
        while writer_of(session).tiers._ahead:
            time.sleep(0.01)
        assert session.cache.stats().host_bytes <= 3 * 6144
        assert ask(session, 0) == 64


@pytest.mark.thorough
def test_a_tree_looked_through_in_parts_is_listed_once_and_not_taken_for_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TICK_SECONDS": 1e6, "SLICE": 2, "BUSY_SLICES": 1}.items():
        monkeypatch.setattr(f"rekindle._src.kvcache.writer.{name}", value)
    listed, iterate = [], PrefixCache.__iter__
    monkeypatch.setattr(PrefixCache, "__iter__", lambda cache: (listed.append(len(cache)), iterate(cache))[1])
    with opened(tmp_path, device_pages=65) as session:
        for index in (0, 1):
            ask(session, index)
        writer = writer_of(session)

        def keep(*, cold: float, visited: bool) -> None:
            writer.submit(lambda: writer._keep(1 << 30, cold=cold, visited=visited)).result()

        nodes = session.stats().cache.nodes
        assert nodes == 14
        listed.clear()
        for _ in range(nodes):  # twice through the tree
            keep(cold=1e6, visited=True)
            assert writer.complete_at == -1, "most of it is neither cold nor visited"
        assert listed == [nodes, nodes]
        disk = writer.tiers.disk  # type: ignore[union-attr]
        assert disk is not None and len(disk) == 4, "what both prompts share was visited"
        keep(cold=0.0, visited=False)
        assert len(disk) == nodes
        assert writer.complete_at == engine_of(session).scheduler.cache.version


@pytest.mark.thorough
@pytest.mark.parametrize("kind", by_default(["int8-int4", "int8", "float8_e4m3fn"]))
def test_narrow_pages_are_kept_as_such(kind: str, tmp_path: Path) -> None:
    options = {"max_tokens": NEW, "ignore_eos": True}
    with opened(tmp_path, kv_dtype=kind) as session:
        cold = session.generate_sync(list(prompt(0)), **options)
        session.save("small").result_sync()
        small = session.cache.stats().page_bytes
    with opened(tmp_path, kv_dtype=kind, restore="small") as session:
        again = session.generate_sync(list(prompt(0)), **options)
        assert again.usage.cached_tokens == 64
        assert again.token_ids == cold.token_ids
        session.check_integrity()
    with pytest.raises(SnapshotRefused, match=f"pages hold '{kind}'"):
        opened(tmp_path, restore="small")
    with opened(tmp_path) as session:
        assert small < 0.5 * session.cache.stats().page_bytes
