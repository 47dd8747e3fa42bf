"""A real Llama model small enough for any test: two layers, a byte-level BPE vocabulary, a chat template.

`write_tiny_gguf` and `write_tiny_hf` write the same model (for the same seed) in both formats. Weights are random but
large enough that greedy answers vary with the prompt.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, MAX_LENGTH = 64, 4, 2, 16, 128, 2, 512
ROPE_THETA, RMS_EPS = 10_000.0, 1e-5

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS, PAD = 1, 2, 0
_WORDS = (
    " the", " and", " of", " to", " in", " is", " that", " for", " it", " was", " on", " are", " with", " as", "ing",
    "user", "system", "assistant", " you", " this", "Hello", " world", "The", " capital", " France", " quick", " brown",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

GGUF_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "BF16": 30}


def byte_symbols() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens by id, merges): the special tokens, the bytes, then what joins the words left to right."""
    symbols = byte_symbols()
    tokens, merges = [*SPECIAL, *symbols], []
    for word in _WORDS:
        pieces = [symbols[byte] for byte in word.encode()]
        left = pieces[0]
        for right in pieces[1:]:
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append((left, right))
            left += right
    return tokens, merges


VOCAB = len(vocabulary()[0])


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors by their Hugging Face names; the head is tied to the embedding."""
    rng = np.random.default_rng(seed)

    def matrix(out: int, width: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((out, width)) * scale / np.sqrt(width)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32)

    result = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 4.0)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        result |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, 2.0),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2.0),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
    return result | {"model.norm.weight": norm()}


def write_tiny_hf(folder: str | Path, seed: int = 0) -> Path:
    """Write the model as a Hugging Face folder; returns it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(seed), folder / "model.safetensors")
    files = {
        "config.json": _hf_config(),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "temperature": 0.7, "top_p": 0.9},
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": {
            "bos_token": SPECIAL[BOS],
            "eos_token": SPECIAL[EOS],
            "pad_token": SPECIAL[PAD],
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_tiny_gguf(path: str | Path, *, quant: str = "F32", seed: int = 0) -> Path:
    """Write the model as a GGUF file; returns it. Matrices are stored as `quant`, norms as F32."""
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, value in weights(seed).items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads is not None:
            value = permute_rows(value, heads)
        tensors[gguf_name(name)] = (quant if value.ndim == 2 else "F32", value)
    path = Path(path)
    path.write_bytes(gguf_bytes(gguf_metadata(), tensors))
    return path


def permute_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rotary order to the interleaved one that GGUF's llama architecture uses."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, *rest, _ = name.split(".")
    part = {
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
        "up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }[rest[-1]]  # fmt: skip
    return f"blk.{layer}.{part}.weight"


def gguf_metadata() -> dict[str, Any]:
    """The metadata of the tiny model: plain ints are written as u32, floats as f32."""
    tokens, merges = vocabulary()
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": LAYERS,
        "llama.context_length": MAX_LENGTH,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": RMS_EPS,
        "llama.rope.freq_base": ROPE_THETA,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * len(SPECIAL) + [1] * (VOCAB - len(SPECIAL)), np.int32),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, np.ndarray]], alignment: int = 32
) -> bytes:
    """A GGUF version 3 file; each tensor comes with the name of the type it is stored as."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    blobs, offset = [], 0
    for name, (kind, value) in tensors.items():
        blob = _stored(kind, value)
        out += _string(name) + struct.pack(f"<I{value.ndim}Q", value.ndim, *value.shape[::-1])
        out += struct.pack("<IQ", GGUF_TYPES[kind], offset)
        blob += b"\0" * (-len(blob) % alignment)
        blobs.append(blob)
        offset += len(blob)
    out += b"\0" * (-len(out) % alignment)
    return bytes(out) + b"".join(blobs)


def _stored(kind: str, value: np.ndarray) -> bytes:
    plain = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    if kind in plain:
        return value.astype(plain[kind]).tobytes()
    import gguf  # only the quantised types need it

    return gguf.quants.quantize(value, gguf.GGMLQuantizationType[kind]).tobytes()


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A metadata value with its type number in front."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case np.ndarray():
            return struct.pack("<IIQ", 9, 5, len(value)) + value.astype(np.int32).tobytes()
        case _:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))


def _hf_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": RMS_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def _tokenizer_json() -> dict[str, Any]:
    tokens, merges = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, token in enumerate(SPECIAL)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }
