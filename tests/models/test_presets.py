"""Shapes as data: parameters add up to what the models are named after."""

from pathlib import Path

import pytest

from jcb.config import ServeConfig
from jcb.engine.build import load_engine
from jcb.models import llama
from jcb.models.presets import PRESETS, preset, serve_command
from jcb.models.specs import nbytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_parameters_add_up(name, parameters):
    """The published counts of each model."""
    assert nbytes(llama.param_specs(PRESETS[name]), "int8") == parameters
    assert preset(f"preset:{name}") is PRESETS[name]


def test_a_preset_cannot_be_served():
    with pytest.raises(ValueError, match="shape without weights"):
        load_engine(ServeConfig(model="preset:qwen3-8b"))


def test_settings_of_a_shape_are_served_with_a_model_named():
    assert serve_command(Path("goal.toml"), "default") == "jcb serve --config goal.toml"
    assert serve_command(Path("goal.toml"), "preset:qwen3-8b") == "jcb serve --config goal.toml --model PATH"
