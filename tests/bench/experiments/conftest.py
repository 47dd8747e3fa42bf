"""Small settings in which every experiment takes a second."""

import pytest

from jcb.bench.experiments.sim_lab import SimLab
from jcb.chips import chip_named
from jcb.models.presets import preset


@pytest.fixture(scope="session")
def lab():
    return SimLab("Llama-3.1-8B", preset("llama-3.1-8b"), chip_named("h200"))
