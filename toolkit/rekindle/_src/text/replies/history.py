"""Earlier replies of a chat with their original tokens, in place of the chat template's.

A template writes an earlier reply in its own way: other whitespace around reasoning and calls, arguments in another
spelling. The next prompt would differ from the cached pages there. So a session keeps the tokens of its latest replies
by their prompts. They replace the template's wherever both read as the same reply. What a template leaves out or
changes, such as the reasoning of earlier turns, stays as the template has it.

A text has many spellings, and options can make a model write any of them. So a caller's requests find the replies to
that caller's requests alone, and with a salt those with that salt: no caller chooses the tokens of another's prompt,
and the number of a prompt's tokens tells nobody else that a chat took place.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Sequence

import numpy as np

from rekindle._src.core.records import IntArray
from rekindle._src.core.reply import Reply, fold
from rekindle._src.text.replies.format import ReplyPlan

MAX_KEPT = 512  # replies
MAX_TOKENS = 1 << 20  # of all of them
MOST_COMPARED = 1 << 14  # tokens of a prompt's replies that are read anew, while a session's loop waits
LONGEST = MOST_COMPARED  # tokens of one: a longer one could not be compared
_PER_PROMPT = 4  # latest replies to one prompt
_SPARE = 256  # tokens by which a template's spelling may be longer
_ENDING = 64  # tokens of a prompt that say how its reply begins

Decode = Callable[[Sequence[int]], str]


@dataclasses.dataclass(slots=True, eq=False)
class WrittenReply:
    """A reply as it was written, without the token that ended it."""

    token_ids: IntArray
    reply: Reply
    plan: ReplyPlan
    prompt: str  # the last part of its prompt
    other: bytes = b""  # the tokens that were compared last,
    agrees: bool = False  # and the result

    def tokens_to_read(self, token_ids: IntArray) -> int:
        """Return the number of tokens that a comparison would read; 0 if these were compared last."""
        if len(token_ids) > 2 * len(self.token_ids) + _SPARE or token_ids.tobytes() == self.other:
            return 0
        return len(token_ids)

    def is_also(self, token_ids: IntArray, decode: Decode) -> bool:
        """True if these tokens read as the same reply."""
        if len(token_ids) > 2 * len(self.token_ids) + _SPARE:
            return False
        spelled = token_ids.tobytes()
        if spelled != self.other:
            scanner = self.plan.scanner(self.prompt, b"", 0)
            again = fold([*scanner.feed(decode(token_ids.tolist())), *scanner.finish()])
            self.other, self.agrees = spelled, _said(again) == _said(self.reply)
        return self.agrees


class WrittenReplies:
    """The latest replies of a session, by their prompts."""

    def __init__(self) -> None:
        self._replies: collections.OrderedDict[bytes, list[WrittenReply]] = collections.OrderedDict()
        self._lengths = collections.Counter[int]()  # of their prompts
        self._length_of: dict[bytes, int] = {}
        self._tokens = 0
        self._unread = 0  # tokens that may still be read for the prompt at hand

    def __len__(self) -> int:
        return sum(map(len, self._replies.values()))

    def add(
        self,
        prompt_ids: IntArray,
        token_ids: Sequence[int],
        reply: Reply,
        plan: ReplyPlan,
        decode: Decode,
        salt: str | None = None,
        caller: str = "",
    ) -> None:
        """Keep a reply that the model has ended itself. The least recently used ones go."""
        if len(token_ids) > LONGEST:
            return
        digest = _digest_for(salt, caller)
        digest.update(prompt_ids.tobytes())
        key = digest.digest()
        plan = dataclasses.replace(plan, pieces=False)
        written = np.asarray(token_ids, np.int32)
        others = [one for one in self._drop(key) if not np.array_equal(one.token_ids, written)]
        ending = decode(prompt_ids[-_ENDING:].tolist())
        self._put(key, len(prompt_ids), [*others, WrittenReply(written, reply, plan, ending)][-_PER_PROMPT:])
        while len(self) > MAX_KEPT or self._tokens > MAX_TOKENS:
            self._drop(next(iter(self._replies)))

    def restored(
        self,
        token_ids: IntArray,
        ends: Collection[int],
        decode: Decode,
        salt: str | None = None,
        caller: str = "",
    ) -> IntArray:
        """Return the prompt with earlier replies as they were written. A reply's text reaches to one of `ends`.

        Once `MOST_COMPARED` tokens were read, the others stay as they are.
        """
        self._unread = MOST_COMPARED
        if not self._lengths or len(token_ids) <= min(self._lengths):
            return token_ids
        places = np.flatnonzero(np.isin(token_ids, list(ends)))
        parts: list[IntArray] = []
        digest = _digest_for(salt, caller)
        at = length = 0  # in `token_ids`, and in the result
        for prompt_length in sorted(self._lengths):
            if prompt_length < length:
                continue
            part = token_ids[at : at + prompt_length - length]
            at, length = at + len(part), prompt_length
            place = np.searchsorted(places, at)
            if place == len(places):
                parts.append(part)
                break
            digest.update(part.tobytes())
            parts.append(part)
            end = int(places[place])
            written = self._match(digest.digest(), token_ids[at:end], decode)
            if written is not None:
                digest.update(written.tobytes())
                parts.append(written)
                at, length = end, length + len(written)
        return np.concatenate([*parts, token_ids[at:]])

    def _match(self, key: bytes, token_ids: IntArray, decode: Decode) -> IntArray | None:
        replies = self._replies.get(key, ())
        match = next((one for one in reversed(replies) if np.array_equal(one.token_ids, token_ids)), None)
        match = match or next((one for one in reversed(replies) if self._compared(one, token_ids, decode)), None)
        if match is None:
            return None
        self._replies.move_to_end(key)
        return match.token_ids

    def _compared(self, one: WrittenReply, token_ids: IntArray, decode: Decode) -> bool:
        """True if these tokens read as a reply, and no more have to be read for it than may be."""
        count = one.tokens_to_read(token_ids)
        if count > self._unread:
            return False
        self._unread -= count
        return one.is_also(token_ids, decode)

    def _put(self, key: bytes, prompt_length: int, replies: list[WrittenReply]) -> None:
        self._replies[key], self._length_of[key] = replies, prompt_length
        self._lengths[prompt_length] += 1
        self._tokens += sum(len(one.token_ids) for one in replies)

    def _drop(self, key: bytes) -> list[WrittenReply]:
        replies = self._replies.pop(key, [])
        if replies:
            length = self._length_of.pop(key)
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
            self._tokens -= sum(len(one.token_ids) for one in replies)
        return replies


def _digest_for(salt: str | None, caller: str) -> hashlib.blake2b:
    """Return the digest of no tokens yet, for requests of this caller with this salt."""
    owner = hashlib.blake2b(repr((salt, caller)).encode("utf-8", "surrogatepass"), digest_size=32)
    return hashlib.blake2b(digest_size=32, key=owner.digest())


def _said(reply: Reply) -> tuple[object, ...]:
    calls = [(call.name, call.arguments) for call in reply.tool_calls]
    return reply.content.strip(), reply.reasoning.strip(), calls
