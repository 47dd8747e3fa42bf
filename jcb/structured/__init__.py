"""Structured output: from a schema, regex, choice or grammar to the ids that each next token may be."""
