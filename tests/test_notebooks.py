"""The notebooks: how they are built, that they run, and that what they show still holds."""

import asyncio
import copy
import re
import shutil
import time

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook, new_output

from notebooks import execute as execute_module
from notebooks.execute import FOLDER, CellFailed, execute, kernel_manager, outputs_of, read, settings_of_its_own
from notebooks.outputs import clean, difference
from notebooks.refresh import chosen, main, text_of
from step0_monolith.options import RunError, UsageError
from step2_comms.spawn import MARK
from tests.ranks import ROOT

NAMES = ["0_monolith", "1_partition", "2_comms", "3_pingpong", "4_sharded", "5_orchestrator", "6_schedules",
         "7_playground"]  # fmt: skip
FIRST_CELL = """\
import sys
from pathlib import Path

here = [Path.cwd(), *Path.cwd().parents]
root = next((folder for folder in here if (folder / "step0_monolith").is_dir()), None)
if root is None:
    raise SystemExit("The course is not here: clone its repository, go into its folder, and start again.")
sys.path.insert(0, str(root))

from notebooks.walk import setup

setup()"""
TAGS = {"guess", "measured", "machine", "trained", "exercise", "check", "fails", "raises-exception"}
NOISE = re.compile(
    r"/(home|root|tmp|work|Users|mnt)/|Warning|Traceback|\b20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d|\bpid\b", re.I
)


def tags_of(cell) -> set[str]:
    return set(cell.metadata.get("tags", ()))


def cells_with(notebook, tag: str) -> list[int]:
    return [n for n, cell in enumerate(notebook.cells) if tag in tags_of(cell)]


def text_in(cell) -> str:
    return "".join(output.get("text", "") + str(output.get("evalue", "")) for output in outputs_of(cell))


def test_there_is_one_for_each_step_and_a_playground():
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_follows_its_lesson(name):
    """Title, first cell, predict, run, look, break it, exercise with its check, summary."""
    notebook = read(FOLDER / f"{name}.ipynb")
    nbformat.validate(notebook)
    cells = notebook.cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith(f"# {name[0]} · ")
    assert cells[1].source == FIRST_CELL
    assert set().union(*map(tags_of, cells)) <= TAGS
    headings = re.findall(r"^## (.*)$", "\n".join(cell.source for cell in cells if cell.cell_type == "markdown"), re.M)
    assert "Predict" in headings
    assert "Break it" in headings
    assert headings[-1].startswith("Summary")
    assert headings[-2].startswith("Exercise")
    (guess,) = cells_with(notebook, "guess")
    assert re.fullmatch(r"my_\w+ = None", cells[guess].source)
    assert "guess(" in cells[guess + 1].source
    number = re.search(r": ([\d.,]+) \(no guess yet", text_in(cells[guess + 1]))[1]
    before = "".join(cell.source + text_in(cell) for cell in cells[:guess])
    if len(number) > 1:  # a small number is in every text
        assert number.replace(",", "") not in before.replace(",", ""), "the number is shown before it is guessed"
    assert "no guess yet: write a number into the cell above" in text_in(cells[guess + 1])
    for index in cells_with(notebook, "fails"):
        assert cells[index + 1].cell_type == "markdown", "what fails is explained"
    assert cells_with(notebook, "fails")
    exercises = cells_with(notebook, "exercise")
    assert exercises
    for index in exercises:
        assert cells[index].source == "answer = None"
        assert "check" in tags_of(cells[index + 1])
        assert text_in(cells[index + 1]).startswith("not done yet: ")


@pytest.mark.parametrize("name", NAMES)
def test_each_reads_well_without_running(name):
    """Outputs and pictures are there, and no noise in them; the cells import and call, and define nothing."""
    notebook = read(FOLDER / f"{name}.ipynb")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for cell in code for output in outputs_of(cell))
    for cell in code:
        assert not re.search(r"^\s*(def|class|lambda) |input\(", cell.source, re.M), "logic belongs into the steps"
        assert not NOISE.search(text_in(cell)), text_in(cell)
        for output in outputs_of(cell):
            assert output.get("name", "stdout") == "stdout"
            assert output.output_type != "error"
    stored = copy.deepcopy(notebook)
    clean(stored)
    assert text_of(stored) == (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"), "make notebooks stores it cleaner"
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 600_000


def test_links_lead_somewhere():
    for name in NAMES:
        for cell in read(FOLDER / f"{name}.ipynb").cells:
            links = re.findall(r"\]\(([^)#]+)\)", cell.source) if cell.cell_type == "markdown" else []
            missing = [link for link in links if not link.startswith("http") and not (FOLDER / link).exists()]
            assert not missing, (name, missing)


def assert_still_holds(name: str) -> None:
    """Runs it anew, and compares each cell's output with the stored one."""
    stored = read(FOLDER / f"{name}.ipynb")
    notebook = copy.deepcopy(stored)
    execute(notebook, name)
    clean(notebook)
    clean(stored)
    for number, (cell, old) in enumerate(zip(notebook.cells, stored.cells, strict=True), 1):
        if cell.cell_type == "code":
            wrong = difference(cell, outputs_of(old), outputs_of(cell))
            assert not wrong, f"{name}, cell {number}: {wrong}"


@pytest.mark.timeout(150)
def test_the_first_one_runs_and_what_it_shows_holds():
    assert_still_holds("0_monolith")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES[1:])
