"""Runs a notebook from its first cell to its last in a fresh kernel of this very Python."""

import asyncio
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
CELL_SECONDS = 120
# None of the user's own settings, start-up files and histories.
SETTINGS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")


class CellFailed(Exception):
    """A cell ended with an error, or not in time; the message names it."""


def kernel_manager(folder: str) -> AsyncKernelManager:
    """A kernel of this Python, whatever kernels are installed. folder: of its sockets: nobody else can listen."""
    manager = AsyncKernelManager(transport="ipc", ip=f"{folder}/kernel")
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--HistoryManager.enabled=False"]
    manager._kernel_spec = KernelSpec(argv=command, display_name="Python 3", language="python")
    return manager


@contextlib.contextmanager
def settings_of_its_own() -> Iterator[str]:
    """Inside, Jupyter and IPython find no settings of the user's, but an empty folder, which is given."""
    with tempfile.TemporaryDirectory() as folder:
        before = {name: os.environ.get(name) for name in SETTINGS}
        os.environ |= dict.fromkeys(SETTINGS, folder)
        try:
            yield folder
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def execute(notebook: NotebookNode, name: str) -> None:
    """Runs all cells; their outputs are then those of this run. Raises CellFailed for the first that fails."""
    with settings_of_its_own() as folder:
        manager = kernel_manager(folder)
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=CELL_SECONDS,
            resources={"metadata": {"path": str(FOLDER)}},
            store_widget_state=False,
            record_timing=False,
        )
        try:
            asyncio.run(_to_its_end(client, manager))
        except (CellExecutionError, CellTimeoutError, DeadKernelError, RuntimeError) as error:
            index = next((n for n, cell in enumerate(notebook.cells) if _has_failed(cell)), None)
            where = "" if index is None else f", cell {index + 1}"
            raise CellFailed(f"{name}{where}: {_reason(error)}") from None


async def _to_its_end(client: NotebookClient, manager: AsyncKernelManager) -> None:
    try:
        await client.async_execute()
    finally:
        if manager.has_kernel:  # the client ends only kernels that it has made itself
            await manager.shutdown_kernel()


def _has_failed(cell: NotebookNode) -> bool:
    return not is_meant_to_fail(cell) and any(output.output_type == "error" for output in outputs_of(cell))


def outputs_of(cell: NotebookNode) -> list[NotebookNode]:
    """A cell's outputs; none of a text cell."""
    return cell.get("outputs", [])


def is_meant_to_fail(cell: NotebookNode) -> bool:
    """Whether the cell may raise."""
    return "raises-exception" in cell.metadata.get("tags", [])


def _reason(error: Exception) -> str:
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0 if isinstance(error, CellTimeoutError) else -1]


def read(path: Path) -> NotebookNode:
    """A notebook from its file."""
    return nbformat.read(path, as_version=4)
