"""The HTTP front: OpenAI's API over an AsyncEngine, with aiohttp. Imports no JAX."""
