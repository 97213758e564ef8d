"""Sessions in lm-eval: `python -m rekindle.lm_eval run --model rekindle --model_args pretrained=FOLDER --tasks …`.

The command is lm-eval's own, with the model `rekindle` in addition to its others. In code, over a session that is open:

    from rekindle.lm_eval import RekindleLM
    results = lm_eval.simple_evaluate(model=RekindleLM(session), tasks=["hellaswag"])

Needs the extra `lm-eval`: `pip install "rekindle[lm-eval]"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle._src.evaluation.lm_eval_model import HarnessModel, register_model
from rekindle._src.session.opening import open_sync
from rekindle._src.session.session import Session

__all__ = ["RekindleLM"]


@register_model("rekindle")
class RekindleLM(HarnessModel):
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
        super().__init__(self.session, adapter=adapter, max_gen_toks=max_gen_toks)

    def close(self) -> None:
        """Close the session if it was opened here."""
        if self._own:
            self.session.close()


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
