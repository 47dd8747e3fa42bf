"""ModelConfig, end tokens and sampling defaults from a Hugging Face folder's JSON files (Llama and Qwen3)."""

from __future__ import annotations

from typing import Any

from jcb.checkpoint.errors import ModelLoadError, printable
from jcb.checkpoint.fields import Fields
from jcb.config import ModelConfig

MAX_SIZE = 1 << 24
MAX_LAYERS = 4_096

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""Names in config.json to ours."""

_NEUTRAL = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
    "use_sliding_window": (False,),
}
"""Settings that must be absent or have one of these values: others are not implemented."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_config(fields: Fields) -> ModelConfig:
    """The model's shape; every setting that is not implemented must have its neutral value."""
    for key, allowed in _NEUTRAL.items():
        if fields.has(key) and fields.values[key] not in allowed:
            raise ModelLoadError(key, f"{printable(repr(fields.values[key]))} is not supported")
    hidden = fields.integer("hidden_size", 1, MAX_SIZE)
    heads = fields.integer("num_attention_heads", 1, MAX_SIZE)
    architecture = _architecture(fields)
    qwen3 = architecture == "qwen3"
    if not fields.has("head_dim") and hidden % heads and not qwen3:
        raise ModelLoadError("num_attention_heads", f"{heads} heads do not divide the width {hidden}")
    theta, scaling = _rope(fields)
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size", 1, MAX_SIZE),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", 1, MAX_SIZE),
            num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", 1, heads, default=heads),
            head_dim=fields.integer("head_dim", 1, MAX_SIZE, default=128 if qwen3 else max(hidden // heads, 1)),
            max_position_embeddings=fields.integer("max_position_embeddings", 1, MAX_SIZE, default=2048),
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            qk_norm=qwen3,
        )
    except ValueError as error:
        raise ModelLoadError("config.json", str(error)) from error


def end_token_ids(fields: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json's, else config.json's. Every id must be inside the vocabulary."""
    ids: tuple[int, ...] = ()
    for source in (fields, generation):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            found = _token_ids(source, key, vocab_size)
            if key == "eos_token_id" and found:
                ids = found
    return tuple(dict.fromkeys(ids))


def sampling_defaults(generation: Fields) -> dict[str, float]:
    """Sampling settings that generation_config.json recommends."""
    return {key: generation.number(key) for key in _SAMPLING if generation.has(key)}


def _architecture(fields: Fields) -> str:
    found = fields.texts("architectures")
    if len(found) != 1 or found[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError("architectures", f"{printable(', '.join(found))} is not supported, only {known}")
    return ARCHITECTURES[found[0]]


_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _rope(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling). Newer files keep both in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    scaling = fields.values.get(key)
    if scaling is not None and not isinstance(scaling, dict):
        raise ModelLoadError(key, "it is not an object")
    scaling = dict(scaling or {})
    theta = fields.positive("rope_theta", Fields(scaling).positive("rope_theta", 10_000.0))
    scaling.pop("rope_theta", None)
    if scaling:
        scaling["rope_type"] = Fields(scaling).text("rope_type", scaling.pop("type", None))
    if scaling.get("rope_type", "default") == "default":
        return theta, None
    _check_scaling(key, scaling)
    return theta, scaling


def _check_scaling(key: str, scaling: dict[str, Any]) -> None:
    """ModelLoadError for a kind that is not built, and for numbers with which its frequencies cannot be made."""
    names = {"linear": ("factor",), "llama3": ("factor", *_LLAMA3)}.get(scaling["rope_type"])
    if names is None:
        raise ModelLoadError(key, f"type {scaling['rope_type'][:64]!r} is not supported; supported: linear, llama3")
    values = {name: Fields(scaling).positive(name) for name in names}
    if scaling["rope_type"] == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ModelLoadError(key, "high_freq_factor must be above low_freq_factor")


def _token_ids(source: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    value = source.values.get(key)
    if key == "pad_token_id" and value == -1:  # old Llama files write "no padding" so
        return ()
    each = value if isinstance(value, list) else [] if value is None else [value]
    if len(each) > 64:
        raise ModelLoadError(key, f"{len(each)} ids are over the limit of 64")
    return tuple(Fields({key: item}).integer(key, 0, vocab_size - 1) for item in each)
