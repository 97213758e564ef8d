"""The names and values of our options in other libraries: hints for error messages.

The names are those of transformers, vLLM, SGLang, llama.cpp and the OpenAI client.
"""

from __future__ import annotations

from typing import NamedTuple


class Hint(NamedTuple):
    """Our option, or "" if there is none, and the advice for it."""

    option: str
    fix: str


_NEW_TOKENS = Hint("max_tokens", "Use max_tokens with the same value: it counts new tokens only")
_STOP = Hint("stop", "Use stop with the same value: one string or a list of strings")
_SEVERAL = Hint("n", "Use n with the same value")
_IMAGES = Hint("", "Pass pictures as images=…: one, or a list with one for each <image> of the prompt")
_SCHEMA = Hint("schema", "Use schema with the JSON schema as a dict, or with a type")
SAMPLING: dict[str, Hint] = {
    "max_new_tokens": _NEW_TOKENS,
    "max_completion_tokens": _NEW_TOKENS,
    "max_output_tokens": _NEW_TOKENS,
    "n_predict": _NEW_TOKENS,
    "num_predict": _NEW_TOKENS,
    "max_length": Hint("max_tokens", "Use max_tokens, which counts new tokens only: subtract the prompt's length"),
    "min_new_tokens": Hint(
        "min_tokens",
        "Use min_tokens with the same value: no end is chosen before that. ignore_eos=True goes on after one was",
    ),
    **dict.fromkeys(("image", "imgs", "img", "picture", "pictures", "image_url", "multi_modal_data"), _IMAGES),
    "prompt": Hint("", 'Pass the prompt first and without a name: session.generate("Once upon a time")'),
    "min_length": Hint("min_tokens", "Use min_tokens, which counts new tokens only: subtract the prompt's length"),
    "do_sample": Hint(
        "temperature", "Leave it out: temperature=0, the default, is greedy, and a temperature above 0 samples"
    ),
    "temp": Hint("temperature", "Use temperature with the same value"),
    "num_return_sequences": _SEVERAL,
    "best_of": Hint("n", "Use n for several completions, and logprobs to choose among them"),
    "stop_sequences": _STOP,
    "stop_strings": _STOP,
    "stop_words": _STOP,
    "eos_token_id": Hint("stop_token_ids", "Use stop_token_ids with a list of ids; the model's own still end it"),
    "ignore_eos_token": Hint("ignore_eos", "Use ignore_eos with the same value"),
    "repeat_penalty": Hint("repetition_penalty", "Use repetition_penalty with the same value"),
    "top_logprobs": Hint("logprobs", "Use logprobs=k for the k most likely tokens: one option does both"),
    "random_seed": Hint("seed", "Use seed with the same value"),
    "bad_words_ids": Hint("bad_words", "Use bad_words with the words as text, or logit_bias for single tokens"),
    "suppress_tokens": Hint("logit_bias", "Use logit_bias={id: float('-inf'), …}, or allowed_token_ids"),
    "logits_processor": Hint("processors", "Give processors to open() and name them here in processors"),
    "logits_processors": Hint("processors", "Give processors to open() and name them here in processors"),
    "lora_request": Hint("adapter", "Use adapter with the name of an adapter that session.load_adapter loaded"),
    "lora_path": Hint("adapter", "Load it with session.load_adapter(name, folder), and use adapter=name"),
    "adapter_path": Hint("adapter", "Load it with session.load_adapter(name, folder), and use adapter=name"),
    "adapter_id": Hint("adapter", "Use adapter with the same name"),
    "lora": Hint("adapter", 'Use adapter with a name, or with names and weights: {"name": 0.5}'),
    "cache_salt": Hint("salt", "Use salt with the same value"),
    "num_beams": Hint("n", "Beam search is not implemented: n with a temperature above 0 draws several completions"),
    "chat_template_kwargs": Hint("", "Use template_options with the same value, in session.chat"),
    "enable_thinking": Hint("", "Use template_options={'enable_thinking': …} in session.chat"),
    "tools": Hint("", "Use session.chat(messages, tools=[…])"),
    "functions": Hint("", "Use tools=[…] in session.chat: functions, or JSON schemas"),
    "auto_invoke": Hint("", "Use run_tools=True in session.chat"),
    "stream": Hint("", "Leave it out and use session.stream(prompt)"),
    "messages": Hint("", "Use session.chat(messages): pass them first and without a name"),
    "rows": Hint("", "Pass the rows first and without a name: session.map(rows, template)"),
    "template": Hint("", "Pass the template second and without a name: session.map(rows, template)"),
    "sampling": Hint("", "Pass the Sampling second and without a name"),
    "model": Hint("", "Leave it out: a session has one model, which open() takes first"),
    "timeout": Hint("", "Leave it out and use asyncio.timeout() or anyio.fail_after(): cancelling aborts the request"),
    "response_format": Hint("schema", "Use schema with a JSON schema or a type, or json=True for any JSON object"),
    "structured_outputs": Hint("schema", "Use schema, regex, choice, grammar or json=True"),
    "guided_json": _SCHEMA,
    "json_schema": _SCHEMA,
    "response_model": _SCHEMA,
    "output_type": _SCHEMA,
    "guided_regex": Hint("regex", "Use regex with the same value"),
    "guided_choice": Hint("choice", "Use choice with the same value"),
    "guided_grammar": Hint("grammar", "Use grammar with the same value: Lark's notation, or llama.cpp's"),
    "ebnf": Hint("grammar", "Use grammar with the same value: Lark's notation, or llama.cpp's"),
    "guided_whitespace_pattern": Hint("whitespace_flexible", "Use whitespace_flexible=True for any whitespace"),
    "guided_decoding_backend": Hint("", "Leave it out: llguidance is the only one"),
}  # fmt: skip

