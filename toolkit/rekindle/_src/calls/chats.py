"""The part of a session that chats: messages in, a reply out, with tools that the model may call."""

# 1 is an int: this overlap is meant, and the overload that is taken stands first.
# mypy: disable-error-code="overload-overlap"
# pyright: reportOverlappingOverload=false

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from rekindle._src.calls.content import (
    PromptOptions,
    RequestOptions,
    encoded,
    of_messages,
    read_messages,
    split,
)
from rekindle._src.calls.handle import Handle
from rekindle._src.calls.prompts import Prompt
from rekindle._src.calls.requests import sampling_of, structured_text
from rekindle._src.capabilities.overflow.turns import characters_of, unpinned
from rekindle._src.capabilities.replies.request import ChatReply
from rekindle._src.core.foreign_calls import CHAT, ForeignParts
from rekindle._src.core.options import takes_options
from rekindle._src.core.records import Completion
from rekindle._src.core.sampling import ANSWER_TOKENS, Sampling, SamplingOptions
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.calls.chat_prompt import Messages
    from rekindle._src.calls.conversation import Conversation
    from rekindle._src.calls.tool_functions import ToolLike
    from rekindle._src.calls.tool_loop import ToolChoice, ToolLoop
    from rekindle._src.capabilities.overflow.request import Overflow


MAX_ROUNDS = 8


