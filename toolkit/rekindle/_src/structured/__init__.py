"""Structured output: schemas and grammars, the tokens that they allow next, and the objects that texts become."""
