"""The model families: config, weights, and form as a GGUF file. A module is named by its model_type.

It has the families that derive from its own, too, which `RELATIVES` names, so that only the module needed is imported.
"""

RELATIVES = {  # the module of each of them
    "cohere2": "cohere", "ernie4_5_moe": "ernie4_5", "gemma3_text": "gemma2", "gemma4_unified_text": "gemma4_text",
    "glm4": "glm", "glm4_moe_lite": "deepseek_v2", "granitemoe": "granite", "granitemoeshared": "granite",
    "lfm2_moe": "lfm2", "lfm3": "lfm2", "ministral3": "mistral", "mixtral": "mistral", "olmo3": "olmo2",
    "olmoe": "olmo2", "qwen2_moe": "qwen2", "qwen3_5_moe_text": "qwen3_5_text", "qwen3_moe": "qwen3",
}  # fmt: skip
