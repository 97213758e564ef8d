"""Code as for transformers, vLLM, llama-cpp-python, Ollama or OpenAI's client is answered with what to write here."""

from __future__ import annotations

import ast
import asyncio
import copy
import inspect
import json
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers.small import TINY
from rekindle import Capture, EngineConfig, Session
from rekindle._src.calls.conversation import Conversation
from rekindle._src.calls.embedding import EMBEDS, say_untrained
from rekindle._src.calls.handle import Completions
from rekindle._src.core import cell_errors
from rekindle._src.core.foreign_calls import (
    CLASS,
    COMPLETION,
    COMPLETIONS,
    CONFIG,
    CONVERSATION,
    DELTA,
    MESSAGE,
    MODEL_NAME,
    MODULE,
    SESSION,
    TOKENIZER,
)
from rekindle._src.core.foreign_names import OPEN as OPENING
from rekindle._src.core.foreign_names import SAMPLING as OPTIONS
from rekindle._src.core.records import TextDelta
from rekindle._src.models.registry import config_from_hf
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

OPEN, DONE, FIRST = "session = await rekindle.open(", "Write done.text", "Pass the prompt first and without a name"
CHAT, SAMPLING, DEVICE = "reply = await session.chat(messages)", "rekindle.Sampling", "JAX's default device"
TRAIN, ADAPTER, PADDED = "logits, params = session.trainable()", "await session.load_adapter(", "nothing is padded"
LANGCHAIN = 'ChatOpenAI(base_url=server.url + "/v1"'
SAY = "reply = await chat.say(text)"
TUNE = 'await session.tune("mine", data, rank=8)'
NAME = "rekindle: session.model is the model's name."
ROLE = "[{'role': 'user', 'content': 'hi'}]"
# What is written, and words of the answer that say what to write here.
CELLS: dict[str, dict[str, str]] = {
    "transformers": {
        "rekindle.load('tiny')": OPEN,
        "rekindle.from_pretrained('tiny')": OPEN,
        "rekindle.AutoModel.from_pretrained('tiny')": OPEN,
        "rekindle.AutoModelForCausalLM.from_pretrained('tiny')": OPEN,
        "rekindle.LlamaForCausalLM": OPEN,
        "rekindle.AutoTokenizer.from_pretrained('tiny')": "session.tokenizer, which has encode(text)",
        "rekindle.AutoProcessor": "images=[picture]",
        "rekindle.pipeline('text-generation', 'tiny')": "await session.generate(prompt)",
        "rekindle.GenerationConfig(max_new_tokens=3)": SAMPLING,
        "from rekindle import AutoModelForCausalLM, AutoTokenizer": OPEN,
        "from rekindle import pipeline": OPEN,
        "rekindle.TextStreamer": "async for delta in session.stream(prompt)",
        "rekindle.models.from_pretrained('tiny')": "rekindle.models.load(folder)",
        "rekindle.open('tiny', torch_dtype='float16')": "Use dtype with the same value",
        "rekindle.open('tiny', device_map='auto')": DEVICE,
        "rekindle.open('tiny', load_in_4bit=True)": "quantize='int4'",
        "rekindle.open('tiny', trust_remote_code=True)": "Leave it out",
        "rekindle.open('tiny', tokenizer='tiny')": "as session.tokenizer",
        "rekindle.open('tiny', revision='main')": "snapshot_download(hub_id, revision=…)",
        "rekindle.open('tiny', token='hf_x')": "HF_TOKEN",
        "session('hi')": "done = await session.generate(prompt)",
        "session.tokenizer('hi')": "ids = session.tokenizer.encode(text)",
        "session.tokenizer.encode('hi', return_tensors='pt')": "np.asarray(ids)",
        f"session.tokenizer.apply_chat_template({ROLE})": "session.render(messages)",
        "session.tokenizer.decode(await session.generate('hi', max_tokens=2))": DONE,
        "session.tokenizer.decode(await session.generate(['hi'], max_tokens=2))": "[done.text for done in completions]",
        "session.tokenizer.decode([[5, 6]])": "session.tokenizer.decode(ids) for ids in",
        "session.tokenizer.decode(5)": "session.tokenizer.decode([id])",
        "session.tokenizer.decode('hi')": "such as done.token_ids",
        "session.tokenizer.encode(['hi', 'you'])": "session.tokenizer.encode(text) for text in texts",
        "session.tokenizer.batch_decode([[5, 6]])": "session.tokenizer.decode(ids) for ids in",
        "session.tokenizer.convert_ids_to_tokens([5])": "session.tokenizer.token(id)",
        "session.tokenizer.eos_token_id": "session.tokenizer.eos_ids",
        "session.tokenizer.pad_token_id": PADDED,
        "session.tokenizer.get_vocab()": "session.tokenizer.backend.get_vocab()",
        "await session.generate(input_ids=[5, 6])": FIRST,
        "await session.generate(**{'input_ids': [5, 6], 'attention_mask': [1, 1]})": FIRST,
        "await session.generate({'input_ids': [5, 6], 'attention_mask': [1, 1]})": "inputs['input_ids']",
        "await session.generate('hi', max_new_tokens=4)": "Use max_tokens",
        "await session.generate('hi', do_sample=True)": "temperature=0",
        "await session.generate('hi', num_beams=4)": "Beam search is not implemented",
        "await session.generate('hi', streamer=print)": "async for delta in session.stream(prompt)",
        "await session.generate('hi', output_hidden_states=True)": 'capture={"residual": "all"}',
        "await session.generate('hi', output_attentions=True)": "session.view.attention(prompt)",
        "await session.generate('hi', output_scores=True)": "logprobs=5",
        "await session.generate('hi', return_dict_in_generate=True)": "Leave it out",
        "await session.generate('hi', attention_mask=[1])": PADDED,
        "await session.generate('hi', generation_config={'max_new_tokens': 3})": SAMPLING,
        "(await session.generate('hi', max_tokens=2))[0]['generated_text']": DONE,
        "(await session.generate('hi', max_tokens=2)).generated_text": DONE,
        "session.to('cuda')": DEVICE,
        "session.device": DEVICE,
        "session.eval()": "Leave it out",
        "session.forward('hi')": "capture=",
        "session.state_dict()": TRAIN,
        "session.save_pretrained('x')": "rekindle.models.export(model, folder)",
        "session.generation_config": "session.sampling",
        "session.encode('hi')": "session.tokenizer.encode(text)",
    },
    "vllm": {
        "from rekindle import LLM, SamplingParams": OPEN,
        "rekindle.LLM('tiny')": OPEN,
        "rekindle.LLM(model='tiny').generate('hi')": OPEN,
        "rekindle.SamplingParams(temperature=0.8)": "rekindle.Sampling(temperature=0.8)",
        "rekindle.AsyncLLMEngine.from_engine_args(None)": OPEN,
        "rekindle.LoRARequest('x', 1, 'y')": ADAPTER,
        "rekindle.open('tiny', gpu_memory_utilization=0.9)": "device_memory",
        "rekindle.open('tiny', tensor_parallel_size=2)": "Use mesh",
        "rekindle.open('tiny', enforce_eager=True)": "precompile='lazy'",
        "rekindle.open('tiny', max_num_seqs=4)": "Use max_requests",
        "rekindle.open('tiny', served_model_name='x')": "await session.serve(port=8000)",
        "await session.generate(['hi', 'you'], sampling_params=rekindle.Sampling())": "second and without a name",
        "await session.generate('hi', use_tqdm=False)": "open(…, quiet=True)",
        "await session.generate('hi', guided_json={'type': 'object'})": "Use schema",
        "await session.generate('hi', lora_request='x')": "Use adapter",
        "await session.generate(prompts=['hi'])": FIRST,
        "await session.generate(prompt_token_ids=[5, 6])": FIRST,
        "await session.generate({'prompt': 'hi'})": "inputs['prompt']",
        "await session.generate([{'prompt_token_ids': [5]}])": "inputs['prompt_token_ids']",
        "(await session.generate(['hi'], max_tokens=2))[0].outputs[0].text": DONE,
        "session.get_tokenizer()": "Write session.tokenizer",
        "session.reset_prefix_cache()": "await session.cache.clear()",
        "session.shutdown()": "await session.aclose()",
    },
    "llama-cpp-python": {
        "from rekindle import Llama": OPEN,
        "rekindle.Llama(model_path='x.gguf')": OPEN,
        "rekindle.open(model_path='x.gguf')": "as the first argument",
        "rekindle.open('tiny', n_ctx=64)": "Use max_model_len",
        "rekindle.open('tiny', n_gpu_layers=-1)": "Leave it out",
        "rekindle.open('tiny', chat_format='chatml')": "template=…",
        f"session.create_chat_completion({ROLE})": CHAT,
        "session.create_completion('hi')": "await session.generate(prompt)",
        "session.create_embedding('hi')": "await session.embed(texts)",
        "session.tokenize(b'hi')": "session.tokenizer.encode(text)",
        "session.detokenize([5])": "session.tokenizer.decode(ids)",
        "session.reset()": "await session.cache.clear()",
        "await session.generate('hi', echo=True)": "done.prompt",
        "await session.generate('hi', repeat_penalty=1.1)": "Use repetition_penalty",
        "await session.generate('hi', mirostat_mode=2)": "Use mirostat=2",
        "await session.generate('hi', max_tokens=-1)": "Use a number such as 256",
        "(await session.generate('hi', max_tokens=2))['choices'][0]['text']": DONE,
        "for token in session.generate('hi', stream=True): pass": "async for delta in session.stream(prompt)",
        "for token in session.stream('hi'): pass": "async for delta in session.stream(…)",
    },
    "ollama": {
        f"rekindle.chat(model='tiny', messages={ROLE})": OPEN,
        "rekindle.generate(model='tiny', prompt='hi')": OPEN,
        "rekindle.embeddings(model='tiny', prompt='hi')": "await session.embed(texts)",
        "rekindle.list()": "rekindle.local_models()",
        "rekindle.pull('qwen3:0.6b')": "`rekindle pull NAME`",
        "rekindle.Client(host='x')": OPEN,
        "await session.generate('hi', options={'temperature': 0})": "Pass its entries as keywords",
        "await session.generate('hi', format='json')": "Use json=True",
        "await session.generate('hi', keep_alive='5m')": "Leave it out",
        "await session.generate('hi', num_ctx=100)": "max_model_len",
        "await session.generate('hi', num_predict=10)": "Use max_tokens",
        "await session.generate('hi', system='You are a pirate')": "{'role': 'system', 'content': …}",
        "(await session.generate('hi', max_tokens=2))['response']": DONE,
        "(await session.generate('hi', max_tokens=2)).response": DONE,
    },
    "openai": {
        "from rekindle import OpenAI": OPEN,
        "rekindle.OpenAI()": 'OpenAI(base_url=server.url + "/v1"',
        "rekindle.ChatCompletion.create(model='tiny', messages=[])": OPEN,
        f"session.chat.completions.create(model='tiny', messages={ROLE})": CHAT,
        "session.completions.create(model='tiny', prompt='hi')": "await session.generate(prompt)",
        "session.responses.create(model='tiny', input='hi')": "await session.generate(prompt)",
        "session.embeddings.create(input='hi')": "await session.embed(texts)",
        f"await session.chat(messages={ROLE})": "first and without a name",
        "await session.chat([{'role': 'user', 'text': 'hi'}])": "Write {'role': 'user', 'content': ...}",
        "await session.chat([{'from': 'human', 'value': 'hi'}])": "Write {'role': 'user', 'content': ...}",
        "await session.chat([{'content': 'hi'}])": "Pass {'role': 'user', 'content': ...}",
        "await session.chat({'role': 'user', 'content': 'hi'})": "[{'role': ..., 'content': ...}]",
        "await session.chat([('user', 'hi')])": "Pass {'role': 'user', 'content': ...}",
        "await session.chat('hi', 'there')": SAMPLING,
        "await session.chat('hi', max_completion_tokens=3)": "Use max_tokens",
        "await session.chat('hi', response_format={'type': 'json_object'})": "json=True",
        "await session.chat('hi', stream=True)": "or in session.chat(messages)",
        "await session.chat('hi', functions=[])": "tools=[…]",
        "await session.chat('hi', history=[])": "session.conversation()",
        "await session.chat('hi', image='x.png')": "images=…",
        "(await session.chat('hi', max_tokens=2)).choices[0].message.content": "reply.content of a chat",
        "(await session.chat('hi', max_tokens=2)).message.content": "Write reply.content",
        "(await session.chat('hi', max_tokens=2)).message.tool_calls": "Write reply.tool_calls",
        "await session.generate('hi', top_logprobs=3)": "logprobs=k",
        "await session.generate('hi', user='me')": "salt",
    },
    "langchain": {
        "from rekindle import ChatOpenAI": LANGCHAIN,
        "from rekindle import HuggingFacePipeline": LANGCHAIN,
        "rekindle.init_chat_model('tiny')": LANGCHAIN,
        "rekindle.open('tiny', model_kwargs={})": "Pass its entries as keywords",
        "rekindle.open('tiny', system='Be brief')": "session.conversation(system)",
        "rekindle.HumanMessage('hi')": '{"role": "user", "content": text}',
        "rekindle.tool(print)": "tools=[function]",
        "session.invoke('hi')": "done = await session.generate(prompt)",
        "await session.ainvoke('hi')": "done = await session.generate(prompt)",
        "session.batch(['hi'])": "await session.generate([prompt, prompt])",
        "session.embed_query('hi')": "await session.embed(texts)",
        "session.astream('hi')": "async for delta in session.stream(prompt)",
    },
    "trainers": {
        "session.trainable(lora=8)": TUNE,
        "session.trainable('lora')": TUNE,
        "rekindle.tiny.train_lora(['hi'], rank=8)": TUNE,
        "from rekindle.tiny import train_lora": TUNE,
        "rekindle.LoraConfig(r=8)": TUNE,
        "session.finetune(['hi'])": TUNE,
        "await session.tune('mine', ['hi'], lr=1e-3)": "Use learning_rate with the same value",
        "await session.tune('mine', ['hi'], num_train_epochs=3)": "an epoch is len(data) / batch of them",
        "await session.tune('mine', ['hi'], r=8, lora_alpha=16)": "Use rank with the same value",
        "await session.tune('mine', ['hi'], target_modules='all')": "Use targets with the same value",
        "await session.tune('mine', data=['hi'], output_dir='x')": "await session.save_adapter(",
        "await session.tune('mine', ['hi'], step=3)": "Did you mean 'steps'?",
        "session.train()": TRAIN,
        "session.load_lora('x', 'y')": ADAPTER,
        "await session.rollout(['hi'], num_generations=4)": "Use n with the same value",
        "await session.rollout(['hi'], max_completion_length=4)": "Use max_tokens",
    },
    "cells": {
        "session.generate('hi').text": "Write done = await session.generate(…)",
        "session.generate('hi') + '!'": "write done = await session.generate(…) and done.text",
        "'Answer: ' + session.chat('hi')": "write done = await session.chat(…) and done.text",
        "session.chat('hi')['content']": "write done = await session.chat(…)",
        "len(session.generate(['a', 'b']))": "write done = await session.generate([…])",
        "for done in session.generate(['a', 'b']): pass": "write done = await session.generate([…])",
        "rekindle.open('tiny').generate('hi')": OPEN,
        "rekindle.Session('tiny')": OPEN,
        "rekindle.complete('hi')": "done = await session.generate(prompt)",
        "rekindle.login()": "HF_TOKEN",
        "rekindle.ps()": "rekindle.local_models()",
        "rekindle.set_seed(3)": "Pass seed=",
        "rekindle.BitsAndBytesConfig(load_in_4bit=True)": 'quantize="int4"',
        "rekindle.StoppingCriteria": "until=function",
        "rekindle.version": "rekindle.__version__",
        "session.generates('hi')": "Did you mean generate?",
        "session.tokenizer.encodes('hi')": "Did you mean encode?",
        "rekindle.opens('tiny')": "Did you mean open?",
        "from rekindle import opens": "Did you mean open?",
        "from rekindle import generate": "it is a session's. Write session = await rekindle.open(…)",
        "await session.map('hi', '{text}')": "a list of dicts",
        "await session.generate()": "Pass a text such as",
        "await session.generate(5)": "Pass a text such as",
        "rekindle.Session.from_pretrained('tiny')": OPEN,
        "rekindle.Session.open('tiny')": OPEN,
        "await session.load_adapter('mine')": "await session.load_adapter('mine', folder)",
        "await session.load_adapter('user/lora')": "await session.load_adapter(\"mine\", 'user/lora')",
        "await session.load_adapter(source={})": 'await session.load_adapter("mine", source)',
        "await session.chat_sync('hi')": "session.chat(messages).result_sync()",
        "'A: ' + (await session.generate('hi', max_tokens=2))": DONE,
        "(await session.generate('hi', max_tokens=2)) + '!'": DONE,
        "(await session.generate('hi', max_tokens=2)).strip()": "Write done.text.strip(",
        "[d + '!' async for d in session.stream('hi', max_tokens=2)]": "Write delta.text",
        "[d['response'] async for d in session.stream('hi', max_tokens=2)]": "Write delta.text",
        "[d.choices[0].delta.content async for d in session.stream('hi', max_tokens=2)]": "Write delta.text",
        "[d.strip() async for d in session.chat('hi', max_tokens=2)]": "Write delta.text.strip(",
        "session.conversation()('hi')": SAY,
        "session.start_chat()": "chat = session.conversation()",
        "session.count_tokens('hi')": "len(session.tokenizer.encode(text))",
        "session.max_model_len": "session.config.max_model_len",
        "session.quantize('int4')": 'quantize="int4"',
        "session.tokenizer.from_pretrained('tiny')": OPEN,
        "rekindle.models.list()": "rekindle.local_models()",
        "(await session.generate('hi', max_tokens=2)).usage['prompt_tokens']": "Write done.usage.prompt_tokens",
        "await session.conversation().send('hi')": SAY,
        "session.conversation().append({'role': 'user', 'content': 'hi'})": "session.conversation(messages)",
        "len(await session.generate('hi', max_tokens=2))": "Write len(done.text)",
        "(await session.generate(['hi', 'ho'], max_tokens=2)).text": "[done.text for done in results]",
        "(await session.generate('hi', n=2, max_tokens=2)).outputs": "[done.text for done in results]",
        "session.config.max_position_embeddings": "session.config.max_model_len",
        "session.config.num_hidden_layers": "rekindle.models.load(session.model).config",
        "session.config.vocab_size": "session.tokenizer.vocab_size",
        "session.config.page_sizes": "Did you mean page_size?",
        "await session.embed()": "Pass a text such as",
        "await session.score()": "Pass a text such as",
        "session.pin()": "Pass a text such as",
    },
}
EVERY = [pytest.param(cell, words, id=f"{source}: {cell}") for source in CELLS for cell, words in CELLS[source].items()]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync("tiny", **TINY) as made:
        yield made


