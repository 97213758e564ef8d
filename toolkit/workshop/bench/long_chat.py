"""A chat of many turns in a small context: how much of it stays, the cached share of each turn, and its seconds.

    python long_chat.py                       # the embedded model, 200 turns, 2,048 tokens
    python long_chat.py --model FILE.gguf --turns 60

Two ways are run: one cut at each overflow (`drop`), and as a comparison a cut that moves with every turn, as a function
for `overflow` that always leaves out just as many turns as it has to. Every turn has an answer of `--answer` tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import harness

import rekindle
from rekindle import OverfullChat, Session

SYSTEM = "You are a patient teacher. Answer in two sentences, with one example from a kitchen."
QUESTION = "Question {number}: what would change in the recipe if we had {number} guests more than yesterday, and why?"


def just_enough(session: Session) -> Any:
    """Return a function for `overflow` that leaves out as few turns as it can."""

    def shortened(chat: OverfullChat) -> Sequence[Mapping[str, Any]]:
        low, high = 1, len(chat.turns) - 1
        while low < high:
            middle = (low + high) // 2
            fits = len(session.chat_tokens(chat.without(middle))) <= chat.room
            low, high = (low, middle) if fits else (middle + 1, high)
        return chat.without(low)

    return shortened


async def run(options: Any, way: str) -> None:
    fields: dict[str, Any] = {"max_model_len": options.context, "disk_memory": 0, "quiet": True, "precompile": "all"}
    if options.model == "tiny":
        fields["rope_scaling"] = f"yarn:{max(2, options.context // 1024)}"  # it has 1,024 positions of its own
    async with rekindle.open(options.model, **fields) as session:
        chosen: Any = "drop" if way == "drop" else just_enough(session)
        chat = session.conversation(SYSTEM, overflow=chosen, max_tokens=options.answer, ignore_eos=True)
        compiled = session.stats().as_dict().get("compilations")
        seconds, shares, kept, firsts = list[float](), list[float](), list[int](), list[int]()
        for number in range(options.turns):
            start = time.perf_counter()
            done = await chat.say(QUESTION.format(number=number))
            seconds.append(time.perf_counter() - start)
            shares.append(done.usage.cached_tokens / done.usage.prompt_tokens)
            firsts.append(0 if done.left_out is None else done.left_out.turns)
            kept.append(number - firsts[-1])
        after = session.stats().as_dict().get("compilations")
    full = next((at for at, first in enumerate(firsts) if first), len(firsts))
    moves = sum(one != other for one, other in zip(firsts[full:-1], firsts[full + 1 :], strict=True))
    later = len(firsts) - full - 1
    print(f"\n{way}: {options.turns} turns, full from turn {full}; the cut moves in {moves} of {later} later turns")
    print(f"  programs compiled in the chat: {(after or 0) - (compiled or 0)}")
    tenth = max(1, options.turns // 10)
    print("  turns        kept   cached   s/turn (median, most)")
    for start in range(0, options.turns, tenth):
        part = slice(start, start + tenth)
        cached, times = statistics.mean(shares[part]), seconds[part]
        turns = f"{start}-{start + len(times) - 1}"
        print(
            f"  {turns:10} {min(kept[part]):3}-{max(kept[part]):<3}  {cached:6.1%}   "
            f"{statistics.median(times):.3f}  {max(times):.3f}"
        )


def main() -> None:
    options = harness.options(__doc__, model="tiny", turns=200, context=2048, answer=48, ways=["drop", "just enough"])
    for way in options.ways:
        asyncio.run(run(options, way))


if __name__ == "__main__":
    main()
