"""Memory is planned, not discovered: what does not fit is refused with the numbers before a page exists."""

import dataclasses
import re

import pytest

from jcb.config import CacheConfig, EngineConfig, SchedulerConfig, ServeConfig
from jcb.engine import build
from jcb.engine.device import local_device
from jcb.engine.memory import Device, MemoryPlan, pages_for_budget
from jcb.engine.resolve import plan_memory
from tests.checkpoint.tiny_model import write_tiny_gguf

GIB = 1 << 30


def test_a_plan_fits_to_the_byte_and_not_one_more():
    MemoryPlan(weights=5 * GIB, pages=2 * GIB, temporaries=GIB, budget=8 * GIB).check()
    with pytest.raises(ValueError, match=r"needs 8.00 GiB \(weights 5.00, pages 2.00, temporaries 1.00\)"):
        MemoryPlan(weights=5 * GIB, pages=2 * GIB, temporaries=GIB + 1, budget=8 * GIB).check()


def test_pages_take_what_weights_and_temporaries_leave():
    gpu = Device("gpu", 100 * GIB)  # a tenth is the driver's
    assert pages_for_budget(gpu, 0, GIB, 50 * GIB) == 39  # one GiB is kept for temporaries
    assert pages_for_budget(gpu, 3.5, GIB, 50 * GIB) == 3
    with pytest.raises(ValueError, match=r"hold 0 pages of 1,073,741,824 \(weights take 96,636,764,160"):
        pages_for_budget(gpu, 0, GIB, 90 * GIB)


def test_an_engine_too_large_for_its_device_ends_before_pages_are_allocated(tmp_path, monkeypatch):
    """The hungriest program's temporaries count, known only once it is compiled."""

    def allocated(*_args):
        raise AssertionError("pages were allocated")

    config = ServeConfig(
        model=str(write_tiny_gguf(tmp_path / "tiny.gguf")),
        dtype="float32",
        cache=CacheConfig(num_pages=64, page_size=4),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32),
        engine=EngineConfig(compile_cache=""),
    )
    plans = []

    def planned(*args):
        plans.append(plan_memory(*args))
        return plans[-1]

    monkeypatch.setattr(build, "DeviceExecutor", allocated)
    monkeypatch.setattr(build, "plan_memory", planned)
    with pytest.raises(AssertionError, match="allocated"):  # it fits this machine
        build.load_engine(config)
    known = plans[-1]
    assert known.temporaries > 0

    def refused(budget: int) -> tuple[str, list[str]]:
        """What is said on a device that has `budget` bytes for it, and the stages until then."""
        stages = []
        device = dataclasses.replace(local_device(), memory=budget * 10 // 9 + 2)
        monkeypatch.setattr(build, "local_device", lambda: device)
        with pytest.raises(ValueError, match=r"the plan needs .* temporaries") as caught:
            build.load_engine(config, progress=lambda stage, done, total: stages.append(stage))
        return str(caught.value), stages

    said, stages = refused(known.weights + known.pages)
    assert "compile" in stages
    assert re.search(r"lower --kv-cache-memory, --max-num-seqs or --max-num-batched-tokens", said)
    assert refused(known.weights + known.pages - 100)[1] == []  # that is too much without temporaries: nothing is done
