"""A tokenizer folder in Hugging Face form, which benchmark clients and evaluation tools load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jcb.checkpoint.reader import Checkpoint
from jcb.text.tokenizer import load_tokenizer


def export_tokenizer(checkpoint: Checkpoint, folder: str | Path) -> tuple[Path, ...]:
    """Write the checkpoint's tokenizer to `folder` (made if absent); returns the files written.

    tokenizer.json, tokenizer_config.json and special_tokens_map.json; chat_template.jinja where there is a template;
    config.json and generation_config.json with what loaders look up: model type, sizes, the ids of special tokens.
    """
    tokenizer = load_tokenizer(checkpoint)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tokenizer.config()
    added = tokenizer.pipeline.get_added_tokens_decoder()
    config["added_tokens_decoder"] = {str(index): _added_token(token) for index, token in sorted(added.items())}
    ids = _token_ids(tokenizer.bos_token_id, tokenizer.eos_token_ids)
    files: dict[str, str] = {
        "tokenizer.json": tokenizer.pipeline.to_str(pretty=True),
        "tokenizer_config.json": _to_json(config),
        "special_tokens_map.json": _to_json(tokenizer.named_tokens),
        "config.json": _to_json(_model_config(checkpoint) | ids),
        "generation_config.json": _to_json(ids | checkpoint.generation_defaults),
    }
    if tokenizer.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.chat_template
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return tuple(folder / name for name in files)


def _model_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of a Llama model."""
    config = checkpoint.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _token_ids(bos: int | None, eos: tuple[int, ...]) -> dict[str, Any]:
    ids: dict[str, Any] = {} if bos is None else {"bos_token_id": bos}
    return ids | ({"eos_token_id": eos[0] if len(eos) == 1 else list(eos)} if eos else {})


def _added_token(token: Any) -> dict[str, Any]:
    return {
        "content": token.content,
        "lstrip": token.lstrip,
        "normalized": token.normalized,
        "rstrip": token.rstrip,
        "single_word": token.single_word,
        "special": token.special,
    }


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
