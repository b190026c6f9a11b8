"""examples/trajectory.ipynb shows what a run of it gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deadlines import HANG_S
from wheels import ROOT

for _needed in ("ipykernel", "matplotlib", "nbclient"):
    pytest.importorskip(_needed, reason=f"needs {_needed}")

import nbformat  # noqa: E402  # it comes with nbclient
from nbclient import NotebookClient  # noqa: E402

NOTEBOOK = ROOT / "examples" / "trajectory.ipynb"


def shown(notebook: Any) -> list[Any]:
    """The outputs that are the same in each run: all but the pictures."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = {kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"}
            found.append((output["output_type"], output.get("name"), output.get("text"), data))
    return found


@pytest.fixture(scope="module")
def committed() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_a_run_gives_what_the_notebook_shows(
    committed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel keeps its files, and the fonts that matplotlib finds, away from the home directory.
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    run = nbformat.from_dict(json.loads(json.dumps(committed)))
    for cell in run.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(run, kernel_name="python3", timeout=HANG_S).execute()
    assert shown(run) == shown(committed), (
        "run it again: jupyter nbconvert --execute --inplace examples/trajectory.ipynb"
    )


def test_the_notebook_shows_a_fork_a_picture_and_tokens_that_differ(committed: Any) -> None:
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    conversation, tokens, picture, differences = (cell.outputs[-1] for cell in code)
    assert "complete: True" in conversation["text"]
    assert "sample 1: exact True" in conversation["text"]
    assert "parent {'index': 0, 'tokens': " in conversation["text"]
    assert "<th>loss mask</th><th>logprob</th>" in tokens["data"]["text/html"]
    assert picture["data"]["image/png"]
    assert differences["data"]["text/html"].count("<tr>") > 2