def run(cell: str, session: Session) -> None:
    """Run a cell as a notebook does, where it may contain `await`."""
    names = {"rekindle": rekindle, "session": session, "np": np}
    result = eval(compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)

    async def ended() -> None:
        if inspect.isawaitable(result):
            await result

    asyncio.run(ended())


def test_there_are_enough_of_them() -> None:
    assert len(EVERY) >= 68 and len(CELLS) == 8


@pytest.mark.parametrize(("cell", "words"), EVERY)
def test_the_answer_says_what_to_write(cell: str, words: str, session: Session) -> None:
    with pytest.raises(Exception) as caught:
        run(cell, session)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_exist_are_in_no_table(session: Session) -> None:
    done = session.generate_sync("hi", max_tokens=1)
    tables = (MODULE, rekindle), (SESSION, Session), (TOKENIZER, Tokenizer), (COMPLETION, type(done)), (MESSAGE, dict)
    tables += (DELTA, TextDelta), (CONVERSATION, Conversation), (COMPLETIONS, Completions), (MODEL_NAME, str)
    tables += ((CONFIG, EngineConfig),)
    for table, owner in (*tables, (CLASS, Session)):
        assert not [name for name in table if name in dir(owner)]
        assert all(fix[0].isupper() and not fix.endswith(".") for fix in table.values())