_DTYPE = Hint("dtype", "Use dtype with the same value, such as dtype='bfloat16'")
_DEVICE = Hint("", "Leave it out: JAX's default device is used; JAX_PLATFORMS or jax.default_device changes it")
_LENGTH = Hint("max_model_len", "Use max_model_len with the same value: prompt and completion together, in tokens")
_ROWS = Hint("max_requests", "Use max_requests with the same value: how many sequences run at once")
_STEP = Hint("max_tokens_per_step", "Use max_tokens_per_step with the same value")
_QUANTIZE = Hint("quantize", "Use quantize='int8' (weights and activations), 'int8-weight' (weights) or 'int4'")
_MESH = Hint("mesh", "Use mesh with the same value: the number of devices that share the model")
_NO_PIPELINE = Hint("mesh", "Layers are not spread over devices; mesh=4 divides each of them over four")
_FOUR_BITS = Hint("quantize", "Use quantize='int4'")
_WHOLE_MODEL = Hint("", "Leave it out: the whole model runs on JAX's device")
_KERNELS = Hint("kernels", "Leave it out, or name one of rekindle's implementations in kernels, such as kernels='xla'")
_MODEL = Hint("", "Pass the folder, the hub id or 'tiny' as the first argument")
OPEN: dict[str, Hint] = {
    "torch_dtype": _DTYPE,
    "param_dtype": _DTYPE,
    "kv_cache_dtype": Hint("kv_dtype", "Use kv_dtype with the same value, such as kv_dtype='int8'"),
    "device": _DEVICE,
    "device_map": _DEVICE,
    "platform": _DEVICE,
    "n_ctx": _LENGTH,
    "ctx_size": _LENGTH,
    "context_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_length": _LENGTH,
    "max_batch": _ROWS,
    "max_batch_size": _ROWS,
    "batch_size": _ROWS,
    "max_num_seqs": _ROWS,
    "n_parallel": _ROWS,
    "max_num_batched_tokens": _STEP,
    "n_batch": _STEP,
    "n_ubatch": _STEP,
    "load_in_8bit": Hint("quantize", "Use quantize='int8' (weights and activations) or quantize='int8-weight'"),
    "load_in_4bit": _FOUR_BITS,
    "quantization": _QUANTIZE,
    "quantization_config": _QUANTIZE,
    "tensor_parallel_size": _MESH,
    "pipeline_parallel_size": _NO_PIPELINE,
    "tp": _MESH,
    "tp_size": _MESH,
    "num_devices": _MESH,
    "gpu_memory_utilization": Hint(
        "device_memory", "Use device_memory, the bytes for KV pages, or leave it out for what is free"
    ),
    "mem_fraction_static": Hint(
        "device_memory", "Use device_memory, the bytes for KV pages, or leave it out for what is free"
    ),
    "num_gpu_blocks_override": Hint("device_pages", "Use device_pages with the same value"),
    "swap_space": Hint("host_memory", "Use host_memory, in bytes: swap_space=4 is host_memory=4 << 30"),
    "cpu_offload_gb": Hint("host_memory", "Weights stay on the device; host_memory, in bytes, is for KV pages"),
    "block_size": Hint("page_size", "Use page_size with the same value: tokens per KV page"),
    "n_gpu_layers": _WHOLE_MODEL,
    "n_threads": Hint("", "Leave it out: XLA takes the cores that the process may use; taskset limits them"),
    "use_mmap": Hint("", "Leave it out: weights are mapped where that is possible"),
    "enable_lora": Hint("max_adapters", "Leave it out: max_adapters says how many may be on the device"),
    "max_loras": Hint("max_adapters", "Use max_adapters with the same value"),
    "max_lora_rank": Hint("max_adapter_rank", "Use max_adapter_rank with the same value"),
    "lora_modules": Hint("", 'Use adapters={"name": folder}'),
    "lora_paths": Hint("", 'Use adapters={"name": folder}'),
    "lora_path": Hint("", 'Use adapters={"name": folder}'),
    "enable_prefix_caching": Hint("prefix_cache", "Use prefix_cache with the same value; it is on by default"),
    "enforce_eager": Hint("precompile", "Use precompile='lazy', which compiles each program when it is first needed"),
    "attn_implementation": _KERNELS,
    "flash_attn": _KERNELS,
    "use_flash_attention": _KERNELS,
    "num_speculative_tokens": Hint("prompt_lookup", "Use prompt_lookup with the same value: drafts from its own text"),
    "speculative_config": Hint("prompt_lookup", "Use prompt_lookup=7, which drafts from the text without a model"),
    "scheduling_policy": Hint("policy", "Use policy with one of rekindle's, such as policy='priority'"),
    "download_dir": Hint("cache_dir", "Use cache_dir for what rekindle keeps; hub downloads go where HF_HOME says"),
    "trust_remote_code": Hint("", "Leave it out: code of a checkpoint is never run"),
    "verbose": Hint("quiet", "Use quiet=True for no progress bars, and log_every for a line every so many steps"),
    "logits_processor": Hint("processors", "Use processors with a list of rekindle.LogitsProcessor"),
    "logits_processors": Hint("processors", "Use processors with a list of rekindle.LogitsProcessor"),
    "model_path": _MODEL,
    "model_name": _MODEL,
    "model_id": _MODEL,
    "pretrained_model_name_or_path": _MODEL,
}  # fmt: skip
