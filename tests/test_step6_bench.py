"""`make bench`: what the report says of figures, and programs that fail, hang or are stopped. No time is judged."""

import contextlib
import importlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from step0_monolith.options import UsageError
from step6_schedules.bench import MEASUREMENTS, ONLY_WHEN_NAMED, BenchOptions, main, planned
from step6_schedules.measure import report as report_module
from step6_schedules.measure.figures import Figure
from step6_schedules.measure.iterations import LIBRARYS, MONOLITH, OURS
from step6_schedules.measure.launch import Run, reason
from step6_schedules.measure.pictures import TIME, WORK, draw
from step6_schedules.measure.report import (
    REASONS,
    TITLES,
    UNKNOWN,
    Report,
    markdown,
    read_report,
    reason_for,
    shown,
    summary,
)
from tests.ranks import ROOT, end_job, job_environment, processes_of, python, run_command

BENCH = "step6_schedules.bench"
MET = Figure("time", "1f1b, tiny", 0.5, spread=(0.4, 0.6), goal=0.67, others=0.02, beside={"library, ms": 1234.5})
MISSED = replace(MET, case="gpipe, tiny", value=0.7)
DISTURBED = Figure("speed", "1f1b, large", 1.5, goal=1.2, at_most=False, others=0.25)
WITHOUT = Figure("speed", "x|y", 12.0, unit="ms", samples={OURS: [1.0, 2.5]})
CONDITIONS = {"cores": 2, "memory_gib": 24, "gpus": []}


def report(*runs: Run) -> Report:
    runs = runs or (
        Run("iterations", "torchrun a", 3.0, [MET, MISSED]),
        Run("iterations", "torchrun b", 3.5, error="it hangs"),
        Run("memory", "torchrun c", 3.0, [DISTURBED, WITHOUT]),
    )
    return Report("python -m it --quick", "2026-01-02 03:04", "abc123", 90.0, CONDITIONS, list(runs))


def test_report_shows_goals_misses_and_what_was_not_measured(monkeypatch):
    monkeypatch.setattr(report_module, "REASONS", {})
    text = markdown(report())
    lines = text.splitlines()
    assert lines[0].startswith("# ")
    assert "Written by `python -m it --quick` on 2026-01-02 03:04, at commit `abc123`; it took 1.50 minutes." in lines
    assert f"**{summary(report())}**" in lines
    assert "| memory, GiB | 24 |" in lines
    assert "| gpus | none |" in lines
    assert "| load of others | median 2%, worst 25% |" in lines
    assert "| 1f1b, tiny | 0.500 | 0.400 to 0.600 | ≤ 0.67 | met | 2% |" in lines
    assert "| gpipe, tiny | 0.700 | 0.400 to 0.600 | ≤ 0.67 | **MISSED** | 2% |" in lines
    assert f"- gpipe, tiny: {UNKNOWN}" in lines
    assert "| 1f1b, large | 1.50 |  | ≥ 1.2 | met | 25%, **disturbed** |" in lines
    assert "| x\\|y | 12.0 |  |  | no goal |  |" in lines
    assert "| 1f1b, tiny | 1,230 |" in lines
    assert "- `torchrun b`: **not measured**: it hangs" in lines
    assert [line[3:] for line in lines if line.startswith("## ")] == [TITLES["iterations"], TITLES["memory"]]


def test_every_table_has_as_many_cells_in_each_row():
    width = None
    for line in markdown(report()).replace("\\|", "").splitlines():
        cells = line.count("|") if line.startswith("|") else None
        assert width is None or cells in (None, width), line
        width = cells


def test_summary_counts_goals_and_says_what_is_not_in_it():
    assert summary(report()).startswith("2 of 3 goals met; 1 of 4 figures disturbed")
    assert "1 of 3 programs without figures" in summary(report())
    assert summary(report(Run("memory", "c", 1.0, [MET]))) == "1 of 1 goals met."


