"""Names of topologies, and facts that must agree with each other."""

import pytest

from jcb.aot.gpu_target import gpu_target_config
from jcb.chips import CHIPS, parse_topology


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("v5e:2x2", "v5e:2x2", 4),
        ("V6E:2x4", "v6e:2x4", 8),
        ("v5p:2x2x1", "v5p:2x2x1", 4),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8),
        ("tpu7x", "tpu7x:1x1x1", 2),
        ("v5e", "v5e:1x1", 1),
        ("h200", "h200:1", 1),
        (" h200:8 ", "h200:8", 8),
    ],
)
def test_topologies_by_name(text, name, devices):
    topology = parse_topology(text)
    assert topology.name == name
    assert topology.num_devices == devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:2x2", r"no chip 'v9' is known, only v5e, v6e, v5p, tpu7x, a100, h100, h200, b200$"),
        ("", r"no chip '' is known"),
        ("cpu", r"no chip 'cpu' is known"),
        ("v5e:2x2x1", r"'v5e:2x2x1' must be a chip and its grid, for example v5e:2x2"),
        ("v5p:2x2", r"for example v5p:2x2x1"),
        ("v5e:", r"for example v5e:2x2"),
        ("v5e:0x2", r"for example v5e:2x2"),
        ("v5e:2x-2", r"for example v5e:2x2"),
        ("h200:2x2", r"for example h200:8"),
        ("v5e:99999x2", r"for example v5e:2x2"),
    ],
)
def test_bad_topologies_say_what_is_known(text, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(text)


def test_gpu_targets_name_what_the_compiler_asks_for():
    text = gpu_target_config(CHIPS["h200"])
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "core_count: 132" in text
    assert f"device_memory_size: {CHIPS['h200'].memory}" in text
    assert text.count("{") == text.count("}")
    assert "major: 10 minor: 0" in gpu_target_config(CHIPS["b200"])


def test_every_chip_has_what_its_platform_needs():
    for chip in CHIPS.values():
        assert chip.memory > 8 << 30
        assert chip.source
        if chip.platform != "cpu":
            assert 100 < chip.flops / chip.bandwidth < 1000, "operations a byte, as of 2026"
        assert bool(chip.target) == (chip.platform == "gpu")
        assert bool(chip.dims and chip.accelerator_type) == (chip.platform == "tpu")
