"""jcb: a JAX serving core for language models with continuous batching."""

__version__ = "0.1.0"