def test_outside_of_git():
    assert "outside of git" in markdown(replace(report(), commit=None))


def test_reason_is_that_of_the_narrowest_condition(monkeypatch):
    monkeypatch.setattr(
        report_module,
        "REASONS",
        {("time", "tiny"): "narrow", ("time", ""): "any", ("speed", "tiny, gpipe"): "other", ("time", "1f1b"): "no"},
    )
    assert reason_for(MISSED) == "narrow"
    assert reason_for(replace(MISSED, case="gpipe, large")) == "any"
    assert reason_for(replace(MISSED, family="speed")) == "other"
    assert reason_for(replace(MISSED, family="speed", case="gpipe, middle")) == UNKNOWN
    assert reason_for(MET) is None
    assert reason_for(replace(MISSED, goal=None)) is None
    assert "- gpipe, tiny: narrow" in markdown(report()).splitlines()


def test_reasons_are_sentences():
    assert all(family and text.strip() == text != "" for (family, _), text in REASONS.items())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.012345, "0.0123"), (1, "1.00"), (9.999, "10.0"), (123.4, "123"), (1234.5, "1,230"), (-2.5, "-2.50")],
)
def test_three_digits(value, text):
    assert shown(value) == text


def test_very_small_and_very_large_numbers_have_exponents():
    assert (shown(1.234e-7), shown(1.234e12), shown(float("inf"))) == ("1.23e-07", "1.23e+12", "inf")


def test_a_narrow_miss_does_not_look_met():
    narrow = replace(MET, value=0.67004)
    assert "| 1f1b, tiny | 0.67004 |" in markdown(report(Run("memory", "c", 1.0, [narrow])))


def test_report_survives_json(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report().to_json()))
    assert read_report("--rewrite", path) == report()
    verdicts = [figure["is_met"] for run in json.loads(path.read_text())["runs"] for figure in run["figures"]]
    assert verdicts == [True, False, True, None]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": 1}', '{"runs": [{"figures": [1]}]}'])
