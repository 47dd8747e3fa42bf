"""The notebook as it is in the repository: clean, and it runs."""

import json
import os
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "continuous_batching.ipynb"
LONGEST = 600  # seconds on two cores


def cells():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_it_is_committed_without_outputs_and_compiles():
    for cell in cells():
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            compile("".join(cell["source"]), cell["id"], "exec")
    assert NOTEBOOK.stat().st_size < 30_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("default")
def test_it_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="make test-notebooks installs it")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    begin = time.monotonic()
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    took = time.monotonic() - begin
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert kinds.count("image/png") >= 4
    printed = "".join(
        output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "stream"
    )
    assert "The capital of France is" in printed
    assert "max_num_batched_tokens" in printed
    print(f"the notebook took {took:.0f} s")
    assert took < LONGEST
