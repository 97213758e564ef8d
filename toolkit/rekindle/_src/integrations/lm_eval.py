"""A session as a model of the evaluation harness, lm-eval, in this process.

All requests of a task go to the engine at once, which shares the pages of their common beginnings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rekindle._src.core.records import Completion
from rekindle._src.session.opening import open_sync
from rekindle._src.session.session import Session
from rekindle.errors import MissingExtra

if TYPE_CHECKING:
    T = TypeVar("T")
    utils: Any
    normalize_gen_kwargs: Any

    class TemplateLM:
        """The parts of the harness's base class that are used here; the harness has no types."""

        cache_hook: Any

    def register_model(name: str) -> Callable[[T], T]: ...

else:
    try:
        from lm_eval import utils
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model as register_model
        from lm_eval.models.utils import normalize_gen_kwargs
    except ImportError as error:
        raise MissingExtra("lm-eval", "lm-eval") from error

_OWN = ("do_sample", "until", "max_gen_toks")  # of the harness; all others are sampling options


@register_model("rekindle")
class RekindleLM(TemplateLM):
    """A session as a model of the harness: log-likelihoods, rolling ones, and generation.

    Made by the harness from `--model_args pretrained=FOLDER,dtype=float32,…`, with names as in `rekindle.open`;
    or over an open session: `lm_eval.simple_evaluate(model=RekindleLM(session), tasks=[…])`.
    """

    def __init__(
        self,
        session: Session | None = None,
        *,
        pretrained: str = "tiny",
        adapter: str | Mapping[str, float] | None = None,
        max_gen_toks: int = 256,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        """Open a session, or take one.

        The harness passes `batch_size`, `max_batch_size` and `device`, which are not used: the engine has its own.

        `adapter` is the name of an adapter of the session that all requests have, or names with their weights.
        """
        self._own = session is None
        self.session: Session = open_sync(pretrained, **options) if session is None else session
        """The session that runs the requests."""
        super().__init__()
        self.max_gen_toks = max_gen_toks
        self._adapter = adapter

    def close(self) -> None:
        """Close the session if it was opened here."""
        if self._own:
            self.session.close()

    @property
    def max_length(self) -> int:
        """Tokens before the last one that is scored."""
        limit = self.session.config.max_model_len
        return limit - 1

    @property
    def eot_token_id(self) -> int:
        """The model's end of sequence."""
        return int(next(iter(self.session.tokenizer.eos_ids)))

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before texts without a context."""
        bos = self.session.tokenizer.bos_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """The model's name; the harness caches requests under it."""
        return self.session.model

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template of chats."""
        return str(self.session.chat_template or "")

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a chat."""
        return self.session.render(list(chat_history), continue_final_message=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text, with the tokenizer's own special tokens unless it begins with one."""
        tokenizer = self.session.tokenizer
        if add_special_tokens is None:
            prefix = tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return list(tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        room = self.max_length + 1
        by_context: dict[tuple[int, ...], list[int]] = {}  # the requests of each context, which is computed once
        for number, (_key, context, continuation) in enumerate(requests):
            kept = context[max(0, len(context) + len(continuation) - room) :]
            by_context.setdefault(tuple(kept), []).append(number)
        choices = [[requests[number][2] for number in numbers] for numbers in by_context.values()]
        scores = self.session.score_sync([list(context) for context in by_context], choices, adapter=self._adapter)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for numbers, scored in zip(by_context.values(), scores, strict=True):
            for number, score in zip(numbers, scored, strict=True):
                results[number] = score.logprob, score.greedy
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], results[number])
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows of the context where it is longer."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _greedy) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a text for each request, up to its first stop string."""
        by_options: dict[str, tuple[dict[str, Any], list[int]]] = {}
        for number, request in enumerate(requests):
            options = dict(request.args[1])
            by_options.setdefault(json.dumps(options, sort_keys=True, default=str), (options, []))[1].append(number)
        texts = [""] * len(requests)
        for options, numbers in by_options.values():
            fields = normalize_gen_kwargs(options, default_max_gen_toks=self.max_gen_toks)
            tokens = int(fields["max_gen_toks"])
            sampling = {"adapter": self._adapter, **{key: fields[key] for key in fields if key not in _OWN}}
            room = max(1, self.max_length + 1 - tokens)
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            done: list[Completion] = self.session.generate_sync(
                prompts, max_tokens=tokens, stop=[text for text in fields["until"] if text], **sampling
            )
            for number, one in zip(numbers, done, strict=True):
                texts[number] = one.text
                self.cache_hook.add_partial("generate_until", requests[number].args, one.text)
        return texts
