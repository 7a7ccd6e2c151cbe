"""Run the notebooks and keep their outputs: ``python notebooks/run.py``.

The extra ``notebooks`` brings what they need.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SECONDS = 120


def run(path: Path) -> nbformat.NotebookNode:
    """Execute a notebook from top to bottom in a kernel of its own; the file stays as it is.

    Raises:
      nbclient.exceptions.CellExecutionError: If a cell raises.
      nbclient.exceptions.CellTimeoutError: If a cell takes longer than two minutes.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        shutdown_kernel="immediate",  # torch takes a second to take itself down
        resources=resources,
    )
    return client.execute()


if __name__ == "__main__":
    for notebook in sorted(HERE.glob("*.ipynb")):
        nbformat.write(run(notebook), notebook)
