"""How many bytes and operations a model is made of, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from jcb.config import ModelConfig
from pallas_kernels.page import ITEM_BYTES


@dataclass(frozen=True)
class ModelShape:
    """Counts of a decoder. Parameters of layers are those of its matrices; norms and biases are too few to matter.

    kv_numbers: numbers that one token leaves in the cache. attention_flops: operations for one pair of a query token
    and a token it attends to.
    """

    layer_parameters: int
    head_parameters: int
    embedding_parameters: int  # beside the head; 0 where they are tied
    kv_numbers: int
    attention_flops: int
    num_layers: int
    hidden_size: int

    @staticmethod
    def of(model: ModelConfig) -> ModelShape:
        """The counts of `model`."""
        width, heads, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        layer = 2 * width * heads + 2 * width * kv + 3 * width * model.intermediate_size
        table = model.vocab_size * width
        return ModelShape(
            layer_parameters=model.num_layers * layer,
            head_parameters=table,
            embedding_parameters=0 if model.tie_word_embeddings else table,
            kv_numbers=2 * model.num_layers * kv,
            attention_flops=4 * model.num_layers * heads,
            num_layers=model.num_layers,
            hidden_size=width,
        )

    @property
    def parameters(self) -> int:
        """All of them: what memory must hold."""
        return self.layer_parameters + self.head_parameters + self.embedding_parameters

    @property
    def step_parameters(self) -> int:
        """Those that every step reads; of an untied embedding table only a few rows are."""
        return self.layer_parameters + self.head_parameters

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights."""
        return self.parameters * ITEM_BYTES[dtype]

    def kv_bytes(self, dtype: str) -> int:
        """Cache bytes of one token."""
        return self.kv_numbers * ITEM_BYTES[dtype]
