"""The texts of a model that is opened: its tokenizer, its chat template, and the sampling that it asks for."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from rekindle._src.core.embedder import Embedder
from rekindle._src.core.memory import give_back
from rekindle._src.models.loading.gguf.files import is_file
from rekindle._src.models.loading.sentence_transformers import embedder_of
from rekindle._src.opening.blueprint import Blueprint
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.generation_config import Defaults, defaults_of, describe
from rekindle._src.text.tokenizer import Tokenizer

log = logging.getLogger("rekindle.engine")


class TextSettings(NamedTuple):
    """All that a checkpoint says about texts, besides their tokens."""

    defaults: Defaults  # of requests without options of their own
    chat: ChatTemplate | None  # None without a template
    embedder: Embedder  # how texts become vectors


class Vocabulary:
    """A tokenizer that is being loaded, in a thread; and what else the checkpoint says about texts."""

    def __init__(self, plan: Blueprint, tokenizer: Future[Tokenizer]) -> None:
        self._plan, self._tokenizer = plan, tokenizer

    @classmethod
    def begin(cls, plan: Blueprint) -> Vocabulary:
        """Begin to load. A large vocabulary takes 0.1 s; weights are read and programs made meanwhile."""

        def load() -> Tokenizer:
            if plan.folder is not None:
                return Tokenizer.load(plan.folder)
            return Tokenizer(None, eos_ids=plan.model.eos_token_ids)

        pool = ThreadPoolExecutor(1, thread_name_prefix="rekindle vocabulary")
        tokenizer = pool.submit(load)
        pool.shutdown(wait=False)
        return cls(plan, tokenizer)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raise the error of loading it."""
        tokenizer = self._tokenizer.result()
        give_back()  # memory that reading a large vocabulary took
        return tokenizer

    def texts(self) -> TextSettings:
        """Read the checkpoint's other text settings, then forget a GGUF file's metadata, which is no longer needed."""
        plan = self._plan
        chat = None if plan.folder is None else ChatTemplate.load(plan.folder)
        if chat is not None:
            chat.replies_are(plan.config.reply_format)
        texts = TextSettings(_sampling(plan), chat, embedder_of(plan.folder, plan.model))
        if plan.folder is not None and is_file(plan.folder):
            from rekindle._src.models.loading.gguf.header import forget_headers  # other formats don't need it

            forget_headers()
        return texts


def _sampling(plan: Blueprint) -> Defaults:
    """Return the sampling of requests without options of their own; log the checkpoint's request for it."""
    if plan.config.generation_config == "greedy":
        return Defaults()
    defaults = defaults_of(plan.folder)
    if (sampling := defaults.sampling) is not None:
        log.info(
            'requests to %s are sampled as it asks: %s. generation_config="greedy" turns it off',
            plan.name,
            describe(sampling),
        )
    return defaults
