"""The benchmark's tables, at toy sizes."""

from __future__ import annotations

import json

import pytest

from kernel_workshop import paged_attention as bench

SIZES = {"rows": 2, "context": 64, "chunk": 16, "heads": 4, "kv-heads": 2, "head-dim": 64, "page-size": 16, "layers": 2}
TOY = [*(f"--{name}={size}" for name, size in SIZES.items()), "--repeats=1"]


@pytest.mark.slow
def test_json_has_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([*TOY, "--dtypes=float32,int8", "--json"])
    told = json.loads(capsys.readouterr().out)
    names = [line["name"] for line in told["lines"]]
    assert {"decode float32", "decode int8", "prefill float32", "prefill int8", "memory read"} <= set(names)
    assert all(line["rate"] > 0 for line in told["lines"])
    assert told["shape"]["context"] == 64


def test_a_context_of_no_whole_pages_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([*TOY, "--context=65"])
    assert "multiple of page size 16" in capsys.readouterr().err
