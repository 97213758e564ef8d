"""OpenVINO GenAI's ContinuousBatchingPipeline on the CPU, over a model exported by optimum-intel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from engine import Answer, Arrivals, Moments, Prompt, Setting

CACHE_GB = 2  # of KV cache, the same for both precisions


def convert(setting: Setting) -> None:
    """A bfloat16 graph; for fewer bits, its weights compressed by nncf.

    In 8 bits that is what `optimum-cli export openvino` does by default; in 4, all layers in groups of 32 with a scale,
    as in Q4_0, and embeddings and head in 8 bits.
    """
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    task = "text-generation-with-past"
    main_export(setting.folder, setting.weights, task=task, ov_config=OVConfig(dtype="bf16"), convert_tokenizer=False)
    if setting.bits != 16:
        import nncf

        file = setting.weights / "openvino_model.xml"
        wanted: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
        if setting.bits == 4:
            wanted = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 32, "ratio": 1.0}
        small = nncf.compress_weights(openvino.Core().read_model(file), **wanted)
        written = file.with_name("small.xml")
        openvino.save_model(small, written, compress_to_fp16=False)
        del small
        written.replace(file)
        written.with_suffix(".bin").replace(file.with_suffix(".bin"))


def open(setting: Setting) -> OpenVino:
    return OpenVino(setting)


class OpenVino:
    def __init__(self, setting: Setting) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = 256
        scheduler.enable_prefix_caching = True
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": setting.threads}
        if setting.first_token:
            options["CACHE_DIR"] = setting.cache  # what OpenVINO has against slow starts
        self._setting, self._options, self._scheduler = setting, options, scheduler
        self._pipeline = self._make()
        self._next = 0
        self.notes = f"OpenVINO {openvino.__version__.split('-')[0]}, prefix caching, KV of {CACHE_GB} GB, defaults"

    def _make(self) -> Any:
        return openvino_genai.ContinuousBatchingPipeline(
            self._setting.file or str(self._setting.weights), self._scheduler, "CPU", self._options
        )

    def generate(
        self, prompts: Sequence[Prompt], outputs: Sequence[int], *, keep: bool = False, at: Moments | None = None
    ) -> Answer:
        times: list[list[float]] = [[] for _ in prompts]
        ids: list[list[int]] = [[] for _ in prompts]
        handles: dict[int, Any] = {}
        arrivals = Arrivals(len(prompts), at)
        while arrivals or self._pipeline.has_non_finished_requests():
            for index in arrivals.due(idle=not self._pipeline.has_non_finished_requests()):
                handles[index] = self._add(prompts[index], outputs[index])
            self._pipeline.step()
            now = arrivals.now()
            for index, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        ids[index] += output.generated_ids
                        times[index] += [now] * len(output.generated_ids)
        return Answer(arrivals.now(), times, ids)

    def _add(self, prompt: Prompt, new: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        tokens = openvino.Tensor(np.asarray([prompt], np.int64))
        self._next += 1
        return self._pipeline.add_request(self._next, tokens, config)

    def forget(self) -> None:
        """Prompts are never repeated, so that nothing of an earlier batch is found; there is no call to drop it."""

    def close(self) -> None:
        del self._pipeline
