"""Text in and out: tokenizer, incremental detokenizing, chat templates."""