def test_the_others_run_and_what_they_show_holds(name):
    assert_still_holds(name)


# Kernels and ranks


def run_cells(sources: list[str], tags: list[list[str]] | None = None):
    """A notebook of these cells after the first one, executed."""
    cells = [new_code_cell(FIRST_CELL), *map(new_code_cell, sources)]
    for cell, some in zip(cells[1:], tags or [], strict=False):
        cell.metadata["tags"] = some
    notebook = new_notebook(cells=cells)
    execute(notebook, "test")
    return notebook


LAUNCH = 'from notebooks.walk import torchrun\ntorchrun(2, "step2_comms")'


@pytest.mark.slow
def test_the_launching_cell_run_twice_shows_all_ranks_both_times():
    notebook = run_cells([LAUNCH, LAUNCH])
    for cell in notebook.cells[1:]:
        assert "verified on 2 ranks" in text_in(cell)
        assert text_in(cell).count("cpu     gloo") == 2


FAILING = 'from notebooks.walk import torchrun\ntorchrun(2, "step6_schedules", "--schedule nope")'


@pytest.mark.slow
def test_a_failed_child_raises_in_the_cell():
    notebook = run_cells([FAILING], [["raises-exception"]])
    clean(notebook)
    (error,) = [output for output in outputs_of(notebook.cells[1]) if output.output_type == "error"]
    assert error.traceback == [f"ProgramFailed: {error.evalue}"]
    assert error.evalue.startswith("exit status 1: --schedule 'nope' is unknown; the known ones are: naive,")


@pytest.mark.slow
def test_what_was_meant_to_fail_and_did_not_raises():
    with pytest.raises(CellFailed, match="it was meant to fail, and did not"):
        run_cells(['from notebooks.walk import python\npython("step1_partition.break_it", fails=True)'])


LONG = (
    'from notebooks.walk import torchrun\n'
    'torchrun(2, "step6_schedules", "--emulate F=200,B=200 --num-iterations 300 --data random")'
)  # fmt: skip


