"""Sessions in lm-eval: `python -m rekindle.lm_eval run --model rekindle --model_args pretrained=FOLDER --tasks …`.

The command is lm-eval's own, with the model `rekindle` in addition to its others. In code, over a session that is open:

    from rekindle.lm_eval import RekindleLM
    results = lm_eval.simple_evaluate(model=RekindleLM(session), tasks=["hellaswag"])

Needs the extra `lm-eval`: `pip install "rekindle[lm-eval]"`.
"""

from __future__ import annotations

from rekindle._src.integrations.lm_eval import RekindleLM

__all__ = ["RekindleLM"]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