class ChatRequests:
    """Conversations with an open model."""

    _host: Host
    _front: Front

    @overload
    def chat(
        self,
        messages: Messages | str,
        sampling: Sampling | None = None,
        /,
        *,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        run_tools: Literal[False] = False,
        overflow: Overflow = "refuse",
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        reasoning: bool | None = None,
        reasoning_effort: str | None = None,
        reasoning_budget: int | None = None,
        reasoning_budget_message: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        stream_tool_calls: bool = False,
        n: Literal[1] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Handle[Completion]: ...
    @overload
    def chat(
        self,
        messages: Messages | str,
        sampling: Sampling | None = None,
        /,
        *,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        run_tools: Literal[False] = False,
        overflow: Overflow = "refuse",
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        reasoning: bool | None = None,
        reasoning_effort: str | None = None,
        reasoning_budget: int | None = None,
        reasoning_budget_message: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        stream_tool_calls: bool = False,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> Handle[list[Completion]]: ...
    @overload
    def chat(
        self,
        messages: Messages | str,
        sampling: Sampling | None = None,
        /,
        *,
        tools: Sequence[ToolLike],
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        run_tools: Literal[True],
        max_rounds: int = MAX_ROUNDS,
        overflow: Overflow = "refuse",
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        reasoning: bool | None = None,
        reasoning_effort: str | None = None,
        reasoning_budget: int | None = None,
        reasoning_budget_message: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ToolLoop: ...
    @takes_options(Sampling, also=PromptOptions, returns="Handle[Completion] | ToolLoop", max_tokens=ANSWER_TOKENS)
    def chat(
        self,
        messages: Messages | str,
        sampling: Sampling | None = None,
        /,
        *,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        run_tools: bool = False,
        max_rounds: int = MAX_ROUNDS,
        overflow: Overflow = "refuse",
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        reasoning: bool | None = None,
        reasoning_effort: str | None = None,
        reasoning_budget: int | None = None,
        reasoning_budget_message: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        stream_tool_calls: bool = False,
        **options: Any,
    ) -> Any:
        """Request the model's answer to a conversation, through its chat template. Await it or iterate over it.

        A message is a dict such as {"role": "user", "content": "Hello"}; a text alone is one message of the user.
        `images` are the pictures of the last message, one or a list: each takes the place of one "<image>" in its text,
        or they come first. The reply has `content`, the `reasoning` before it, and `tool_calls`; `reply.message` is the
        next message of the conversation.

        Without a `Sampling`, answers are drawn as `session.chat_sampling` says: as the checkpoint asks, or at a
        temperature of 0.8. With temperature=0 they are greedy, and small models may repeat themselves
        (`reply.repetition`). `reply.seed` repeats an answer.

        `tools` are the functions that the model may call: it is shown their name, docstring and type hints. They can be
        JSON schemas as dicts, too. `tool_choice` is "auto", "none", "required", or a tool's name: with these two the
        model has to call one, by a grammar (extra `structured`), and with `parallel_tool_calls=False` it may call only
        one. With `run_tools` the functions are run (async ones where they are awaited, others in a worker thread) and
        their results go back to the model, at most `max_rounds` times; the result is a `ToolRun` with the answer and
        all `messages`. In a stream, `delta.events` hold a call once it is complete; with `stream_tool_calls` its name
        and then its arguments, while the model writes them, and `ToolCallDropped` if it breaks off.

        `documents` are for templates that quote them, `template` replaces the model's own template,
        `template_options` are variables of the template such as {"enable_thinking": False}. With
        `continue_final_message` the answer goes on where the last message ends.

        `reasoning_budget` is how many tokens a model may reason before its answer: then the end of reasoning is
        written for it, after `reasoning_budget_message` if there is one. 0 ends reasoning at once. Reasoning in the
        prompt counts, the tags don't; `max_tokens` bounds all tokens of the reply. `reasoning=False` turns reasoning
        off, by the template's own switch and by a budget of 0. `reasoning_effort` is "none", "low", "medium" or "high"
        where the template knows it.

        A chat that is longer than the context is refused with `PromptTooLong`. With `overflow="drop"` its prompt leaves
        out the oldest turns instead, and `reply.left_out` says so: a turn is a user's message with everything up to the
        next one. System messages stay, as do turns with a message that has `"pinned": True`, and the last turn. A
        function gets an `OverfullChat` in a worker thread, and returns the messages of the prompt.
        """
        from rekindle._src.calls.chat_prompt import chat_prompt, least_budget, messages_of  # chats alone need it
        from rekindle._src.calls.tool_functions import tools_of
        from rekindle._src.calls.tool_loop import forcing, resolve_choice
        from rekindle._src.capabilities.overflow.request import check_overflow, rule_of

        check_overflow(overflow)
        content, others = split(options)
        messages, tools_ = messages_of(messages, content), tools_of(tools)
        choice = resolve_choice(tool_choice, tools_, parallel=parallel_tool_calls)
        if sampling is None and others.get("max_tokens") is None:
            others["max_tokens"] = ANSWER_TOKENS + least_budget(reasoning_budget)  # an answer should end by itself
        sampling_ = sampling_of(self._front, sampling, others, chat=True)

        def ask(messages: Messages, *, free: bool = False) -> Handle[Any]:
            effective, forced = sampling_, bool(choice.required) and not free

            def prompt_of(messages: Messages) -> Prompt:
                nonlocal effective
                shown, content = of_messages(self._front, unpinned(messages))
                prompt = chat_prompt(
                    self._front.chat,
                    shown,
                    model=self._front.model,
                    tools=choice.shown,
                    documents=documents,
                    template=template,
                    continue_final_message=continue_final_message,
                    reasoning=reasoning,
                    reasoning_effort=reasoning_effort,
                    reasoning_budget=reasoning_budget,
                    reasoning_budget_message=reasoning_budget_message,
                    template_options=template_options,
                    stream_tool_calls=stream_tool_calls,
                )
                self._host.check()
                reply = prompt.extensions.get(ChatReply)
                if forced and reply is not None:
                    effective = forcing(choice, sampling_, reply.plan, self._front.tokenizer)
                return prompt.plus(content).plus(structured_text(self._front, effective, calls=forced))

            if overflow != "refuse":
                messages = read_messages(self._front, messages)[0]  # pictures are opened once
            prompt = prompt_of(messages)
            if overflow != "refuse":
                more = characters_of(([tool.schema for tool in choice.shown], documents))
                prompt = prompt.plus(rule_of(overflow, messages, prompt_of, more))
            return Handle(self._host, self, prompt, effective)

        if not run_tools:
            return ask(messages)
        if sampling_.n != 1 or continue_final_message:
            field, value = ("n", sampling_.n) if sampling_.n != 1 else ("continue_final_message", True)
            raise InvalidRequest(field, value, "can't be combined with run_tools", "Run the tool calls yourself")
        from rekindle._src.calls.tool_loop import ToolLoop

        self._host.check()
        return ToolLoop(ask, messages, tools_, max_rounds)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template; None if it has none."""
        return None if self._front.chat is None else self._front.chat.text()

    def render(
        self,
        messages: Messages | str,
        *,
        tools: Sequence[ToolLike] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        reasoning: bool | None = None,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that `chat` makes of these messages, special tokens included."""
        from rekindle._src.calls.chat_prompt import chat_prompt, messages_of
        from rekindle._src.calls.tool_functions import tools_of

        prompt = chat_prompt(
            self._front.chat,
            of_messages(self._front, messages_of(messages))[0],
            model=self._front.model,
            tools=tools_of(tools),
            documents=documents,
            template=template,
            continue_final_message=continue_final_message,
            reasoning=reasoning,
            reasoning_effort=reasoning_effort,
            template_options=template_options,
        )
        assert prompt.render is not None, "a chat's prompt is rendered"
        return prompt.render()

    def chat_tokens(
        self,
        messages: Messages | str,
        *,
        tools: Sequence[ToolLike] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        reasoning: bool | None = None,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt that `chat` makes of these messages.

        Pictures have theirs by their sizes, which are read from headers: nothing is decoded or encoded.
        """
        messages, content = read_messages(self._front, messages)
        text = self.render(
            messages,
            tools=tools,
            documents=documents,
            template=template,
            continue_final_message=continue_final_message,
            reasoning=reasoning,
            reasoning_effort=reasoning_effort,
            template_options=template_options,
        )
        return [int(token) for token in encoded(self._front, text, content, special=False)]

    def conversation(
        self,
        system: str | None = None,
        *,
        restore: str | os.PathLike[str] | None = None,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoice | None = None,
        run_tools: bool = False,
        max_rounds: int | None = None,
        overflow: Overflow = "drop",
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        reasoning: bool | None = None,
        reasoning_effort: str | None = None,
        reasoning_budget: int | None = None,
        reasoning_budget_message: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Conversation:
        """Make a chat that keeps its messages: `chat = session.conversation()`, then `await chat.say("…")`.

        `system` opens it with a system message; `restore` continues one that `chat.save(path)` wrote. The other options
        work as in `chat`, for every turn. With `tools` and `run_tools` a turn is over when the model has answered;
        calls and results are among `chat.messages`.

        A conversation that outgrows the context goes on without its oldest turns: they stay among `chat.messages`, the
        prompt leaves them out, and `reply.left_out` says so. `chat.pin_turn()` keeps the last turn in every prompt.
        With `overflow="refuse"` a message that has no room raises `PromptTooLong`.
        """
        from rekindle._src.calls.conversation import open_conversation  # chats alone need it
        from rekindle._src.calls.tool_functions import tools_of
        from rekindle._src.calls.tool_loop import resolve_choice

        optional = {
            "tools": tools,
            "tool_choice": tool_choice,
            "run_tools": run_tools or None,
            "max_rounds": max_rounds,
            "overflow": overflow,
            "documents": documents,
            "template": template,
            "reasoning": reasoning,
            "reasoning_effort": reasoning_effort,
            "reasoning_budget": reasoning_budget,
            "reasoning_budget_message": reasoning_budget_message,
            "template_options": template_options,
        }
        resolve_choice(tool_choice, tools_of(tools))  # wrong tools are refused now, not at the first turn
        present = {name: value for name, value in optional.items() if value is not None}
        conversation = open_conversation(self, self._front, system=system, restore=restore, sampling=options, **present)
        self._front.expect_chat()
        return conversation


if not TYPE_CHECKING:  # those who have used OpenAI's client write session.chat.completions.create(…)
    for _name in CHAT:
        setattr(ChatRequests.chat, _name, ForeignParts("session.chat", CHAT))
