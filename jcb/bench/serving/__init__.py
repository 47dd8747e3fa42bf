"""`jcb bench serve`: requests at a server that speaks OpenAI's API, with the flags, lines and JSON keys of vLLM's."""
