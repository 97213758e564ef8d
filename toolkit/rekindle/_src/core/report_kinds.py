"""The kinds of reports that the features of a step make; see report.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle._src.core.records import GuideReport, TokenLogprobs, Vector
from rekindle._src.core.report import Report

if TYPE_CHECKING:
    from rekindle._src.core.captured import CapturedPart

LOGPROBS: Report[TokenLogprobs] = Report("logprobs")  # of the token
PROMPT_LOGPROBS: Report[TokenLogprobs] = Report("prompt_logprobs")  # of positions (start, start + length]
GUIDED: Report[GuideReport] = Report("guided")  # by the guide, on the token
POOLED: Report[Vector] = Report("pooled")  # of an embedded prompt: a chunk's states, at its end the states of all
CAPTURED: Report[CapturedPart] = Report("captured")  # at positions that the request wants
CARRIED: Report[tuple[float, ...]] = Report("carried")  # numbers of a sampler, after the token
