"""File formats to named numpy arrays: GGUF and Hugging Face folders. Knows nothing of models."""
