"""From a model, a chip and a configuration to the engines of a simulation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jcb.chips import Chip
from jcb.config import ModelConfig, ServeConfig
from jcb.engine.memory import Device
from jcb.engine.resolve import as_kept, limits_of, resolve
from jcb.simulate.cost import CostModel, HostCost, RooflineCost
from jcb.simulate.fit import Calibration
from jcb.simulate.job import VOCAB_SIZE
from jcb.simulate.links import Link, link_named
from jcb.simulate.replica import ReplicaSpec
from jcb.steps.shapes import Shapes


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine to be simulated: what it is made of, and the resolved configuration it would run with."""

    model: ModelConfig
    chip: Chip
    config: ServeConfig
    spec: ReplicaSpec


def make_engine(
    model: ModelConfig,
    chip: Chip,
    config: ServeConfig,
    *,
    cost: CostModel | None = None,
    host: HostCost | None = None,
    link: Link | None = None,
) -> Engine:
    """An engine on `config.mesh.tensor_parallel` chips, with the pages that their memory holds.

    cost: a fitted one instead of the chip's roofline. link: between the chips, instead of their usual one.
    ValueError where the model does not fit, with the numbers.
    """
    devices = config.mesh.tensor_parallel
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=chip.dtype)
    config = resolve(config, model, Device(chip.platform, chip.memory), devices)
    model = as_kept(config, model)
    if devices > 1 and link is None:
        link = link_named(chip.link)
    limits = limits_of(config, VOCAB_SIZE)
    spec = ReplicaSpec(
        scheduler=config.scheduler,
        limits=limits,
        shapes=Shapes.make(config.scheduler, limits),
        cost=cost
        or RooflineCost.of(
            model,
            chip,
            dtype=config.dtype,
            kv_dtype=config.cache.kv_dtype,
            tensor_parallel=devices,
            link=link if devices > 1 else None,
        ),
        host=host or HostCost(),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        overlap=config.engine.overlap,
    )
    return Engine(model=model, chip=chip, config=config, spec=spec)


def timed_engine(model: ModelConfig, chip: Chip, config: ServeConfig, fitted: Calibration | None) -> Engine:
    """An engine with step times fitted to a recording, where there are some; ValueError for another platform's."""
    if fitted is None:
        return make_engine(model, chip, config)
    if fitted.platform != chip.platform:
        raise ValueError(f"the calibration is of a {fitted.platform}, {chip.title} is a {chip.platform}")
    return make_engine(model, chip, config, cost=fitted.cost, host=fitted.host)
