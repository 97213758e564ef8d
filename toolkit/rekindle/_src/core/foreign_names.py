"""The names and values of our options in other libraries: hints for error messages.

The names come from transformers, vLLM, SGLang, llama.cpp and the OpenAI client.
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
_FIRST = Hint(
    "", "Pass the prompt first and without a name: session.generate(prompt), a text, token ids or a list of them"
)
_STREAM = Hint("", "Leave it out and write async for delta in session.stream(prompt), or in session.chat(messages)")
_HIDDEN = Hint("capture", 'Use capture={"residual": "all"}, or numbers of layers; done.captured has the arrays')
_SCORES = Hint("logprobs", "Use logprobs=5 for the most likely tokens of each position: done.logprobs has them")
_NO_BEAMS = Hint("n", "Beam search is not implemented: n with a temperature above 0 draws several completions")
_NO_MASK = Hint("", "Leave it out: nothing is padded, and prompts of any lengths run together")
_ALWAYS = Hint("", "Leave it out: keys and values are always kept, and the result is always a Completion")
_MIN_P = Hint("min_p", "It is not implemented. Use min_p=0.05 or top_p=0.95")
_SAMPLING = Hint("", "Pass a rekindle.Sampling second and without a name, or its options as keywords")
_CHAT = Hint("", "Use session.chat([{'role': 'system', 'content': …}, …]), or chat = session.conversation(system)")
_TURNS = Hint("", "Pass all messages first and without a name, or use chat = session.conversation() and chat.say(text)")
_QUIET = Hint("", "Leave it out here; open(…, quiet=True) shows no bars")
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
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "length_penalty", "early_stopping", "diversity_penalty", "use_beam_search"),
        _NO_BEAMS),
    **dict.fromkeys(
        ("input_ids", "inputs", "inputs_embeds", "prompts", "prompt_token_ids", "text_inputs", "input", "text"),
        _FIRST),
    **dict.fromkeys(("attention_mask", "position_ids", "token_type_ids", "pad_token_id", "padding"), _NO_MASK),
    **dict.fromkeys(("use_cache", "return_dict_in_generate", "cache_implementation", "past_key_values"), _ALWAYS),
    **dict.fromkeys(("streamer", "stream_options"), _STREAM),
    **dict.fromkeys(("output_hidden_states", "hidden_states"), _HIDDEN),
    "output_attentions": Hint("", "Write await session.view.attention(prompt): the weights of all layers and heads"),
    **dict.fromkeys(("output_scores", "output_logits", "return_logits"), _SCORES),
    **dict.fromkeys(("sampling_params", "params", "generation_config", "gen_config", "generation_kwargs"), _SAMPLING),
    **dict.fromkeys(("tfs_z", "top_a", "epsilon_cutoff", "eta_cutoff"), _MIN_P),
    "typ_p": Hint("typical_p", "Use typical_p with the same value"),
    "mirostat_mode": Hint("mirostat", "Use mirostat=2, which is its newer version"),
    "sampler_order": Hint("samplers", 'Use samplers with names in their order, such as ["top_k", "temperature"]'),
    "dynatemp": Hint("dynatemp_range", "Use dynatemp_range: the temperature may differ by so much"),
    **dict.fromkeys(("system", "system_prompt", "instructions"), _CHAT),
    **dict.fromkeys(("history", "conversation", "chat_history"), _TURNS),
    **dict.fromkeys(("use_tqdm", "verbose", "progress_bar", "show_progress"), _QUIET),
    **dict.fromkeys(("num_generations", "group_size", "num_samples", "num_completions", "num_sequences"), _SEVERAL),
    **dict.fromkeys(("max_completion_length", "max_gen_len", "max_gen_toks", "max_tokens_to_sample"), _NEW_TOKENS),
    "no_repeat_ngram_size": Hint("repetition_penalty", "Use repetition_penalty=1.1, or frequency_penalty"),
    "stopping_criteria": Hint("stop", "Use stop or stop_token_ids, or leave a loop over session.stream(prompt)"),
    "assistant_model": Hint("", "Leave it out here; open(…, drafts=folder) takes a model that drafts"),
    "echo": Hint("", "Leave it out: done.prompt and done.prompt_token_ids have the prompt; prompt_logprobs scores it"),
    "options": Hint("", "Pass its entries as keywords: temperature=0.8, num_predict as max_tokens"),
    "format": Hint("schema", "Use json=True for any JSON object, or schema with a JSON schema or a type"),
    "keep_alive": Hint("", "Leave it out: a session stays open until session.aclose()"),
    "num_ctx": Hint("", "Leave it out here; open(…, max_model_len=…) bounds prompt and completion together"),
    "user": Hint("salt", "Leave it out; salt keeps the cached pages of one user apart from other users'"),
    "skip_special_tokens": Hint("", "Leave it out: texts have none. session.tokenizer.decode(ids, False) keeps them"),
    "suffix": Hint("", "Write prompt and suffix with the model's tokens for filling in text"),
    "chat_template_kwargs": Hint("", "Use template_options with the same value, in session.chat"),
    "enable_thinking": Hint("", "Use template_options={'enable_thinking': …} in session.chat"),
    "tools": Hint("", "Use session.chat(messages, tools=[…])"),
    "functions": Hint("", "Use tools=[…] in session.chat: functions, or JSON schemas"),
    "auto_invoke": Hint("", "Use run_tools=True in session.chat"),
    "stream": _STREAM,
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
_OWN_TOKENIZER = Hint("", "Leave it out: the tokenizer of the model's folder or file is used, as session.tokenizer")
_REVISION = Hint("", "Pass the folder of huggingface_hub.snapshot_download(hub_id, revision=…) as the model")
_TOKEN = Hint("", "Leave it out: the hub's client reads HF_TOKEN, or what `hf auth login` has stored")
_SERVE = Hint("", "Leave it out here: server = await session.serve(port=8000), or `rekindle serve MODEL --port 8000`")
_DRAFTS = Hint("drafts", "Use drafts with its folder, file or hub id")
_CALLS = Hint("", "Leave it out here; each call of session.chat takes a template=… in its place")
OPEN: dict[str, Hint] = {
    **dict.fromkeys(("system", "system_prompt", "instructions"), _CHAT),
    **dict.fromkeys(("model_kwargs", "engine_args", "options"), Hint("", "Pass its entries as keywords")),
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
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_name", "skip_tokenizer_init"), _OWN_TOKENIZER),
    **dict.fromkeys(("revision", "code_revision", "variant", "subfolder"), _REVISION),
    **dict.fromkeys(("token", "use_auth_token", "hf_token"), _TOKEN),
    **dict.fromkeys(("host", "port", "api_key", "base_url", "served_model_name"), _SERVE),
    **dict.fromkeys(("chat_template", "chat_format", "chat_handler"), _CALLS),
    **dict.fromkeys(("low_cpu_mem_usage", "offload_folder", "max_memory", "use_mlock"), _WHOLE_MODEL),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_model"), _DRAFTS),
    **dict.fromkeys(("repo_id", "filename", "model_file"), _MODEL),
    "num_ctx": _LENGTH,
    "max_tokens_per_batch": _STEP,
    "task": Hint("", "Leave it out: session.generate, chat, score and embed are calls of one session"),
    "use_cache": Hint("", "Leave it out: keys and values are always kept"),
    "model_path": _MODEL,
    "model_name": _MODEL,
    "model_id": _MODEL,
    "pretrained_model_name_or_path": _MODEL,
}  # fmt: skip
