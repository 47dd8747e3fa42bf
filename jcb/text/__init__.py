"""Text in and out: tokenizers, chat templates, incremental detokenising with stop strings."""
