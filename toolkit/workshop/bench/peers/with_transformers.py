"""transformers on torch's CPU backend: padded batches through `generate`, the way most people start."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from engine import Answer, Moments, Prompt, Setting


def open(setting: Setting) -> Transformers:
    if setting.file:
        raise NotImplementedError("GGUF: transformers widens what such a file holds")
    if setting.bits != 16:
        raise NotImplementedError(f"{setting.bits} bits: transformers has no product for them on torch's CPU backend")
    return Transformers(setting)


class Clock:
    """A streamer for whole batches: `generate` puts the prompt first, then a token for every row."""

    def __init__(self, start: float) -> None:
        self._start = start
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(time.perf_counter() - self._start)

    def end(self) -> None: ...


class Transformers:
    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        torch.set_num_interop_threads(1)
        transformers.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.bfloat16)
        self._model.eval()
        self._model.generation_config.eos_token_id = None
        self._kept: Any = None
        self.notes = f"torch {torch.__version__}, transformers {transformers.__version__}, bfloat16"

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], outputs: Sequence[int], *, keep: bool = False, at: Moments | None = None
    ) -> Answer:
        """Everybody waits for the longest output; what was generated beyond one's own is not counted."""
        if at is not None:
            raise NotImplementedError("generate takes nobody in amid a batch; continuous batching is meant for GPUs")
        longest = max(map(len, prompts))
        start = time.perf_counter()
        inputs = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        clock = Clock(start)
        options: dict[str, Any] = {}
        if self._kept is not None:
            options["past_key_values"] = copy.deepcopy(self._kept)
            options["past_key_values"].batch_repeat_interleave(len(prompts))
        done = self._model.generate(
            inputs, attention_mask=mask, max_new_tokens=max(outputs), do_sample=False, pad_token_id=0, streamer=clock,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
        wall = time.perf_counter() - start
        if keep:
            assert len(prompts) == 1, "only one prompt can be kept"
            self._kept = done.past_key_values
            self._kept.crop(len(prompts[0]))
        ids = [row[longest : longest + new].tolist() for row, new in zip(done.sequences, outputs, strict=True)]
        return Answer(wall, [clock.times[1 : new + 1] for new in outputs], ids)

    def forget(self) -> None:
        self._kept = None

    def close(self) -> None: ...
