"""How many bytes and operations a model is made of, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from jcb.config import ModelConfig
from jcb.models.specs import ParamSpec, param_specs
from pallas_kernels.page import ITEM_BYTES


@dataclass(frozen=True)
class ModelShape:
    """Counts of a decoder. Parameters of layers are those of its matrices; norms and biases are too few to matter.

    kv_numbers: numbers that one token leaves in the cache. packed_*: of those that every step reads, the ones that stay
    packed. attention_flops: operations for one pair of a query token
    and a token it attends to.
    """

    layer_parameters: int
    head_parameters: int
    embedding_parameters: int  # beside the head; 0 where they are tied
    kv_numbers: int
    attention_flops: int
    num_layers: int
    hidden_size: int
    packed_parameters: int = 0
    packed_bytes: int = 0

    @staticmethod
    def of(model: ModelConfig) -> ModelShape:
        """The counts of `model`."""
        width, heads, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        layer = 2 * width * heads + 2 * width * kv + 3 * width * model.intermediate_size
        table = model.vocab_size * width
        packed = _packed_specs(model)
        return ModelShape(
            layer_parameters=model.num_layers * layer,
            head_parameters=table,
            embedding_parameters=0 if model.tie_word_embeddings else table,
            kv_numbers=2 * model.num_layers * kv,
            attention_flops=4 * model.num_layers * heads,
            num_layers=model.num_layers,
            hidden_size=width,
            packed_parameters=sum(spec.size for spec in packed),
            packed_bytes=sum(spec.packed.nbytes for spec in packed),
        )

    @property
    def parameters(self) -> int:
        """All of them: what memory must hold."""
        return self.layer_parameters + self.head_parameters + self.embedding_parameters

    @property
    def step_parameters(self) -> int:
        """Those that every step reads; of an untied embedding table only a few rows are."""
        return self.layer_parameters + self.head_parameters

    def step_bytes(self, dtype: str) -> int:
        """Bytes of weights that every step reads."""
        return (self.step_parameters - self.packed_parameters) * ITEM_BYTES[dtype] + self.packed_bytes

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights, all dense."""
        return self.parameters * ITEM_BYTES[dtype]

    def kv_bytes(self, dtype: str) -> int:
        """Cache bytes of one token."""
        return self.kv_numbers * ITEM_BYTES[dtype]


def _packed_specs(model: ModelConfig) -> list[ParamSpec]:
    """The packed parameters that every step reads; of an untied embedding table only a few rows are."""
    specs = param_specs(model)
    read = [*specs["layers"].values(), specs.get("head", specs["embedding"])]
    return [spec for spec in read if spec.format]
