"""One server with the default model for every client, and each client in an environment of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv" / "clients"
FLAGS = ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--max-model-len", "2048", "--dtype", "float32"]
KEY = "client-key-1"


@dataclass(frozen=True)
class Target:
    """Where clients find the server, and what they must show."""

    url: str
    model: str
    key: str
    tokenizer: Path

    def get(self, path):
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request) as response:
            return response.read().decode()

    def metric(self, name):
        """Sum of a metric's samples."""
        rows = [line for line in self.get("/metrics").splitlines() if re.match(rf"{name}(\{{| )", line)]
        return sum(float(row.rpartition(" ")[2]) for row in rows)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.write_text(KEY + "\n")
    tokenizer = folder / "tokenizer"
    subprocess.run([sys.executable, "-m", "jcb", "export-tokenizer", "default", tokenizer], check=True, cwd=ROOT)
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION")}
    process = subprocess.Popen(
        [sys.executable, "serve.py", "--port", "0", "--api-key-file", keys, *FLAGS],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    log = []
    for line in process.stdout:
        log.append(line)
        if found := re.search(r"jcb is ready: (http://\S+)", line):
            break
    else:
        raise AssertionError("".join(log))
    made = Target(found[1], "", KEY, tokenizer)
    name = json.loads(made.get("/v1/models"))["data"][0]["id"]
    yield Target(found[1], name, KEY, tokenizer)
    errors = made.metric("jcb:request_errors_total")
    compiled = made.metric("jcb:compiles_after_ready_total")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output[-3000:]
    assert (errors, compiled) == (0, 0)


@pytest.fixture
def run(target, tmp_path):
    """Runs a command of a client's environment; its output. Skips the test where that is not installed."""

    def run(client, *command, text=None, timeout=300, **extra):
        program = CLIENTS / client / "bin" / command[0]
        if not program.exists():
            pytest.skip(f"{client} is not installed: make test-clients")
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(tmp_path), "OPENAI_API_KEY": target.key, "HF_HUB_OFFLINE": "1",
            "JCB_URL": target.url, "JCB_MODEL": target.model, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **extra,
        }  # fmt: skip
        done = subprocess.run(
            [program, *command[1:]], input=text, capture_output=True, text=True, timeout=timeout, cwd=tmp_path,
            env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    return run
