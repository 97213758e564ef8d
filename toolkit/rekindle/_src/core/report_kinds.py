"""The kinds of reports that steps without capabilities make; see report.py. A capability has its own kinds."""

from __future__ import annotations

from rekindle._src.core.records import TokenLogprobs
from rekindle._src.core.report import Report

LOGPROBS: Report[TokenLogprobs] = Report("logprobs")  # of the token
PROMPT_LOGPROBS: Report[TokenLogprobs] = Report("prompt_logprobs")  # of positions (start, start + length]
