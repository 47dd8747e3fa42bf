"""The machine code of the GPU kernels, made by NVIDIA's compiler with no GPU present."""

import json
import os
import subprocess
import sys

import pytest

from jcb.aot.preflight import environment
from jcb.chips import parse_topology


@pytest.mark.timeout(600)
def test_kernels_reach_machine_code_without_spills(tmp_path):
    try:
        env = environment(parse_topology("h200").chip, os.environ)
    except ValueError as missing:
        pytest.skip(str(missing))
    env |= {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_SASS": "1"}
    command = [sys.executable, "-m", "tests.pallas_kernels.paged_attention.compile_gpu", "h200", str(tmp_path)]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    found = [json.loads(line) for line in child.stdout.splitlines()]
    names = {"paged_attention_decode", "paged_attention_prefill", "paged_attention_combine"}
    for shape in {report["shape"] for report in found}:
        assert {report["kernel"] for report in found if report["shape"] == shape} == names
    for report in found:
        assert report["target"] == "sm_90a"
        assert (report["spill_stores"], report["spill_loads"]) == (0, 0), report
        assert report["registers"] <= 168  # three warpgroups of them fill a multiprocessor's 65,536
        if report["kernel"] != "paged_attention_combine":
            assert report["wgmma"] > 0
            assert report["tma"] > 0
