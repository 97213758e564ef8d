"""Log lines come every so many steps and say what happened; a slow step is reported with what it ran."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from sessions import CONFIG, opened


def test_a_line_every_few_steps_counts_what_they_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle.steps"), opened(dataclasses.replace(CONFIG, log_every=2)) as session:
        session.generate_sync("count me", max_tokens=9, ignore_eos=True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) >= 4
    assert lines[0].startswith("steps=2 new_sequences=1 new_tokens=2 ")
    assert all(word in lines[0] for word in ("pages_used=", "running=1", "queued=0", "tokens_per_s=", "compilations="))
    assert lines[1].startswith("steps=4 new_sequences=0 new_tokens=2 ")


def test_it_is_quiet_by_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle.steps"), opened() as session:
        session.generate_sync("hush", max_tokens=9)
    assert not caplog.records


def test_a_slow_step_is_reported_with_what_it_ran(caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(CONFIG, step_timeout=0.0)
    with caplog.at_level(logging.WARNING, "rekindle.steps"), opened(config, step_seconds=0.01) as session:
        handle = session.submit("slow", max_tokens=2)
        handle.result_sync()
    assert caplog.records
    assert "limit 0.0" in caplog.text
    assert handle.request_ids[0] in caplog.text
