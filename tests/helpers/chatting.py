"""Sessions with a model that says a test's script, through chat templates that show tools and reasoning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import tokenizers

from helpers.fakes import KV, FakeModel
from helpers.sessions import CONFIG, byte_tokenizer, parts, wait_until_idle
from rekindle._src.core.sampling import Sampling
from rekindle._src.session.session import Session
from rekindle._src.text.backends import WholeTokenizer
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.tokenizer import Tokenizer

# A template in the manner of Qwen's, in our own words.
HERMES = (
    "{%- if tools %}{{ '<|system|>Call tools inside <tool_call></tool_call>.\n' }}"
    "{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{% endif %}"
    "{%- for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{%- if m.reasoning_content is defined %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{- m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}{{ '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}"
    "{% endfor %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
OPENED = (
    HERMES.removesuffix("{% endif %}")
    + "{% if enable_thinking is not defined %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
MISTRAL = (
    "{%- if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- for call in m.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('an id has 9 characters') }}"
    "{% endif %}{{ '[TOOL_CALLS]' }}{{ call | tojson }}{% endfor %}"
    "{{- '[' + m.role + ']' }}{{ m.content or '' }}{% endfor %}"
)
Script = Callable[[str], str]


@dataclasses.dataclass(frozen=True)
class ScriptedModel(FakeModel):
    """Says what `script` returns for the prompt, then ends; the tokens are in the low bits of the KV values."""

    script: Script = str
    tokenizer: Tokenizer = dataclasses.field(default_factory=byte_tokenizer)

    def extend(self, before: KV, tokens: Sequence[int]) -> KV:  # type: ignore[override]
        values = before
        for token in tokens:
            values = np.concatenate([values, super().extend(values, [token]) & ~np.uint64(0xFFFF) | np.uint64(token)])
        return values[len(before) :]

    def choose(
        self, values: KV, sampling: Sampling, generated: int, forbidden: frozenset[int],
        allowed: Collection[int] | None = None,
    ) -> int:  # fmt: skip
        tokens = [int(value) & 0xFFFF for value in values]
        prompt = self.tokenizer.decode(tokens[: len(tokens) - generated], skip_special_tokens=False)
        said = self.tokenizer.encode(self.script(prompt), add_special_tokens=False)
        return said[generated] if generated < len(said) else self.eos_id


def with_special_tokens(*texts: str) -> Tokenizer:
    """The tokenizer of bytes, with these texts as special tokens."""
    backend = WholeTokenizer(byte_tokenizer().definition())
    backend.add([tokenizers.AddedToken(text, special=True) for text in texts])
    return Tokenizer(backend, eos_ids=byte_tokenizer().eos_ids)


@contextmanager
def saying(
    script: Script | str, template: str | ChatTemplate = HERMES, *, tokenizer: Tokenizer | None = None
) -> Iterator[Session]:
    """Open a session with a model that answers each prompt with `script(prompt)`; it has to be whole afterwards."""
    tokenizer = tokenizer if tokenizer is not None else byte_tokenizer()
    config = dataclasses.replace(CONFIG, max_model_len=4096, max_tokens_per_step=512)
    answer = (lambda prompt: script) if isinstance(script, str) else script
    scheduler, runner = parts(config, num_pages=2048, model=ScriptedModel(script=answer, tokenizer=tokenizer))
    chat = template if isinstance(template, ChatTemplate) else ChatTemplate(template)
    session = Session(scheduler, runner, tokenizer, config, chat=chat, model="scripted")
    try:
        yield session
        wait_until_idle(session)
    finally:
        session.close()
