"""Text in and out: tokenizer, incremental detokenizing, chat templates."""

from rekindle.text.chat import ChatTemplate
from rekindle.text.detokenizer import Detokenizer, Pushed
from rekindle.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Pushed", "Tokenizer"]
