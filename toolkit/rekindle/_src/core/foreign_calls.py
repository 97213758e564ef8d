"""Names of functions, classes and attributes in other libraries, and what to write in their place.

The names are those of transformers, vLLM, llama-cpp-python, and the clients of Ollama and OpenAI; those of options are
in `foreign_names`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, NoReturn

_OPEN = 'Write session = await rekindle.open(model), with a folder, a GGUF file, a hub id or "tiny" as the model'
_PROMPT = f"{_OPEN}; then await session.generate(prompt), session.chat(messages) or session.embed(texts)"
_CLIENT = (
    f"{_OPEN}; then await session.chat(messages). OpenAI's own client takes a server's address: "
    'server = await session.serve(), and OpenAI(base_url=server.url + "/v1", api_key="-")'
)
_LANGCHAIN = (
    f"{_OPEN}. LangChain's own ChatOpenAI takes a server's address: server = await session.serve(), and "
    'ChatOpenAI(base_url=server.url + "/v1", api_key="-")'
)
_SAMPLING = "Write rekindle.Sampling(temperature=0.8), or pass the same keywords to the call"
_ADAPTER = 'Write await session.load_adapter("mine", folder), and adapter="mine" in calls'
_TUNE = 'Write await session.tune("mine", data, rank=8) for an adapter, and adapter="mine" in calls'
_TRAIN = f"{_TUNE}; logits, params = session.trainable() for a loss of your own over all weights"
_TOKENIZER = "Write session.tokenizer, which has encode(text) and decode(ids)"
MODULE: dict[str, str] = {
    **dict.fromkeys(
        ("load", "load_model", "from_pretrained", "LLM", "AsyncLLM", "LLMEngine", "AsyncLLMEngine", "Engine", "Llama",
         "Model", "model", "init", "create", "PeftModel", "EngineArgs", "AsyncEngineArgs", "Ollama", "llm", "connect"),
        _OPEN),
    **dict.fromkeys(("pipeline", "Pipeline", "TextGenerationPipeline", "run"), _PROMPT),
    **dict.fromkeys(("OpenAI", "AsyncOpenAI", "Client", "AsyncClient", "ChatCompletion", "client"), _CLIENT),
    **dict.fromkeys(
        ("ChatOpenAI", "ChatOllama", "OllamaLLM", "LlamaCpp", "ChatLlamaCpp", "HuggingFacePipeline", "ChatHuggingFace",
         "HuggingFaceEndpoint", "VLLM", "init_chat_model", "llms"), _LANGCHAIN),
    **dict.fromkeys(("SamplingParams", "GenerationConfig"), _SAMPLING),
    **dict.fromkeys(
        ("list", "ls", "list_models", "models_list", "show", "ps", "tags"),
        "Write rekindle.local_models(), or `rekindle ls`"),
    **dict.fromkeys(
        ("pull", "download", "snapshot_download"),
        "Write `rekindle pull NAME` in a terminal; rekindle.open(hub_id) downloads it, too"),
    "LoRARequest": _ADAPTER,
    **dict.fromkeys(("LoraConfig", "get_peft_model", "train_lora"), f"{_OPEN}. {_TUNE}"),
    **dict.fromkeys(("Trainer", "SFTTrainer", "GRPOTrainer"), f"{_TRAIN}; rekindle.trl and rekindle.tunix have more"),
    **dict.fromkeys(
        ("TextStreamer", "TextIteratorStreamer"), "Write async for delta in session.stream(prompt): print(delta.text)"),
    "RequestOutput": "The result of await session.generate(prompt) is a rekindle.Completion, with done.text",
    "embeddings": "Write session = await rekindle.open(…), then await session.embed(texts)",
    **dict.fromkeys(("login", "notebook_login"), "Set HF_TOKEN, or run `hf auth login`: rekindle.open(hub_id) uses it"),
    **dict.fromkeys(
        ("BitsAndBytesConfig", "GPTQConfig", "QuantoConfig", "AwqConfig"),
        'Write session = await rekindle.open(model, quantize="int4")'),
    **dict.fromkeys(("TrainingArguments", "SFTConfig", "GRPOConfig", "DPOConfig"), f"{_OPEN}. {_TUNE}"),
    **dict.fromkeys(
        ("StoppingCriteria", "StoppingCriteriaList"),
        "Pass stop=[…] or until=function to await session.generate(prompt)"),
    **dict.fromkeys(("set_seed", "manual_seed", "seed"), "Pass seed=… to rekindle.open or to a call"),
    **dict.fromkeys(
        ("HumanMessage", "SystemMessage", "AIMessage", "Message", "ChatMessage", "ChatPromptTemplate"),
        'Write {"role": "user", "content": text}, or "system" or "assistant" as the role'),
    **dict.fromkeys(
        ("tool", "Tool", "Agent", "agent", "function_tool"),
        "Pass functions: await session.chat(messages, tools=[function])"),
    **dict.fromkeys(("no_grad", "inference_mode"), "Leave it out: nothing keeps gradients unless it is asked to"),
    **dict.fromkeys(("server", "api", "app"), "Write server = await session.serve(port=8000)"),
    "version": "Write rekindle.__version__",
}  # fmt: skip
TINY: dict[str, str] = {"train_lora": f'{_TUNE}, with session = await rekindle.open("tiny")'}
_LOAD = "Write rekindle.models.load(folder), or session = await rekindle.open(folder) to generate"
MODELS: dict[str, str] = dict.fromkeys(
    ("from_pretrained", "open", "read", "AutoModel", "AutoModelForCausalLM", "load_model", "get"), _LOAD
) | dict.fromkeys(("list", "retrieve"), "Write rekindle.local_models(), or `rekindle ls`")
_CLASSES = (
    (("Tokenizer", "TokenizerFast"), _TOKENIZER),
    (("Processor", "FeatureExtractor"), "Pass pictures as they are: await session.generate(prompt, images=[picture])"),
    (("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"), _OPEN),
)

_DEVICE = "Leave it out: the model is on JAX's default device; JAX_PLATFORMS or jax.default_device chooses another"
_GENERATE = "Write done = await session.generate(prompt), and done.text"
_CHAT = "Write reply = await session.chat(messages), and reply.content"
_EMBED = "Write await session.embed(texts)"
_STREAM = "Write async for delta in session.stream(prompt), and delta.text"
_CLOSE = "Write await session.aclose(), or session.close() without an event loop"
_CLEAR = "Write await session.cache.clear()"
_ENCODE = "Write session.tokenizer.encode(text)"
_CAPTURE = 'Write done = await session.generate(prompt, capture={"residual": "all"}), and done.captured'
SESSION: dict[str, str] = {
    **dict.fromkeys(("to", "cuda", "cpu", "device", "half", "float", "bfloat16"), _DEVICE),
    **dict.fromkeys(("eval", "compile", "warmup"), "Leave it out: a session is ready when it is open"),
    **dict.fromkeys(("train", "fit", "parameters", "named_parameters", "state_dict", "finetune"), _TRAIN),
    **dict.fromkeys(("load_state_dict", "update_weights"), "Write await session.swap_weights(arrays)"),
    **dict.fromkeys(("forward", "logits"), f"{_CAPTURE}; session.trainable() has the logits as a function"),
    "hidden_states": _CAPTURE,
    **dict.fromkeys(
        ("save_pretrained", "push_to_hub"), "Write rekindle.models.export(model, folder), or `rekindle export`"),
    "generation_config": "Write session.sampling, or session.chat_sampling for chats",
    **dict.fromkeys(("encode", "tokenize"), f"{_ENCODE} for ids, or await session.embed(text) for a vector"),
    **dict.fromkeys(("decode", "detokenize", "batch_decode"), "Write session.tokenizer.decode(ids)"),
    **dict.fromkeys(("get_tokenizer", "processor"), _TOKENIZER),
    **dict.fromkeys(
        ("completions", "responses", "create_completion", "complete", "completion", "predict", "invoke", "ainvoke",
         "generate_text", "text_completion", "ask", "run", "prompt", "query"), _GENERATE),
    **dict.fromkeys(
        ("create_chat_completion", "chat_completion", "chat_completions", "messages", "create"), _CHAT),
    **dict.fromkeys(("embeddings", "create_embedding", "embedding", "embed_documents", "embed_query"), _EMBED),
    **dict.fromkeys(("generate_stream", "stream_generate", "astream", "iter"), _STREAM),
    **dict.fromkeys(("stream_chat", "chat_stream"), "Write async for delta in session.chat(messages), and delta.text"),
    **dict.fromkeys(("batch", "generate_batch", "batch_generate"), "Write await session.generate([prompt, prompt])"),
    **dict.fromkeys(
        ("load_lora", "load_lora_adapter", "load_lora_weights", "add_lora", "add_adapter", "set_adapter"), _ADAPTER),
    **dict.fromkeys(("disable_adapter", "disable_adapters"), "Leave adapter=… out of a call for the model itself"),
    **dict.fromkeys(("start_profile", "stop_profile"), "Write with session.profile(folder): around what you measure"),
    **dict.fromkeys(("reset", "reset_prefix_cache", "clear_cache", "empty_cache", "flush_cache"), _CLEAR),
    **dict.fromkeys(("unload", "shutdown", "stop", "exit", "quit", "terminate", "release"), _CLOSE),
    **dict.fromkeys(("launch", "run_server", "start_server"), "Write server = await session.serve(port=8000)"),
    "quantize": 'Write session = await rekindle.open(model, quantize="int4")',
    **dict.fromkeys(
        ("start_chat", "create_chat_session", "chat_session", "new_chat"),
        "Write chat = session.conversation(), and await chat.say(text)"),
    **dict.fromkeys(("count_tokens", "get_num_tokens"), "Write len(session.tokenizer.encode(text))"),
    **dict.fromkeys(("n_ctx", "max_length", "context_length", "max_model_len"), "Write session.config.max_model_len"),
    **dict.fromkeys(("n_vocab", "vocab_size"), "Write session.tokenizer.vocab_size"),
    "history": "Write chat = session.conversation(), await chat.say(text), and chat.messages",
    "wake_up": "Write await session.wake()",
    "chat_sync": "Write reply = session.chat(messages).result_sync()",
}  # fmt: skip
CLASS: dict[str, str] = dict.fromkeys(("from_pretrained", "open", "open_sync", "load", "create", "connect"), _OPEN)
CHAT: dict[str, str] = {"completions": _CHAT, "create": _CHAT, "parse": f"{_CHAT}, or schema=… for reply.parsed"}

_IDS = "Write ids = session.tokenizer.encode(text), a list"
TOKENIZER: dict[str, str] = {
    "apply_chat_template": "Write session.render(messages) for the text, or session.chat_tokens(messages) for ids",
    "batch_decode": "Write [session.tokenizer.decode(ids) for ids in lists]",
    **dict.fromkeys(
        ("batch_encode_plus", "batch_encode", "encode_batch"),
        "Write [session.tokenizer.encode(text) for text in texts]"),
    **dict.fromkeys(("encode_plus", "input_ids"), _IDS),
    "tokenize": "Write [session.tokenizer.token(id) for id in session.tokenizer.encode(text)]",
    "convert_ids_to_tokens": "Write session.tokenizer.token(id)",
    **dict.fromkeys(
        ("convert_tokens_to_ids", "token_to_id"), "Write session.tokenizer.backend.token_to_id(token)"),
    "convert_tokens_to_string": "Write session.tokenizer.decode(ids)",
    **dict.fromkeys(("eos_token_id", "eos_id"), "Write session.tokenizer.eos_ids: there may be several"),
    "bos_token_id": "Write session.tokenizer.bos_id",
    **dict.fromkeys(
        ("eos_token", "bos_token", "unk_token", "special_tokens_map", "all_special_tokens"),
        'Write session.tokenizer.special, a dict such as {"eos_token": "</s>"}'),
    **dict.fromkeys(
        ("pad_token", "pad_token_id", "pad", "padding_side", "truncation_side"),
        "Leave it out: nothing is padded, prompts of any lengths run together"),
    "all_special_ids": "Write session.tokenizer.special_ids",
    **dict.fromkeys(
        ("vocab", "get_vocab"), "Write session.tokenizer.backend.get_vocab(), or session.tokenizer.vocab_size"),
    "chat_template": "Write session.chat_template",
    "from_pretrained": f"{_OPEN}, and session.tokenizer",
    "model_max_length": "Write session.config.max_model_len",
    "save_pretrained": "Write path.write_bytes(session.tokenizer.definition()), a tokenizer.json",
}  # fmt: skip

_TEXT = "Write done.text"
STRINGS = (
    "strip", "lstrip", "rstrip", "split", "splitlines", "lower", "upper", "replace", "startswith", "endswith", "find",
    "join", "encode", "partition", "removeprefix", "removesuffix",
)  # fmt: skip
COMPLETION: dict[str, str] = {
    **dict.fromkeys(
        ("generated_text", "response", "output", "output_text", "result", "answer", "completion", "sequences"), _TEXT),
    "outputs": f"{_TEXT}; with n=… the result is a list of completions",
    "choices": f"{_TEXT}, or reply.content of a chat; with n=… the result is a list of completions",
    **dict.fromkeys(("tokens", "output_ids", "output_token_ids"), "Write done.token_ids, or done.token_texts"),
    **dict.fromkeys(("input_ids", "prompt_ids"), "Write done.prompt_token_ids"),
    **dict.fromkeys(("scores", "cumulative_logprob", "top_logprobs"), "Pass logprobs=5, and write done.logprobs"),
    "hidden_states": 'Pass capture={"residual": "all"}, and write done.captured',
    "logits": 'Pass capture={"logits": -1}, and write done.captured',
    "attentions": "Write await session.view.attention(prompt)",
    **dict.fromkeys(("model_dump", "to_dict", "dict", "json"), "Write dataclasses.asdict(done.usage), or done.text"),
    "think": "Write reply.reasoning",
    "thinking": "Write reply.reasoning",
    **{name: f"Write done.text.{name}(…)" for name in STRINGS},
}  # fmt: skip

_EACH = "It is a list: write [done.text for done in results]"
COMPLETIONS: dict[str, str] = dict.fromkeys(("text", "texts", "content", *COMPLETION), _EACH)

_SIZES = "Write rekindle.models.load(session.model).config for the model's own"
CONFIG: dict[str, str] = {
    **dict.fromkeys(
        ("max_position_embeddings", "n_ctx", "n_positions", "max_length", "context_length", "max_seq_len",
         "max_sequence_length", "model_max_length"), "Write session.config.max_model_len"),
    **dict.fromkeys(("vocab_size", "n_vocab"), "Write session.tokenizer.vocab_size"),
    **dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_layers", "n_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "intermediate_size", "model_type", "architectures", "torch_dtype", "rope_theta", "n_embd",
         "n_layer", "n_head", "d_model"), _SIZES),
    **dict.fromkeys(("eos_token_id", "eos_ids"), "Write session.tokenizer.eos_ids: there may be several"),
    **dict.fromkeys(("temperature", "top_p", "top_k"), "Write session.sampling, or session.chat_sampling for chats"),
}  # fmt: skip
# Names that are read from session.model, which is a str.
MODEL_NAME: dict[str, str] = {
    "config": f"Write session.config for the session's options. {_SIZES}",
    **dict.fromkeys(
        ("layers", "model", "transformer", "embed_tokens", "lm_head", "forward", "register_forward_hook"),
        f"{_CAPTURE}; rekindle.models.load(session.model).graph has the weights' names"),
    **dict.fromkeys(("parameters", "named_parameters", "state_dict", "train"), _TRAIN),
    **dict.fromkeys(("generate", "complete", "create_completion"), _GENERATE),
    **dict.fromkeys(("chat", "create_chat_completion"), _CHAT),
    "tokenizer": _TOKENIZER,
    **dict.fromkeys(("to", "cuda", "cpu", "device", "dtype", "eval", "half"), _DEVICE),
}  # fmt: skip

DELTA: dict[str, str] = {
    **dict.fromkeys(
        ("choices", "delta", "response", "message", "generated_text", "output", "token", "outputs", "chunk"),
        "Write delta.text, or delta.content without a chat's reasoning"),
    "usage": "Write handle = session.generate(prompt), read the stream, then done = await handle and done.usage",
    **{name: f"Write delta.text.{name}(…)" for name in STRINGS},
}  # fmt: skip

_SAY = "Write reply = await chat.say(text), and reply.content"
CONVERSATION: dict[str, str] = {
    **dict.fromkeys(
        ("send", "send_message", "chat", "ask", "invoke", "ainvoke", "predict", "run", "generate", "prompt", "respond",
         "completions", "create"), _SAY),
    **dict.fromkeys(("astream", "stream_chat", "send_stream"), "Write async for delta in chat.stream(text)"),
    **dict.fromkeys(("append", "add", "add_message", "add_user_message", "extend", "history", "get_history", "memory"),
        "Write chat.messages for a copy of them; session.conversation(messages) begins with messages of your own"),
    **dict.fromkeys(("reset", "clear", "restart"), "Write chat = session.conversation() for an empty one"),
    **dict.fromkeys(("response", "last"), 'Write chat.messages[-1]["content"]'),
}  # fmt: skip

MESSAGE: dict[str, str] = {
    "content": 'Write reply.content, or reply.message["content"]',
    "tool_calls": 'Write reply.tool_calls, or reply.message["tool_calls"]',
    "role": 'Write reply.message["role"]',
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "Write reply.reasoning"),
    "parsed": "Write reply.parsed",
    **dict.fromkeys(("model_dump", "to_dict", "dict"), "Leave it out: it is a dict"),
}


def of_module(name: str, known: Iterable[str]) -> str:
    """Suggest a replacement for a name that the module `rekindle` does not have, as the end of a sentence."""
    fix = MODULE.get(name) or next((fix for endings, fix in _CLASSES if name.endswith(endings)), "")
    if not fix and name.startswith("Auto"):
        fix = _OPEN
    if not fix and name in SESSION:
        fix = f"{_OPEN}. {SESSION[name]}"
    return f". {fix}" if fix else _suggestion(name, known, 0.75)


_FROM_IMPORT = ("_handle_fromlist", "importlib._bootstrap")  # asks a package for the names of `from package import`


def of_tiny(name: str) -> str:
    """Suggest a replacement for a name that `rekindle.tiny` does not have, as the end of a sentence."""
    return f". {TINY[name]}" if name in TINY else ""


def unknown(package: str, name: str, hint: str) -> AttributeError | ImportError:
    """Return the error for a name that a package does not have; call it in the package's `__getattr__`.

    Python drops an AttributeError and its text in `from package import name`, but not an ImportError.
    """
    frame = inspect.currentframe()
    asking = frame and frame.f_back and frame.f_back.f_back
    if hint and asking and (asking.f_code.co_name, asking.f_globals.get("__name__")) == _FROM_IMPORT:
        return ImportError(f"cannot import name {name!r} from {package!r}{hint}")
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}")


def of_item(table: Mapping[str, str], name: object, hint: str) -> str:
    """Return the advice about an item of an object that has none; it may be a number or a slice, too."""
    return table.get(name, hint) if isinstance(name, str) else hint


def missing(owner: str, name: str, table: Mapping[str, str], known: Iterable[str]) -> AttributeError:
    """Return the error for a name that an object does not have. Tools ask for names that begin with "_"."""
    text = f"{owner} has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(text)
    fix = table.get(name)
    return AttributeError(f"{text}. {fix}" if fix else text + _suggestion(name, known, 0.6))


def _suggestion(name: str, known: Iterable[str], likeness: float) -> str:
    from rekindle._src.core.names import nearest  # difflib

    close = nearest(name, [one for one in known if not one.startswith("_")], likeness)
    return f". Did you mean {close}?" if close else ""


class ForeignNames:
    """Answers attributes that it does not have, and other libraries' objects have, with what to write."""

    __slots__ = ()
    _foreign: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker marks these names itself

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self)
            if hasattr(kind, name):  # a property raised AttributeError: again, for its message
                object.__getattribute__(self, name)
            raise missing(f"a {kind.__name__}", name, self._foreign, dir(kind))


class ForeignClass(type):
    """Answers `Session.from_pretrained` and other ways to open a model with `rekindle.open`."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> NoReturn:
            raise missing(f"the class {cls.__name__}", name, CLASS, dir(cls))


class ForeignParts:
    """Stands where another library has an object with methods of its own."""

    def __init__(self, owner: str, table: Mapping[str, str]) -> None:
        self._owner, self._table = owner, table

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing(self._owner, name, self._table, ())
