"""Everything that /openapi.json describes, with good and bad data: no 5xx, and answers as described.

`JCB_FUZZ_EXAMPLES` sets how many examples an operation gets (`make campaign`: 5,000).
"""

import asyncio
import os
import sys
from pathlib import Path

import pytest

EXAMPLES = int(os.environ.get("JCB_FUZZ_EXAMPLES", "200"))
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
CONFIG = f"""
hooks = "{HOOKS}"

[generation]
allow-x00 = true
codec = "unicode_escape"  # the one that has lone surrogates
"""


@pytest.mark.timeout(120 + 8 * EXAMPLES)
@pytest.mark.usefixtures("scripted")
async def test_good_and_bad_data(start_server, tmp_path):
    server = await start_server(max_queued=1000)
    before = await server.complete()
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{server.url}/openapi.json",
        "--mode", "all", "--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS), "--max-examples",
        str(EXAMPLES), "--workers", "2",
        "--exclude-path", "/v1/batch/events", "--no-color", "--seed", "1", "--suppress-health-check", "all",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path,
    )  # fmt: skip
    try:
        async with asyncio.timeout(8 * EXAMPLES):
            output, _ = await process.communicate()
    except TimeoutError:  # a test that runs out of time must not leave it at work
        process.kill()
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-20000:]
    await server.settle()
    after = await server.complete()
    assert after["choices"] == before["choices"]