def ranks_alive() -> list[psutil.Process]:
    """Processes that a cell of this test has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK, "").strip():
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition, limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.mark.parametrize("way", ["interrupt", pytest.param("kill", marks=pytest.mark.slow)])
def test_no_rank_survives_the_end_of_a_cell_that_launched_them(way):
    """An interrupt, as the button sends it, and the death of the kernel."""

    async def play() -> str:
        with settings_of_its_own() as folder:
            manager = kernel_manager(folder)
            notebook = new_notebook(cells=[new_code_cell(FIRST_CELL), new_code_cell(LONG)])
            path = {"metadata": {"path": str(FOLDER)}}
            client = NotebookClient(notebook, km=manager, timeout=100, resources=path, allow_errors=True)
            running = asyncio.ensure_future(client.async_execute())
            # launcher and two ranks
            while len(ranks_alive()) < 3 and not running.done():
                await asyncio.sleep(0.1)
            await asyncio.sleep(2.5 if way == "kill" else 0.5)  # a killed kernel tells nobody: ranks must be there
            assert not running.done(), text_in(notebook.cells[1])
            await (manager.interrupt_kernel() if way == "interrupt" else manager.shutdown_kernel(now=True))
            try:
                await asyncio.wait_for(running, 40)
            except Exception as error:
                return type(error).__name__
            finally:
                if manager.has_kernel:
                    await manager.shutdown_kernel(now=True)
            return "".join(output.get("ename", "") for output in outputs_of(notebook.cells[1]))

    ended = asyncio.run(play())
    assert wait_until(lambda: not ranks_alive(), 20), ranks_alive()
    if way == "interrupt":
        assert ended == "KeyboardInterrupt"


# What is compared


def cell_of(text: str, tags: tuple[str, ...] = (), picture: bytes | None = None):
    cell = new_code_cell("x")
    cell.metadata["tags"] = list(tags)
    cell.outputs = [new_output("stream", name="stdout", text=text)]
    if picture is not None:
        cell.outputs.append(new_output("display_data", data={"image/png": picture}))
    return cell


COMPARED = [
    ("bubble 0.273\n", "bubble 0.273\n", (), ""),
    ("bubble 0.273\n", "bubble 0.274\n", (), "printed 'bubble 0.274', not 'bubble 0.273'"),
    ("a\nb\n", "a\n", (), "printed 1 lines, not 2; the first of the others is 'b'"),
    ("took 0.5 ms\n", "took 12.25 ms\n", ("measured",), ""),
    ("  980.25 MB/s\n", "1,009.39 MB/s\n", ("measured",), ""),
    ("took 0.5 ms\n", "took 0.5 s\n", ("measured",), "printed 'took # s', not 'took # ms'"),
    ("loss 0.3523\n", "loss 0.3541\n", ("trained",), ""),
    ("loss 0.3523\n", "loss 0.4541\n", ("trained",), "printed 'loss 0.4541', not 'loss 0.3523'"),
    ("layers 8\n", "layers 9\n", ("trained",), "printed 'layers 9', not 'layers 8'"),
    ("anything", "else", ("machine",), ""),
    (f"hash {'0a' * 32}\n", f"hash {'1b' * 32}\n", (), ""),
    ("error: rank 1 waits\nerror: rank 0 waits\n", "error: rank 0 waits\n", (), ""),
    ("error: rank 1 waits\n", "error: rank 1 sleeps\n", (), "printed the errors ['error: rank # sleeps'], not ['error: rank # waits']"),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "tags", "wrong"), COMPARED)
def test_what_counts_as_the_same(old, new, tags, wrong):
    assert difference(cell_of("", tags), cell_of(old).outputs, cell_of(new).outputs) == wrong


def test_pictures_must_have_one_size():
    import base64
    import struct

    heads = (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, 5) for width in (4, 6))
    small, large = (base64.b64encode(head).decode() for head in heads)
    assert difference(cell_of(""), cell_of("", picture=small).outputs, cell_of("", picture=small).outputs) == ""
    assert "pictures of [(6, 5)] pixels, not [(4, 5)]" in difference(
        cell_of(""), cell_of("", picture=small).outputs, cell_of("", picture=large).outputs
    )


def test_noise_is_taken_out():
    cell = new_code_cell("x", metadata={"execution": {"iopub.status.busy": "now"}, "tags": ["measured"]})
    cell.outputs = [
        new_output("stream", name="stdout", text=f"\x1b[31min {ROOT}/out"),
        new_output("stream", name="stdout", text="/a\n"),
        new_output("error", ename="ValueError", evalue="bad", traceback=[f"File {ROOT}/x.py, line 3"]),
        new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": "7f"}}),
        new_output("execute_result", data={"text/plain": "3", "text/latex": "$3$"}, execution_count=17),
    ]
    notebook = new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    clean(notebook)
    assert dict(cell.metadata) == {"tags": ["measured"]}
    assert [dict(output) for output in cell.outputs] == [
        {"output_type": "stream", "name": "stdout", "text": "in out/a\n"},
        {"output_type": "error", "ename": "ValueError", "evalue": "bad", "traceback": ["ValueError: bad"]},
        {"output_type": "execute_result", "data": {"text/plain": "3"}, "metadata": {}, "execution_count": 1},
    ]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


# Refreshing


@pytest.mark.slow
def test_refreshing_keeps_what_still_holds_finds_what_does_not_and_leaves_a_failed_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("notebooks.refresh.FOLDER", tmp_path)
    monkeypatch.setattr("notebooks.refresh.chosen", lambda names: chosen(names, tmp_path))
    cells = [new_code_cell("print(1 + 1)"), new_code_cell("import time\nprint(time.time())")]
    cells[1].metadata["tags"] = ["measured"]
    file, bad = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    nbformat.write(new_notebook(cells=cells), file)
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0")]), bad)
    before = bad.read_bytes()
    monkeypatch.setattr("sys.argv", ["refresh"])
    with pytest.raises(RunError, match=r"^b.ipynb, cell 1: ZeroDivisionError: division by zero$"):
        main()
    first = file.read_bytes()
    assert bad.read_bytes() == before
    monkeypatch.setattr("sys.argv", ["refresh", "a"])
    main()
    assert file.read_bytes() == first  # though the time has gone on
    file.write_bytes(first.replace(b'"2\\n"', b'"3\\n"'))
    main()
    assert file.read_bytes() == first
    assert capsys.readouterr().out.splitlines()[-2:] == ["a.ipynb ... as it was", "a.ipynb ... refreshed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ipynb", "b.ipynb"]


def test_a_notebook_that_is_not_there():
    with pytest.raises(UsageError, match="there is no notebook '9_more'; choose from 0_monolith, 1_partition"):
        chosen(["9_more"])


def test_a_cell_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(execute_module, "CELL_SECONDS", 1)
    with pytest.raises(CellFailed, match=r"^test.*(timed out|Timeout)"):
        execute(new_notebook(cells=[new_code_cell("while True: pass")]), "test")


def test_the_first_cell_elsewhere_says_what_to_do(tmp_path, monkeypatch):
    """As in Colab before the repository is cloned."""
    shutil.copy(FOLDER / "0_monolith.ipynb", tmp_path / "alone.ipynb")
    monkeypatch.setattr(execute_module, "FOLDER", tmp_path)
    notebook = read(tmp_path / "alone.ipynb")
    with pytest.raises(CellFailed, match="The course is not here: clone its repository, go into its folder"):
        execute(new_notebook(cells=notebook.cells[:2]), "alone")


def test_missing_packages_are_named_with_the_command(monkeypatch):
    from notebooks import walk

    monkeypatch.setitem(walk.NEEDED, "no_such_module", "no-such-package")
    monkeypatch.chdir(ROOT)
    with pytest.raises(walk.ProgramFailed, match=r"not installed: no-such-package. Run `%pip install -r require"):
        walk.setup()
