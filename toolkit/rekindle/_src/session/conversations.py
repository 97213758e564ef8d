"""The part of a session that keeps conversations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Unpack

    from rekindle._src.core.options import SamplingOptions
    from rekindle._src.session.conversation import Conversation
    from rekindle._src.session.tools.choice import ToolChoice
    from rekindle._src.session.tools.tool import ToolLike


class Conversations:
    """Chats that keep their messages."""

    def conversation(
        self,
        *,
        system: str | None = None,
        restore: str | os.PathLike[str] | None = None,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoice | None = None,
        run_tools: bool = False,
        max_rounds: int | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Conversation:
        """Make a chat that keeps its messages: `chat = session.conversation()`, then `await chat.say("…")`.

        `system` opens it with a system message; `restore` continues one that `chat.save(path)` wrote. The other options
        are those of `chat`, for every turn. With `tools` and `run_tools` a turn is over when the model has answered;
        calls and results are among `chat.messages`.
        """
        from rekindle._src.session.conversation import open_conversation  # chats alone need it
        from rekindle._src.session.tools.choice import resolve_choice
        from rekindle._src.session.tools.tool import tools_of

        optional = {
            "tools": tools,
            "tool_choice": tool_choice,
            "run_tools": run_tools or None,
            "max_rounds": max_rounds,
            "documents": documents,
            "template": template,
            "reasoning_effort": reasoning_effort,
            "template_options": template_options,
        }
        resolve_choice(tool_choice, tools_of(tools))  # wrong tools are refused now, not at the first turn
        present = {name: value for name, value in optional.items() if value is not None}
        return open_conversation(self, system=system, restore=restore, sampling=options, **present)
