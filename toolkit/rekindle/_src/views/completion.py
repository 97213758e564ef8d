"""The drawing of completions: text, shades of its tokens, and how it was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rekindle._src.core import words
from rekindle._src.core.records import Completion, TokenLogprobs, problem_of, summary_of
from rekindle._src.views import html, replies


def completion(done: Completion) -> html.Markup:
    """Draw a completion: its pictures, its text, and a line that unfolds to how it was made."""
    parts: list[str] = [html.images(done.images), html.line(done.question) if done.question else ""]
    if done.prompt_logprobs is not None:
        parts.append(html.tokens(_prompt(done, done.prompt_logprobs)))
    if done.logprobs is not None or done.reply is None:
        parts.append(_text(done))
    else:
        parts.append(html.block(replies.parts(done.reply, replies.ReasoningFigures.of(done))))
    rate = done.timings.decode_rate(len(done.token_ids))
    first = (summary_of(done), f"{rate:.0f} tokens/s" if rate else "", problem_of(done))
    facts = html.pairs({name: value for name, value in _facts(done).items() if value})
    return html.block(*parts, html.details(" · ".join(filter(None, first)), facts))


def _facts(done: Completion) -> dict[str, str]:
    """Return how the text was made, for a closer look."""
    usage, timings = done.usage, done.timings
    thought = usage.reasoning_tokens
    shaded = (*(done.prompt_logprobs or ()), *(done.logprobs or ()))
    others = "; point at a token for others" if any(entry.top_ids for entry in shaded) else ""
    return {
        "prompt": f"{words.count(usage.prompt_tokens, 'token')}, {usage.cached_tokens:,} of them cached",
        "first token after": words.seconds(timings.first_token) if timings.total else "",
        "queued for": words.seconds(timings.queued) if timings.queued >= 0.001 else "",
        "reasoning": f"{words.seconds(timings.reasoning)}, {words.count(thought, 'token')}" if thought else "",
        "compiling": words.seconds(timings.compiling) if timings.compiling >= 0.05 else "",
        "grammar": f"{words.count(sum(done.forced), 'token')} forced by the grammar" if any(done.forced) else "",
        "shade": f"the more orange, the less likely{others}" if shaded else "",
        "seed": "" if done.sampling.greedy or done.sampling.seed is None else str(done.seed),
        "request": done.id,
    }


def _prompt(done: Completion, logprobs: Sequence[TokenLogprobs]) -> Iterator[html.Token]:
    patches, before = done.patches, len(done.prompt_token_ids) - len(logprobs)
    # Nothing comes before a prompt's first token, so that it has no probability.
    first = html.Token(done.text_of(done.prompt_token_ids[0]))
    tokens = [first, *(_token(done, entry) for entry in logprobs)]
    for position, token in zip((0, *range(before, len(done.prompt_token_ids))), tokens, strict=True):
        patch = patches.get(position)
        yield token if patch is None else token._replace(text="▦", note=str(patch))


def _text(done: Completion) -> html.Markup:
    if done.logprobs is not None:
        tokens = [_token(done, entry) for entry in done.logprobs]
    elif any(done.forced):
        tokens = [html.Token(text) for text in done.token_texts]
    else:
        return html.text(done.text)
    forced = [*done.forced, *[False] * (len(tokens) - len(done.forced))]
    return html.tokens(token._replace(forced=flag) for token, flag in zip(tokens, forced, strict=True))


def _token(done: Completion, entry: TokenLogprobs) -> html.Token:
    most = html.ALTERNATIVES
    others = zip(map(done.text_of, entry.top_ids[:most]), entry.top_logprobs[:most], strict=True)
    return html.Token(done.text_of(entry.token_id), entry.logprob, tuple(others))
