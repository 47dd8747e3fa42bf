"""What `jcb plan` forecasts of the default model on this machine, against the engine that then runs."""

import jax
import pytest

from jcb.bench.server_process import serving
from jcb.config import ServeConfig
from jcb.config_file import override
from jcb.engine.build import load_engine
from jcb.engine.memory import RESERVED_FOR_TEMPORARIES
from jcb.engine.model_shape import model_shape
from jcb.plan.place import parse_chips
from jcb.plan.planner import make_plan

FEW_PROGRAMS = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "token_buckets": (16,), "decode_row_buckets": (8,)}


@pytest.fixture(scope="module")
def config():
    return override(ServeConfig(), FEW_PROGRAMS)


@pytest.fixture(scope="module")
def forecast(config):
    chip, _ = parse_chips("cpu")
    return make_plan(config, model_shape("default"), chip, input_len=16, output_len=4)


@pytest.mark.timeout(600)
def test_pages_and_memory_are_what_the_engine_takes(config, forecast):
    """Pages are bound by memory here: 8 sequences of 8,192 tokens could use more."""
    engine = load_engine(config)
    memory, limits = forecast.memory, engine.info.limits
    assert memory.num_pages < 8 * 512 + 1
    assert (limits.num_pages, limits.page_size) == (memory.num_pages, memory.page_size)
    assert (limits.max_model_len, engine.config.dtype) == (forecast.max_model_len, forecast.dtype)
    assert engine.metrics.info == {"block_size": str(memory.page_size), "num_gpu_blocks": str(memory.usable_pages)}
    reported = {name: engine.report[name] for name in ("weights", "pages", "budget", "programs")}
    assert reported == {
        "weights": memory.weights, "pages": memory.pages, "budget": memory.budget, "programs": forecast.programs,
    }  # fmt: skip
    assert 0 < engine.report["temporaries"] <= RESERVED_FOR_TEMPORARIES == memory.reserve
    executor = engine.executor
    assert sum(array.nbytes for array in jax.tree.leaves(executor._params)) == memory.weights
    assert executor._state.kv_pages.nbytes == memory.pages


@pytest.mark.timeout(600)
def test_a_server_reports_the_same_pages(forecast):
    import urllib.request

    flags = [flag for name, value in FEW_PROGRAMS.items() for flag in ("--set", f"{name}={_text(value)}")]
    with serving(flags) as url, urllib.request.urlopen(f"{url}/metrics") as page:
        (line,) = [line for line in page.read().decode().splitlines() if line.startswith("jcb:cache_config_info{")]
    assert f'page_size="{forecast.memory.page_size}"' in line or f'block_size="{forecast.memory.page_size}"' in line
    assert f'="{forecast.memory.usable_pages}"' in line


def _text(value):
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
