"""The notebook: every cell runs, with two processes started by it, and its stored outputs are those of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def printed(notebook: Any) -> str:
    """The text that its cells have printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert all(output["output_type"] == "stream" for output in outputs)
    return "".join(output["text"] for output in outputs)


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"epoch \d+: loss ([\d.]+)", text)]


def test_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install '.[examples]'")
    from nbclient import NotebookClient  # its kernel is started with `subprocess`

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    stored = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    for cell in fresh.cells:
        cell.pop("outputs", None)
    NotebookClient(fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    found, kept = losses(printed(fresh)), losses(printed(stored))
    assert len(found) == len(kept) == 4 and found[-1] < found[0] < 0.5
    assert "manifest.json model.safetensors" in printed(fresh)
    assert printed(stored).count("\n") < 20 and "Traceback" not in printed(stored)
