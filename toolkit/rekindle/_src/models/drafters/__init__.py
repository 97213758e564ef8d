"""The families of what drafts for another model: assistants and heads of their own checkpoints, and models' own heads.

A module is imported when a config of its type is read or its model is made.
"""

MODULES = {  # of each model_type that drafts for another model and is none by itself
    "bailing_hybrid_mtp": "mtp", "dflash": "dflash", "eagle3": "eagle3", "gemma4_assistant": "gemma4_assistant",
    "gemma4_unified_assistant": "gemma4_assistant", "glm4_moe_lite_mtp": "mtp", "qwen3_5_mtp": "mtp",
}  # fmt: skip
BLOCK_ARCHITECTURE = "DFlashDraftModel"  # a head that drafts a block of tokens at once
# Heads with a checkpoint of their own, by the architectures of config.json. EAGLE-3 has those of SpecForge, vLLM
# and Red Hat's speculators.
ARCHITECTURES = (
    BLOCK_ARCHITECTURE, "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel",
)  # fmt: skip
# Model types with a head of their own, in `mtp`.
OWN_HEADS = ("bailing_hybrid", "glm4_moe_lite", "qwen3_5_moe_text", "qwen3_5_text")