def test_a_file_that_is_no_report(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is no bench\.json"):
        read_report("--rewrite", path)


def test_pictures_are_those_that_there_are_figures_for(tmp_path):
    assert draw(report(), tmp_path) == []
    samples = {OURS: [1.0, 1.2, 1.1], LIBRARYS: [2.0, 2.2], MONOLITH: [1.0]}
    figures = [
        Figure(TIME, "1f1b, tiny", 0.5, samples=samples),
        Figure(TIME, "zb-v, large", 0.5, samples=samples),
        Figure(WORK, "1f1b, tiny", 1.3, spread=(1.2, 1.4), goal=1.4, beside={"library": 2.0, "ours with checks": 1.5}),
    ]
    emulated = [Figure("e", f"1f1b, P={p}, M=8", 1.02, spread=(1.01, 1.04), goal=1.03) for p in (4, 8, 16)]
    found = report(Run("iterations", "a", 1.0, figures), Run("emulated", "b", 1.0, emulated))
    pictures = draw(found, tmp_path)
    files = ["bench_tiny.png", "bench_large.png", "bench_work.png", "bench_emulated.png"]
    assert [picture.file for picture in pictures] == files
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    text = markdown(found, pictures)
    assert [text.count(f"]({file})") for file in files] == [1] * 4
    assert text.index("bench_work.png") < text.index(TITLES["emulated"]) < text.index("bench_emulated.png")


@pytest.mark.parametrize(
    ("status", "lines", "expected"),
    [
        (1, ["[rank1]: ValueError: x", "error: rank 0 cannot go on", "error: later"], "rank 0 cannot go on"),
        (
            1,
            ["Traceback (most recent call last):", "  raise", "[rank1]: a.OddError: x", "KeyError: 1"],
            "a.OddError: x",
        ),
        (1, ["/bin/python: No module named a.b", "torch.x.ChildFailedError: "], "No module named a.b"),
        (3, ["something"], "exit status 3"),
        (-9, [], "ended by signal 9"),
    ],
)
def test_reason_of_a_failure(status, lines, expected):
    assert reason(status, lines) == expected


def test_every_family_has_a_program_and_a_title():
    assert list(dict.fromkeys(one.family for one in MEASUREMENTS)) == list(TITLES)
    assert set(ONLY_WHEN_NAMED) <= set(TITLES)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("family", TITLES)
def test_every_program_takes_what_it_is_given(monkeypatch, family, quick):
    """Each says that the last argument is wrong, which it does when it knows all flags, and before it does anything."""
    runs = planned(BenchOptions(families=family, quick=quick, device="cpu"))
    assert runs
    for _, module, _, arguments in runs:
        monkeypatch.setattr(sys, "argv", [module, *arguments, "--json", "wrong.txt"])
        with pytest.raises(UsageError, match=r"^--json 'wrong\.txt' must end in \.json"):
            importlib.import_module(module).main()


def test_rounds_and_sizes():
    (iterations,) = [one for one in MEASUREMENTS if one.family == "iterations"]
    tiny, middle, _ = iterations.arguments(BenchOptions())
    assert tiny == ["--size", "tiny", "--rounds", "14"]
    assert middle == ["--size", "middle", "--rounds", "7"]
    assert iterations.arguments(BenchOptions(sizes="large", rounds="3")) == [["--size", "large", "--rounds", "3"]]
    (quick,) = iterations.arguments(BenchOptions(quick=True))
    assert quick == ["--size", "tiny", "--rounds", "2", "--schedules", "1f1b"]


# What plays the measuring programs: one that fails, one that is well, one whose ranks hear no SIGTERM and never end.
PLAYED = {
    "raises": "raise OSError('the disk is full of figures')",
    "well": """
import json, os, sys
from step6_schedules.measure.figures import Figure
assert os.environ["OMP_NUM_THREADS"] == "1" and os.environ["RES_OPTIONS"]
figure = Figure("a kind", "a case", 1.5, goal=2.0, samples={"ours": [1.5]})
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps([figure.to_json()]))
print("well:", *sys.argv[1:-2])
""",
    "silent": "",
    "hangs": """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("hangs", flush=True)
time.sleep(600)
""",
}
PLAYER = """
import step6_schedules.bench as bench
import step2_comms.spawn as launch
from step0_monolith.options import run_program
one = bench.Measurement
launch.ENDING_SECONDS = 1.0
bench.MEASUREMENTS = ({},)
run_program(bench.main)
"""


@pytest.fixture
def play(tmp_path):
    """Writes a bench of played programs, and returns its command and the environment that it needs."""
    for name, text in PLAYED.items():
        (tmp_path / f"played_{name}.py").write_text(text)

    def make(*measurements: str) -> tuple[list[str], dict[str, str]]:
        (tmp_path / "player.py").write_text(PLAYER.format(", ".join(f"one({text})" for text in measurements)))
        command = [sys.executable, str(tmp_path / "player.py"), "--out", str(tmp_path / "out"), "--device", "cpu"]
        return command, {"PYTHONPATH": f"{ROOT}:{tmp_path}"}

    return make


@pytest.mark.slow
def test_a_program_that_fails_is_reported_and_the_others_go_on(play, tmp_path):
    command, environment = play(
        "'actions', 'played_raises', ranks=(None,)",
        "'handover', 'played_silent', ranks=(None,)",
        "'memory', 'played_well', ranks=(None,)",
    )
    ran = run_command([*command, "--rounds", "3"], environment=environment)
    assert ran.status == 1, ran.text
    assert "OSError: the disk is full of figures" in ran.stderr
    assert "Traceback" in ran.stderr  # the program's own error is shown whole
    assert "well: --rounds 3 --device cpu" in ran.stdout
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(
        "error: not measured: python -m played_raises --rounds 3 --device cpu; python -m played_silent"
    )
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["RESULTS.md", "bench.json"]
    text = (out / "RESULTS.md").read_text()
    assert "- `python -m played_raises --rounds 3 --device cpu`: **not measured**: OSError: the disk is full" in text
    assert "**not measured**: it wrote no figures" in text
    assert "**1 of 1 goals met; 2 of 3 programs without figures" in text
    assert "| a case | 1.50 |  | ≤ 2 | met |  |" in text
    found = read_report("", out / "bench.json")
    assert [run.error is None for run in found.runs] == [False, False, True]
    assert found.runs[2].figures[0].samples == {"ours": [1.5]}
    assert found.command == f"python -m {BENCH} --out {out} --device cpu --rounds 3"


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_hangs_is_ended_with_its_ranks(play, tmp_path, number):
    command, environment = play("'memory', 'played_well', ranks=(None,)", "'actions', 'played_hangs', ranks=(2,)")
    job, variables = job_environment(environment)
    bench = subprocess.Popen(
        command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        # A shell has what it starts in the background ignore Ctrl-C, and the tests may have been started so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        while bench.stdout.readline() != "hangs\n":
            assert bench.poll() is None
        assert len(processes_of(job)) >= 3  # the bench, the launcher, and one rank or both
        bench.send_signal(number)
        time.sleep(0.3)
        bench.send_signal(signal.SIGINT)  # somebody is impatient
        # The second signal may end it before the first has.
        assert bench.wait(timeout=20) in (130, 128 + number)
        assert processes_of(job) == []
        assert list((tmp_path / "out").iterdir()) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            bench.kill()
        end_job(job)
        bench.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--families", "speed"], "--families 'speed' is unknown; choose one of: actions,"),
        (["--sizes", "tiny,huge"], "--sizes 'huge' is unknown"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--results", "x.txt"], "--results 'x.txt' must end in .md"),
        (["--results", "{here}/no/x.md"], "cannot be written"),
        (["--out", "{here}/file/out"], "cannot be made"),
        (["--device", "cuda"], "--device 'cuda' is unknown"),
        (["--rewrite", "{here}/none.json"], "cannot be read (No such file or directory)"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, arguments, message):
    (tmp_path / "file").touch()
    arguments = [argument.format(here=tmp_path) for argument in arguments]
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [BENCH, *out, *arguments])
    with pytest.raises(UsageError) as raised:
        main()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_mistake_has_status_2():
    ran = python(BENCH, "--families", "speed")
    assert (ran.status, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: --families 'speed' is unknown")


@pytest.mark.slow
def test_bench_from_end_to_end(tmp_path):
    out, results = tmp_path / "new" / "out", tmp_path / "other.md"
    command = ["--families", "iterations", "--quick", "--rounds", "1", "--device", "cpu", "--out", out]
    ran = python(BENCH, *command, "--results", results, limit=110)
    assert ran.status == 0, ran.text
    assert ran.stdout.splitlines()[-1].endswith(f"The tables are in {results}.")
    text = results.read_text()
    assert f"python -m {BENCH} --families iterations --quick" in text
    pictures = ["bench_tiny.png", "bench_work.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*pictures, "new", "other.md"]
    assert [path.name for path in out.iterdir()] == ["bench.json"]
    found = read_report("", out / "bench.json")
    assert found.conditions["cores"]
    (run,) = found.runs
    assert run.error is None
    assert {figure.case for figure in run.figures} == {"1f1b, tiny"}
    assert all(samples for figure in run.figures for samples in figure.samples.values())
    for figure in run.figures:
        assert f"| {figure.case} | {shown(figure.value)} |" in text or figure.is_met is False
    # The same tables come from the file of figures again, and nothing is measured.
    again = python(BENCH, "--rewrite", out / "bench.json", "--out", tmp_path / "again")
    assert again.status == 0, again.text
    assert "$ " not in again.stdout
    assert (tmp_path / "again" / "RESULTS.md").read_text() == text
