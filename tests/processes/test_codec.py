"""Steps as messages: what arrives is what was packed, and a step of rows that decode takes few bytes."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle._src.core.records import Request, Row, RowResult, StepPlan, StepResult
from rekindle._src.core.sampling import Sampling
from rekindle._src.kvcache import PagePool
from rekindle._src.processes.codec import StepCodec
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.packing import Constants, Layout, Upload, sections
from rekindle._src.scheduling.scheduler import Limits, Scheduler
from rekindle.errors import ProcessLost


class Pair:
    """Both sides of a session's steps."""

    def __init__(self, slots: int, width: int, page_size: int) -> None:
        self.slots, self.width, self.page_size = slots, width, page_size
        self.constants = Constants(slots)
        self.leader, self.follower = (StepCodec(slots, width, page_size) for _ in range(2))
        self.uploads: dict[Bucket, Upload] = {}

    def send(self, plan: StepPlan, bucket: Bucket) -> int:
        """Bytes of the message of a step, after comparing what arrives."""
        layout = Layout.of(bucket, max_requests=self.slots, width=self.width)
        for row in plan.rows:
            if row.fresh:
                self.constants.put(row)
        upload = self.uploads.setdefault(bucket, Upload(layout))  # used again, so that tables hold what is left over
        upload.pack(plan, self.constants)
        message = self.leader.encode(layout, upload.ints, upload.floats)
        ints, floats = self.follower.decode(layout, message)
        expected, found = sections(layout, upload.ints), sections(layout, ints)
        for name, one, other in zip(expected._fields, expected, found, strict=True):
            if name == "table":
                used = np.arange(self.width) * self.page_size < expected.varying[:, 1:2]
                one, other = one[used], other[used]
            np.testing.assert_array_equal(one, other, err_msg=name)
        np.testing.assert_array_equal(upload.floats, floats)
        return len(message)