def test_captures_that_are_advised_can_be_made() -> None:
    advice = [*SESSION.values(), *COMPLETION.values(), *(hint.fix for hint in (*OPTIONS.values(), *OPENING.values()))]
    advised = [found for fix in advice for found in re.findall(r"capture=({[^}]*})", fix)]
    assert len(advised) > 3
    for found in advised:
        Capture(ast.literal_eval(found))


def test_tools_that_probe_an_object_learn_nothing_else(session: Session) -> None:
    """Notebooks and array libraries ask for names of their own, which no object may seem to have."""
    done = session.generate_sync("hi", max_tokens=1)
    for one in (session, session.tokenizer, done, done.message, Session):
        for name in ("_ipython_display_", "__array__", "_repr_png_", "dtype", "shape", "columns", "to_numpy"):
            assert not hasattr(one, name)
        with pytest.raises(AttributeError, match=r"has no attribute '_x'$"):
            getattr(one, "_x")  # noqa: B009
    assert np.array([done], object)[0] is done


def test_a_property_that_fails_keeps_its_own_error() -> None:
    class Failing(Tokenizer):
        @property
        def broken(self) -> Any:
            return self._nothing_there

    with pytest.raises(AttributeError, match="_nothing_there"):
        Failing(None).broken  # noqa: B018


