"""Detokenize by itself: token events in, text in a mailbox out."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from helpers.fakes import EOS, make_request
from helpers.sessions import byte_tokenizer, rest
from rekindle._src.core.records import Completion, FinishReason, TokenEvent
from rekindle._src.dispatch import detokenize
from rekindle._src.dispatch.backend import Abort, Events, Finish
from rekindle._src.dispatch.capability import Part
from rekindle._src.dispatch.detokenize import OutputState
from rekindle._src.dispatch.threads import Mailbox
from rekindle._src.text.detokenizers import real_detokenizer
from rekindle.errors import RequestAborted, RequestFailed

pytestmark = pytest.mark.anyio


class TestDetokenize:
    def output(self, **sampling: Any) -> OutputState:
        request = make_request("abc", id="r", **sampling)
        return OutputState(request, Mailbox(1), "abc", real_detokenizer(byte_tokenizer())(request.sampling))

    async def run(self, output: OutputState, *events: TokenEvent) -> list[Any]:
        send, receive = anyio.create_memory_object_stream[Events](100)
        feedback, said = anyio.create_memory_object_stream[Any](100)
        self.outputs = {"r": output}
        for event in events:
            send.send_nowait(Events((event,), {"r": 2.0}))
        send.close()
        with anyio.fail_after(60):
            await detokenize.run(receive, feedback, self.outputs)
            return await rest(said)

    def events(self, text: bytes, reason: FinishReason | None = FinishReason.LENGTH) -> list[TokenEvent]:
        last = len(text) - 1
        return [
            TokenEvent("r", (byte,), cached_tokens=2, finish_reason=reason if i == last else None)
            for i, byte in enumerate(text)
        ]

    async def test_deltas_add_up_to_the_completion(self) -> None:
        output = self.output()
        assert await self.run(output, *self.events("né 😀!".encode())) == []
        done = output.mailbox.results[0]
        assert isinstance(done, Completion) and done.text == "né 😀!"
        assert "".join(delta.text for delta in output.mailbox.deltas) == done.text
        assert [t for delta in output.mailbox.deltas for t in delta.token_ids] == list(done.token_ids)
        assert done.usage.cached_tokens == 2 and done.usage.completion_tokens == len("né 😀!".encode())
        assert output.mailbox.deltas[-1].finish_reason is FinishReason.LENGTH
        assert not self.outputs

    async def test_half_a_character_waits_for_its_other_half(self) -> None:
        output = self.output()
        await self.run(output, *self.events("é".encode()[:1], None))
        assert not output.mailbox.deltas

    async def test_the_eos_token_is_no_text(self) -> None:
        output = self.output()
        await self.run(output, *self.events(b"ab", None), TokenEvent("r", (EOS,), finish_reason=FinishReason.EOS))
        done = output.mailbox.results[0]
        assert isinstance(done, Completion) and (done.text, done.token_ids) == ("ab", (97, 98, EOS))

    async def test_a_stop_string_ends_the_request_at_once(self) -> None:
        output = self.output(stop=("xyz",))
        assert await self.run(output, *self.events(b"abxyzcd", None)) == [Finish("r", FinishReason.STOP)]
        done = output.mailbox.results[0]
        assert isinstance(done, Completion)
        assert (done.text, done.finish_reason) == ("ab", FinishReason.STOP)
        assert bytes(done.token_ids) == b"abxyz"
        assert all("x" not in delta.text for delta in output.mailbox.deltas)

    async def test_an_abort_keeps_what_there_was(self) -> None:
        output = self.output(stop=("bcd",))
        await self.run(output, *self.events(b"abc", None), TokenEvent("r", finish_reason=FinishReason.ABORTED))
        assert isinstance(output.mailbox.error, RequestAborted)
        assert "".join(delta.text for delta in output.mailbox.deltas) == "abc"

    @pytest.mark.parametrize("error", [NotADirectoryError(20, "Not a directory"), SystemExit(1)], ids=repr)
    @pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORTED, FinishReason.FAILED])
    async def test_the_outcome_is_there_before_resources_are_closed(
        self, reason: FinishReason, error: BaseException, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whatever closing them raises, nothing but a line in the log comes of it."""
        output, at_close = self.output(), list[Any]()

        class Writing(Part):
            def ending(self, count: int) -> Any:
                raise RuntimeError("can't start new thread")

            def close(self, reason: FinishReason, count: int) -> None:
                at_close.append(output.mailbox.results[0])
                raise error

        output.parts = (Writing(), Writing())
        await self.run(output, *self.events(b"abc", reason))
        assert at_close == [output.mailbox.error] * 2 and not self.outputs
        expected = RequestAborted if reason is FinishReason.ABORTED else RequestFailed
        assert isinstance(output.mailbox.error, expected)
        assert "request r has ended, but not all of it could be closed" in caplog.text

    async def test_undecodable_text_fails_that_request_and_frees_it(self) -> None:
        output = self.output()
        output._detokenizer.push = lambda ids: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        assert await self.run(output, *self.events(b"abc", None)) == [Abort("r")]
        assert isinstance(output.mailbox.error, RequestFailed)
        assert isinstance(output.mailbox.error.__cause__, ZeroDivisionError)
