"""From text to tokens and back: tokenizer, incremental detokenizer, chat templates."""

from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.detokenizer import Detokenizer, FinalText
from rekindle._src.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "FinalText", "Tokenizer"]
