"""Structured output: schemas and grammars, what they allow next, and the objects that texts become."""