def test_a_completion_is_true_and_its_list_a_list(session: Session) -> None:
    results = session.generate_sync(["hi", "ho"], max_tokens=2)
    done = results[0]
    assert done and bool(done) and [one for one in results if one] == results
    assert len(results) == 2 and isinstance(results, list) and pickle.loads(pickle.dumps(results))[0].text == done.text
    assert np.array([done, done], object).shape == (2,)
    with pytest.raises(TypeError):
        list(done)


def test_sizes_that_are_advised_are_there() -> None:
    config = rekindle.models.load("tiny").config
    assert config.num_layers > 0 and config.hidden_size > 0 and config.vocab_size > 0


def test_a_reply_as_a_message_is_a_dict(session: Session) -> None:
    message = session.chat("hi", max_tokens=2).result_sync().message
    plain = {"role": "assistant", "content": message["content"]}
    assert message == plain and json.dumps(message) == json.dumps(plain) and repr(message) == repr(plain)
    for copied in (pickle.loads(pickle.dumps(message)), copy.deepcopy(message), copy.copy(message)):
        assert copied == plain and isinstance(copied, dict)
    asked = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "more"}]
    assert session.render(asked) == session.render([asked[0], plain, asked[2]])


def test_a_line_after_a_cell_corrects_what_python_refuses(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    cells = {
        "import asyncio, rekindle\nasyncio.run(rekindle.open('tiny'))": cell_errors.HINT,
        "asyncio.get_running_loop().run_until_complete(rekindle.open('tiny'))": cell_errors.HINT,
        "raise RuntimeError('something else')": "",
        "1 + 1": "",
        "import rekindle\nsession = await rekindle.open_sync('tiny', precompile='lazy')": cell_errors.SYNC,
        "open_sync = 3\nawait open_sync": "",
        "class A:\n    def generate(self): pass\n(await A().generate)('hi')": cell_errors.CALLED,
        "class A:\n    def other(self): pass\n(await A().other)('hi')": "",
        "rekindle('hi')": cell_errors.MODULE_CALLED,
        "import math\nmath('hi')": "",
        "import json\ndone = session.generate_sync('hi', max_tokens=2)\njson.loads(done)": cell_errors.JSON,
        "json.loads(session)": "",
        "done.text()": cell_errors.TEXT_CALLED,
        "'hi'()": "",
        "done.content[0].text": cell_errors.TEXT_PARTS,
        "done.text.nothing": cell_errors.TEXT_PARTS,
        "'hi'.text": "",
        "import rekindle.llm": f"rekindle: no module is named rekindle.llm. {MODULE['LLM']}",
        "from rekindle.nobody.nothing import LLM": f"rekindle: no module is named rekindle.nobody. {MODULE['LLM']}",
        "import nothing_like_this": "",
        "from rekindle.models import nothing": "",
        "session.model.config.num_hidden_layers": f"{NAME} {MODEL_NAME['config']}",
        "session.model.layers[0]": f"{NAME} {MODEL_NAME['layers']}",
        "session.model.generate('hi')": f"{NAME} {MODEL_NAME['generate']}",
        "session.model('hi')": f"{NAME} {MODEL_NAME['generate']}",
        "session.model.nothing": "",
    }
    _check_cells(shell, {"session": session}, cells, capsys)


def _check_cells(shell: Any, names: dict[str, Any], cells: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Run cells as the kernel does, and compare the line after each."""
    shell.push(names)
    for cell, explained in cells.items():
        result = asyncio.run(shell.run_cell_async(cell, transformed_cell=cell))
        shell.events.trigger("post_run_cell", result)
        printed = capsys.readouterr()
        hints = [line for line in printed.err.splitlines() if line.startswith("rekindle: ")]
        assert hints == [explained] * bool(explained), cell
        assert "Error in callback" not in printed.out + printed.err, cell


FOREIGN = """
import types
class Soup:
    text = content = reasoning = model = "a text"
class Loud:
    reads = []
    def __getattr__(self, name): self.reads.append(name); return self
    @property
    def text(self): self.reads.append("text"); return "a text"
    @property
    def __class__(self): self.reads.append("class"); return type(self)
class Broken(Exception):
    def __str__(self): raise ValueError("no text")
class BrokenType(TypeError):
    def __str__(self): raise ValueError("no text")
class BrokenText:
    def __str__(self): raise ValueError("no text")
class Completion: pass
class Owner:
    def __init__(self, session): self.session, self.model = session, "tiny"
    def call(self): return self.model("hi")
    def move(self): return self.session.model.to("cuda")
soup, loud, args, owner, module = Soup(), Loud(), types.SimpleNamespace(model="tiny"), Owner(session), types
def local(session):
    reply = session.generate_sync("hi", max_tokens=1)
    return reply.text()
"""


def test_a_line_after_a_cell_is_about_objects_of_this_package_alone(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    cell_errors.explain_cell_errors()
    done = session.generate_sync("hi", max_tokens=1)
    device = f"{NAME} {MODEL_NAME['to']}"
    foreign = (
        "soup.text()", "soup.text.find_al()", "soup.content[0].text", "soup.model('hi')", "args.model.to('cuda')",
        "args.model('hi')", "owner.call()", "owner.model.to('cuda')", "def f(): return self.model('hi')\n'hi'()",
        "(session.model, soup.text())", "done.text; soup.text.find_al()", "loud.text()", "loud.other.text()",
        "import json\njson.loads(Completion())", "reply = {'done': soup}\nreply['done'].text()",
        "'rekindle('; module('hi')", "import rekindle\n'rekindle('; module('hi')", "raise Broken", "raise BrokenType",
        "raise TypeError(BrokenText())", "raise RuntimeError(BrokenText())",
        "raise ImportError(name=BrokenText())", "def open_sync(): pass\nawait open_sync()",
        "raise AttributeError('x', obj='hi', name='to')",
    )  # fmt: skip
    cells = {
        FOREIGN: "",
        **dict.fromkeys(foreign, ""),
        "session.model.to('cuda')": device,
        "owner.session.model.to('cuda')": device,
        "owner.move()": device,
        "local(session)": cell_errors.TEXT_CALLED,
        "'é'; done.text()": cell_errors.TEXT_CALLED,
        "done.text(\n    1,\n)": cell_errors.TEXT_CALLED,
        "[done][0].text()": "",
        "(await session.generate('hi', max_tokens=1)).text()": cell_errors.TEXT_CALLED,
        "session.generate_sync(['hi', 'ho'], max_tokens=1)[0].text.nothing": cell_errors.TEXT_PARTS,
        "import rekindle as kindled\nkindled('hi')": cell_errors.MODULE_CALLED,
        "from rekindle import open_sync\nawait open_sync('tiny', precompile='lazy')": cell_errors.SYNC,
        "await session.generate_sync('hi', max_tokens=1)": cell_errors.SYNC,
    }
    _check_cells(shell, {"session": session, "done": done}, cells, capsys)
    assert shell.user_ns["loud"].reads == ["text", "other", "text"], "by the cell itself"


def test_a_chat_model_names_a_model_that_embeds_and_opens(caplog: pytest.LogCaptureFixture) -> None:
    say_untrained.__wrapped__("a model")
    assert f'such as "{EMBEDS}"' in caplog.text and "embed" in EMBEDS.lower()
    assert config_from_hf(QWEN3_EMBEDDING).model_type == "qwen3"
    with pytest.raises(ValueError, match="bert"):
        config_from_hf({**QWEN3_EMBEDDING, "model_type": "bert", "architectures": ["BertModel"]})


# The config.json of Qwen/Qwen3-Embedding-0.6B.
QWEN3_EMBEDDING: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "bos_token_id": 151643,
    "eos_token_id": 151643, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 32768, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151669,
}  # fmt: skip


def test_options_of_a_chat_keep_their_checks(session: Session) -> None:
    with pytest.raises(InvalidRequest, match=r"images=.*Open a model that reads pictures, such as \"tiny-vision\""):
        session.chat("What is this?", images=[np.zeros((4, 4, 3), np.uint8)])
