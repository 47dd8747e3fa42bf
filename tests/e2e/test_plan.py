"""What `jcb plan` forecasts of the default model on this machine, against the engine that then runs."""

from types import SimpleNamespace

import jax
import pytest
from prometheus_client import generate_latest

from jcb.config import ServeConfig, ServerConfig
from jcb.config_file import override
from jcb.engine.build import load_engine
from jcb.engine.memory import RESERVED_FOR_TEMPORARIES
from jcb.engine.model_shape import model_shape
from jcb.plan.place import parse_chips
from jcb.plan.planner import make_plan
from jcb.server.metrics import create_registry
from jcb.server.service import Service

FEW_PROGRAMS = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "token_buckets": (16,), "decode_row_buckets": (8,)}


def metrics_page(engine):
    """What GET /metrics answers."""
    served = SimpleNamespace(engine=SimpleNamespace(metrics=engine.metrics), info=engine.info)
    return generate_latest(create_registry(Service(config=ServerConfig(), served=served))).decode().splitlines()


@pytest.mark.timeout(600)
def test_pages_and_memory_are_what_the_engine_takes():
    """Pages are bound by memory here: 8 sequences of 8,192 tokens could use more."""
    config = override(ServeConfig(), FEW_PROGRAMS)
    forecast = make_plan(config, model_shape("default"), parse_chips("cpu")[0], input_len=16, output_len=4)
    engine = load_engine(config)
    memory, limits = forecast.memory, engine.info.limits
    assert memory.num_pages < 8 * 512 + 1
    assert (limits.num_pages, limits.page_size) == (memory.num_pages, memory.page_size)
    assert (limits.max_model_len, engine.config.dtype) == (forecast.max_model_len, forecast.dtype)
    reported = {name: engine.report[name] for name in ("weights", "pages", "budget", "programs")}
    assert reported == {
        "weights": memory.weights, "pages": memory.pages, "budget": memory.budget, "programs": forecast.programs,
    }  # fmt: skip
    (line,) = [line for line in metrics_page(engine) if line.startswith("jcb:cache_config_info{")]
    assert f'num_pages="{memory.usable_pages}"' in line
    assert f'page_size="{memory.page_size}"' in line
    assert 0 < engine.report["temporaries"] <= RESERVED_FOR_TEMPORARIES == memory.reserve
    assert sum(array.nbytes for array in jax.tree.leaves(engine.executor._params)) == memory.weights
    assert engine.executor._state.kv_pages.nbytes == memory.pages