def test_steady_decoding_of_256_rows_of_8192_tokens_takes_less_than_a_kilobyte() -> None:
    """The plans are the scheduler's own."""
    rows, context, page_size, tokens, prefills = 256, 8192, 32, 1 << 16, 64
    scheduler = Scheduler(
        Limits(rows, tokens, context, page_size, prefills), PagePool(rows * context // page_size + 1), cache=None
    )
    rng = np.random.default_rng(0)
    for index in range(rows):
        prompt = rng.integers(0, 50_000, context - 101 - index % page_size, dtype=np.int32)
        scheduler.submit(Request(f"r{index}", prompt, Sampling(max_tokens=100, temperature=0.7, seed=index)))
    pair, sizes = Pair(rows, context // page_size, page_size), list[int]()
    while len(sizes) < 64:
        plan = scheduler.plan()
        assert plan is not None
        size = pair.send(plan, Bucket(rows, tokens if plan.prefill else 0))
        if len(plan.decode) == rows:
            sizes.append(size)
        told = [RowResult(row.request.id, row.epoch, 5 if row.samples else None) for row in plan.rows]
        scheduler.commit(StepResult(plan, tuple(told)))
    assert min(sizes) < max(sizes), "pages were added"
    assert max(sizes) < 1024, f"{max(sizes)} bytes; 4,096 are allowed"


def _row(
    rng: np.random.Generator, request: Request, slot: int, start: int, length: int, pages: int, **more: object
) -> Row:
    table = rng.integers(1, 5000, pages).astype(np.int32)
    row = Row(request, 0, slot, start, length, table, None, samples=True)
    return row._replace(**more)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_step_holds_arrives(seed: int) -> None:
    """Rows come, go, change places and tables; drafts, prompts, options of all kinds, and targets."""
    rng, page_size, width, slots = np.random.default_rng(seed), 8, 16, 6
    pair = Pair(slots, width, page_size)
    buckets = [Bucket(rows, tokens) for rows in (2, 6) for tokens in (0, 32, 64)]
    for step in range(150):
        bucket = buckets[rng.integers(len(buckets))]
        layout = Layout.of(bucket, max_requests=slots, width=width)
        places = rng.permutation(slots).tolist()
        decode, prefill, left = [], [], bucket.tokens
        for slot in places[: rng.integers(0, bucket.rows + 1)]:
            sampling = Sampling(
                temperature=float(rng.integers(0, 3)), seed=int(rng.integers(1 << 40)), top_k=int(rng.integers(0, 90)),
                logprobs=2 if rng.random() < 0.3 else None,
            )  # fmt: skip
            length = int(rng.integers(1, width * page_size))
            request = Request(f"{step}.{slot}", np.ones(5, np.int32), sampling)
            token = np.array([rng.integers(0, 1 << 17)], np.int32) if rng.random() < 0.3 else None
            fresh = _row(
                rng, request, slot, length - 1, 1, -(-length // page_size), fresh=True, token_ids=token,
                samples=bool(rng.random() < 0.8), kept=bool(rng.random() < 0.2),
            )  # fmt: skip
            decode.append(fresh)
            if len(decode) < bucket.rows and length < width * page_size - 8 and rng.random() < 0.3:
                draft = fresh._replace(
                    start=length, fresh=False, draft=True, token_ids=np.array([7], np.int32),
                    pages=np.append(fresh.pages, 9).astype(np.int32),
                )  # fmt: skip
                decode.append(draft)
        decode = decode[: bucket.rows]
        taken = {row.slot for row in decode}
        for slot in [place for place in places if place not in taken][: layout.prefills]:
            length = int(rng.integers(1, 20))
            if length > left or rng.random() < 0.4:
                continue
            left -= length
            prompt = rng.integers(0, 70_000, 40).astype(np.int32)
            sampling = Sampling(prompt_logprobs=1 if rng.random() < 0.3 else None, temperature=0.5, seed=3)
            start = int(rng.integers(0, 15))
            row = _row(rng, Request(f"{step}.{slot}", prompt, sampling), slot, start, length, width, fresh=True)
            prefill.append(row._replace(token_ids=prompt[start : start + length]))
        pair.send(StepPlan(step, tuple(decode), tuple(prefill)), bucket)


def _message() -> tuple[StepCodec, Layout, bytes]:
    bucket, pair = Bucket(2, 32), Pair(4, 8, 8)
    rng, request = np.random.default_rng(0), Request("r", np.arange(9, dtype=np.int32), Sampling())
    decode = _row(rng, request, 1, 11, 1, 2, fresh=True)
    prefill = _row(rng, request, 2, 0, 9, 2, fresh=True)._replace(token_ids=request.token_ids)
    layout = Layout.of(bucket, max_requests=4, width=8)
    upload = Upload(layout)
    upload.pack(StepPlan(0, (decode,), (prefill,)), pair.constants)
    return pair.follower, layout, pair.leader.encode(layout, upload.ints, upload.floats)


def test_a_message_that_is_cut_or_too_long_is_refused() -> None:
    _, _, message = _message()
    for length in range(len(message)):
        follower, layout, _ = _message()
        with pytest.raises(ProcessLost):
            follower.decode(layout, message[:length])
    follower, layout, _ = _message()
    with pytest.raises(ProcessLost, match="1 bytes too many"):
        follower.decode(layout, message + b"x")
    follower, layout, _ = _message()
    follower.decode(layout, message)


def test_no_message_of_noise_does_anything_but_raise() -> None:
    rng = np.random.default_rng(1)
    _, _, message = _message()
    for _ in range(300):
        follower, layout, _ = _message()
        noisy = bytearray(message)
        for at in rng.integers(0, len(noisy), 3):
            noisy[at] = rng.integers(256)
        try:
            ints, floats = follower.decode(layout, bytes(noisy))
        except ProcessLost:
            continue
        parts = sections(layout, ints)
        assert ints.shape == (layout.ints,) and floats.shape == (layout.floats,)
        assert parts.varying[:, 0].min() >= 0 and parts.varying[:, 0].max() <= layout.slots
        assert parts.table.min() >= 0 and parts.offsets.max() <= layout.tokens
