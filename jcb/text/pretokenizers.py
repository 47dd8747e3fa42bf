"""How text is cut into words before byte-level BPE, by the name a GGUF file gives (`tokenizer.ggml.pre`).

A wrong cut still decodes to the same text, but to other ids than the model was trained on, so an unknown name is
refused. The patterns are the ones published with the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from jcb.checkpoint.errors import ModelLoadError, printable

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way of cutting text.

    pattern: the words, or None for GPT-2's own pattern. digits: every digit is cut off on its own first.
    nfc: text is composed (Unicode NFC) first. ignore_merges: a word that is itself a token is taken whole.
    add_bos: whether prompts begin with the beginning-of-sequence token when the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> Any:
        """The pre-tokenizer object; its last step maps bytes to GPT-2's printable characters."""
        steps: list[Any] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Any:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizer()
_SMOLLM = PreTokenizer(digits=True)
_LLAMA_BPE = PreTokenizer(pattern=_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer(pattern=_QWEN2, nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": PreTokenizer(pattern=_TEKKEN, ignore_merges=True, add_bos=True),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The entry for `name`; ModelLoadError when there is none."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelLoadError("tokenizer.ggml.pre", f"{printable(name)} is not a known pre-tokenizer ({known})")
    return PRE_TOKENIZERS[name]
