"""Which parameters can stay packed as a file has them. Host half: only the header is read."""

from __future__ import annotations

import dataclasses
from itertools import chain

from jcb.checkpoint.reader import Checkpoint
from jcb.config import ModelConfig
from jcb.weights.names import TABLES
from pallas_kernels.packed import FORMATS


def shipped_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model's config, with its packed parameters in `shipped`.

    A parameter can stay packed when all the tensors that it is made of, in all layers, have one type among FORMATS.
    """
    config = checkpoint.config
    table = TABLES[checkpoint.format, config.architecture]
    available = set(checkpoint.names())
    found = []
    for path, source in table.items():
        names = chain.from_iterable(source.by_layer(config.num_layers))
        types = {checkpoint.tensor_type(name).lower() if name in available else "" for name in names}
        if len(types) == 1 and types <= set(FORMATS):
            found.append((path, *types))
    return dataclasses.replace(config, shipped=tuple(found))
