"""`salt`: requests with different salts share no pages on any tier, and otherwise nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.sessions import client_of, wait_until_idle, writer_of
from helpers.thorough import by_default
from helpers.tiered import NEW, opened, plain, prompt
from rekindle._src.core.prefix import SHARED, PageNamespace, is_namespace
from rekindle._src.session.session import Session
from rekindle.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
SALTS = (None, "alice", "bob")


def ask(session: Session, index: int, salt: str | None) -> int:
    """Generate and compare; how many prompt tokens came from the cache."""
    done = session.generate_sync(list(prompt(index)), max_tokens=NEW, ignore_eos=True, salt=salt)
    assert done.token_ids == plain(index)
    return int(done.usage.cached_tokens)


def found(session: Session, index: int, salt: str | None) -> int:
    told = session.cache.explain(list(prompt(index)), salt=salt)
    return told.device_tokens + told.host_tokens + told.disk_tokens


def test_each_salt_has_a_cache_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path, device_pages=65) as session:
        for salt in SALTS:
            assert found(session, 0, salt) == 0
            assert ask(session, 0, salt) == 0, f"{salt!r} was served from another's pages"
            assert found(session, 0, salt) >= 64
        for salt in SALTS:
            assert ask(session, 0, salt) >= 64
        shown = session.cache.tree(limit=1000)
        assert shown.total_pages == shown.shown_pages == len(found_pages(session)) == 27


def found_pages(session: Session) -> list[Any]:
    """Every node of the tree; the roots of salts are no nodes."""
    cache = writer_of(session).cache
    assert cache is not None
    cache.check_integrity()
    return list(cache)


def test_digests_of_the_same_tokens_differ_between_salts_and_not_within_one(tmp_path: Path) -> None:
    digests: dict[str | None, set[bytes]] = {}
    for run in range(2):
        with opened(tmp_path / str(run), device_pages=65) as session:
            for salt in SALTS:
                ask(session, 0, salt)
                cache = writer_of(session).cache
                assert cache is not None
                mine = {
                    cache.digest_of(node) for node in cache.find(client_of(session).prefix(list(prompt(0)), salt=salt))
                }
                assert digests.setdefault(salt, mine) == mine, "another process would not find its own pages"
    assert not digests[None] & digests["alice"] and not digests["alice"] & digests["bob"]


@pytest.mark.thorough
def test_pages_that_left_the_device_stay_apart(tmp_path: Path) -> None:
    with opened(tmp_path) as session:  # 16 pages: each request pushes the others' pages into host memory
        for _ in range(2):
            for index in range(3):
                for salt in SALTS:
                    ask(session, index, salt)
        assert session.cache.stats().offloaded_pages
        assert session.cache.stats().host_hit_tokens
        assert found(session, 0, "carol") == 0 == ask(session, 0, "carol")
        wait_until_idle(session)


@pytest.mark.parametrize("restore", by_default(["work", "auto"]))
def test_snapshots_keep_the_pages_of_every_salt_apart(tmp_path: Path, restore: str) -> None:
    with opened(tmp_path, device_pages=65) as session:
        for salt in ("alice", "bob"):
            ask(session, 0, salt)
        ask(session, 1, None)
        report = session.save("work").result_sync()
        assert report.pages == len(found_pages(session))
    with opened(tmp_path, device_pages=65, restore=restore) as session:
        assert found(session, 0, None) == 32, "the four pages that both prompts share"
        assert found(session, 0, "carol") == 0
        for salt in ("alice", "bob"):
            assert ask(session, 0, salt) >= 64
        assert ask(session, 0, "carol") == 0
        wait_until_idle(session)


def test_the_salt_is_not_stored(tmp_path: Path) -> None:
    with opened(tmp_path, device_pages=65) as session:
        ask(session, 0, "a-secret-of-alice")
        session.save("work").result_sync()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"a-secret-of-alice" not in path.read_bytes(), path


@pytest.mark.thorough
def test_pins_are_of_one_salt(tmp_path: Path) -> None:
    with opened(tmp_path, device_pages=65) as session:
        ask(session, 0, "alice")
        assert session.pin(list(prompt(0))) == 0 == session.pin(list(prompt(0)), salt="bob")
        assert session.pin(list(prompt(0)), salt="alice") >= 64
        assert session.unpin(list(prompt(0)), salt="alice") >= 64


def test_a_fork_and_several_completions_keep_the_salt(tmp_path: Path) -> None:
    with opened(tmp_path, device_pages=65) as session:
        done = session.generate_sync(list(prompt(0)), max_tokens=NEW, ignore_eos=True, salt="alice")
        assert done.sampling.salt == "alice"
        assert session.fork(done, at=2).result_sync().usage.cached_tokens >= 64
        both = session.generate_sync(list(prompt(0)), n=2, max_tokens=2, ignore_eos=True, salt="alice")
        assert all(one.usage.cached_tokens >= 64 for one in both)
        assert found(session, 0, None) == 0


@pytest.mark.thorough
def test_requests_of_two_salts_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with opened(tmp_path, device_pages=65) as session:
        handles = [
            session.submit(list(prompt(0)), max_tokens=NEW, ignore_eos=True, salt=salt) for salt in ("alice", "bob")
        ]
        for handle in handles:
            assert handle.result_sync().usage.cached_tokens == 0


@pytest.mark.parametrize("salt", ["", 5, b"alice", "x" * 5000, ["alice"]])
def test_what_is_no_salt_is_refused(tmp_path: Path, salt: Any) -> None:
    with opened(tmp_path) as session:
        for use in (
            lambda: session.generate(list(prompt(0)), salt=salt),
            lambda: session.cache.explain(list(prompt(0)), salt=salt),
            lambda: session.pin(list(prompt(0)), salt=salt),
        ):
            with pytest.raises(InvalidRequest, match=r"^salt="):
                use()


def test_a_salted_root_is_known_as_one_of_its_tree_alone() -> None:
    root, other = b"r" * 16, b"o" * 16
    alice, bob = PageNamespace("alice"), PageNamespace("bob")
    salted = alice.root(root)
    assert is_namespace(salted, root) and not is_namespace(salted, other) and not is_namespace(root, root)
    assert salted != alice.root(other) and salted != bob.root(root)
    assert SHARED.key == 0 != alice.key != bob.key
    assert PageNamespace("\ud800").root(root)  # text that UTF-8 can't hold
