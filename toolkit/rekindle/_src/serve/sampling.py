"""The fields of a request as our sampling options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle._src.serve.contract import SessionLike
from rekindle._src.serve.errors import wrong

_SAME = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n", "stop",
    "stop_token_ids", "min_tokens", "ignore_eos", "allowed_token_ids", "bad_words",
)  # fmt: skip
NAMES = {"include_stop": "include_stop_str_in_output", "salt": "cache_salt"}  # the client's fields by our options


def sampling_options(fields: Mapping[str, Any], session: SessionLike) -> dict[str, Any]:
    """Return the options that every API has under the same names."""
    options = {name: fields[name] for name in _SAME if name in fields}
    if "temperature" not in options and session.sampling.greedy and session.config.generation_config != "greedy":
        options["temperature"] = 1.0  # OpenAI's default, if the checkpoint has none
    if "top_k" in fields:
        options["top_k"] = max(0, fields["top_k"])
    if "seed" in fields:
        options["seed"] = fields["seed"] % 2**63
    if fields.get("priority"):
        policy = session.config.policy
        if policy != "priority":
            fix = 'Remove it, or start the server with the policy "priority"'
            raise wrong("priority", fields["priority"], f"means nothing with the server's policy {policy!r}", fix)
        options["priority"] = -fields["priority"]  # vLLM serves the smallest first
    if fields.get("logit_bias"):
        options["logit_bias"] = _biases(fields["logit_bias"])
    if "include_stop_str_in_output" in fields:
        options["include_stop"] = fields["include_stop_str_in_output"]
    if "cache_salt" in fields:
        options["salt"] = fields["cache_salt"]
    if "prompt_logprobs" in fields:
        options["prompt_logprobs"] = fields["prompt_logprobs"]
    return options


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    by_token = {}
    for key, value in biases.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise wrong("logit_bias", key, "is not a token id", 'Use whole numbers as keys, such as {"464": -100}')
        by_token[int(key)] = value
    return by_token


def rest_of_context(session: SessionLike) -> int:
    """Return the context's length as the token limit: the session ends the request where the context is full."""
    limit = session.config.max_model_len
    assert limit is not None, "an open session has resolved it"
    return limit
