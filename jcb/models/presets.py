"""Shapes of well-known models, for planning and compiling without a checkpoint. Source: their public config.json."""

from __future__ import annotations

from pathlib import Path

from jcb.config import ModelConfig

PREFIX = "preset:"
"""`model = "preset:llama-3.1-8b"` means a shape without weights."""

_LLAMA_3_1_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        architecture="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA_3_1_ROPE,
    ),
    "llama-3.1-70b": ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA_3_1_ROPE,
    ),
    "qwen3-8b": ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        qk_norm=True,
    ),
}


def preset(name: str) -> ModelConfig:
    """The shape called `name`, with or without the prefix. Raises ValueError that lists the known ones."""
    key = name.removeprefix(PREFIX).lower()
    if key not in PRESETS:
        raise ValueError(f"no preset {key!r}; known: {', '.join(PREFIX + each for each in PRESETS)}")
    return PRESETS[key]


def serve_command(settings: Path, model: str) -> str:
    """What serves the settings in a file. A shape has no weights, so a model must then be named."""
    return f"jcb serve --config {settings}" + (" --model PATH" if model.startswith(PREFIX) else "")
