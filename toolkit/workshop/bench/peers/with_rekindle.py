"""rekindle through its public API, as a script with an event loop would use it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import anyio
from engine import QUANTIZE, Answer, Moments, Prompt, Setting

import rekindle

# What a session is opened with for all workloads; the rest are defaults.
OPTIONS = {"max_model_len": 2048, "precompile": "all"}


def open(setting: Setting) -> Rekindle:
    return Rekindle(setting)


class Rekindle:
    def __init__(self, setting: Setting) -> None:
        options: dict[str, Any] = {} if setting.first_token else OPTIONS | {"max_requests": setting.requests}
        if not setting.file:  # which has a precision of its own
            options |= {"dtype": "bfloat16", "quantize": QUANTIZE[setting.bits]}
        self._session = rekindle.open_sync(
            setting.file or setting.folder, cache_dir=setting.cache, quiet=True, **options
        )
        config = self._session.config
        precision = "as stored" if setting.file else f"dtype bfloat16, quantize {config.quantize}"
        self.notes = f"{precision}, kv {config.kv_dtype}, pages of {config.page_size}"

    def generate(
        self, prompts: Sequence[Prompt], outputs: Sequence[int], *, keep: bool = False, at: Moments | None = None
    ) -> Answer:
        return anyio.run(self._generate, prompts, outputs, at)

    async def _generate(self, prompts: Sequence[Prompt], outputs: Sequence[int], at: Moments | None) -> Answer:
        times: list[list[float]] = [[] for _ in prompts]
        ids: list[list[int]] = [[] for _ in prompts]

        async def one(index: int) -> None:
            if at is not None:
                await anyio.sleep(max(0.0, at[index] - (time.perf_counter() - start)))
            async for delta in self._session.stream(prompts[index], max_tokens=outputs[index], ignore_eos=True):
                times[index] += [time.perf_counter() - start] * len(delta.token_ids)
                ids[index] += delta.token_ids

        start = time.perf_counter()
        async with anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(one, index)
        return Answer(time.perf_counter() - start, times, ids)

    def forget(self) -> None:
        self._session.cache.clear(tier="memory").result_sync()

    def close(self) -> None:
        self._session.close()
