"""`rekindle chat`: an interactive conversation, whose prefix stays cached from turn to turn."""

from __future__ import annotations

import argparse
import sys

from rekindle._src.cli.usage import engine_options, sampling_options
from rekindle._src.core.records import FinishReason
from rekindle._src.session.conversation import Conversation
from rekindle._src.session.opening import open_sync
from rekindle.errors import PromptTooLong

HELP = "/reset starts over · /undo drops the last turn · /stats shows the session · /quit or Ctrl-D leaves"


def run(arguments: argparse.Namespace) -> int:
    options = sampling_options(arguments)
    with open_sync(arguments.model, **engine_options(arguments)) as session:
        chat = session.conversation(system=arguments.system, **options)
        print(HELP, file=sys.stderr)
        while (line := _read("> ")) is not None:
            match line.strip():
                case "":
                    continue
                case "/quit":
                    break
                case "/reset":
                    chat = session.conversation(system=arguments.system, **options)
                case "/undo":
                    if _turns(chat):
                        chat.undo()
                case "/stats":
                    print(session.stats(), file=sys.stderr)
                case text if text.startswith("/"):
                    print(HELP, file=sys.stderr)
                case text:
                    _answer(chat, text)
    return 0


def _read(prompt: str) -> str | None:
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _turns(chat: Conversation) -> int:
    return sum(message["role"] == "user" for message in chat.messages)


def _answer(chat: Conversation, text: str) -> None:
    """Stream one answer; Ctrl-C ends it and keeps the text so far."""
    while True:
        turn = chat.stream(text)
        try:
            for delta in turn.stream_sync():
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            turn.cancel()
            print(" [interrupted]")
            return
        except PromptTooLong as error:
            if not _make_room(chat, f"{error.value} {error.problem}"):
                return
            continue
        print()
        if turn.result_sync().finish_reason is FinishReason.CONTEXT:
            _make_room(chat, "the context is full, so the answer ends here")
        return


def _make_room(chat: Conversation, problem: str) -> bool:
    """Say that the conversation is too long, and offer to drop its oldest turn; whether that was done."""
    turns = _turns(chat)
    print(f"[{problem}]", file=sys.stderr)
    if not turns:
        print("[there is no older turn to drop: say it in fewer words, or use --max-model-len]", file=sys.stderr)
        return False
    answer = _read(f"Drop the oldest of {turns} turns? [Y/n] ")
    if answer is None or answer.strip().lower() not in ("", "y", "yes"):
        print("[nothing was dropped; /undo takes the last turn back, /reset starts over]", file=sys.stderr)
        return False
    chat.forget()
    return True
