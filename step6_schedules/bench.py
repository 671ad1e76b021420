"""python -m step6_schedules.bench: what it all costs, measured by one program after another on a machine at rest.

Writes all figures with their samples (bench.json), the tables (RESULTS.md) and pictures (bench_*.png). Stopped with
Ctrl-C, it writes nothing. The exit status is 1 when a program failed; what the others measured is written all the same.
"""

import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from step0_monolith.files import check_writable, write_whole
from step0_monolith.options import (
    Options,
    RunError,
    UsageError,
    folder,
    one_of,
    option,
    optional,
    output_file,
    parse,
    run_program,
    switch,
    whole,
)
from step6_schedules.measure.launch import ending_on_signals, run
from step6_schedules.measure.load import conditions
from step6_schedules.measure.pictures import draw
from step6_schedules.measure.program import SIZES, chosen_from
from step6_schedules.measure.report import TITLES, Report, markdown, read_report, summary

PROGRAM = "python -m step6_schedules.bench"


@dataclass(frozen=True)
class BenchOptions(Options):
    """What is measured, how often, and where it is written."""

    out: Path = option(Path("out/bench"), folder, "directory of the results, made where it is not there")
    results: Path | None = option(
        None, optional(output_file(".md")), "file for the tables; pictures go beside it (default: RESULTS.md in --out)"
    )
    families: tuple[str, ...] | None = option(
        None, optional(chosen_from(TITLES)), f"some of {','.join(TITLES)} (default: all but suite)"
    )
    sizes: tuple[str, ...] | None = option(
        None, optional(chosen_from(SIZES)), f"some of {','.join(SIZES)} (default: all; with --quick tiny)"
    )
    rounds: int | None = option(
        None, optional(whole(1, 1000)), "rounds of each, twice as many on tiny (default: 7; with --quick 2 everywhere)"
    )
    quick: bool = option(False, switch, "few rounds of the smallest size and one schedule, to see that all runs")
    device: str = option("auto", one_of("auto", "cpu"), "auto: CUDA for programs with a GPU for each rank")
    rewrite: Path | None = option(
        None, optional(output_file(".json")), "measure nothing; make tables and pictures of an earlier bench.json again"
    )

    def rounds_on(self, size: str) -> int:
        """How many rounds a size gets ("": a program that knows none)."""
        if self.quick:
            return self.rounds or 2
        return (self.rounds or 7) * (2 if size == "tiny" else 1)

    def only_schedule(self) -> list[str]:
        """The flag of programs that measure several schedules."""
        return ["--schedules", "1f1b"] if self.quick else []

    def device_for(self, num_ranks: int) -> str:
        """Where so many ranks compute."""
        return "cuda" if self.device == "auto" and torch.cuda.device_count() >= num_ranks else "cpu"


def _once(options: BenchOptions) -> list[list[str]]:
    return [["--rounds", str(options.rounds_on(""))]]


def _no_rounds(options: BenchOptions) -> list[list[str]]:
    return [[]]


def _once_each_schedule(options: BenchOptions) -> list[list[str]]:
    return [[*arguments, *options.only_schedule()] for arguments in _once(options)]


def _each_size(options: BenchOptions) -> list[list[str]]:
    sizes = options.sizes or (("tiny",) if options.quick else SIZES)
    return [["--size", size, "--rounds", str(options.rounds_on(size)), *options.only_schedule()] for size in sizes]


@dataclass(frozen=True)
class Measurement:
    """A program that measures. ranks: it is run with each of these numbers; None: in one process, without torchrun.

    arguments: it is run with each of these lists. takes_device: it has the flag --device.
    """

    family: str
    module: str
    ranks: tuple[int | None, ...] = (2,)
    arguments: Callable[[BenchOptions], list[list[str]]] = _once
    takes_device: bool = True


MEASURE = "step6_schedules.measure"
MEASUREMENTS = (
    Measurement("actions", f"{MEASURE}.actions", ranks=(1,), arguments=_once_each_schedule),
    Measurement("iterations", f"{MEASURE}.iterations", arguments=_each_size),
    Measurement("handover", f"{MEASURE}.handover", arguments=_once_each_schedule),
    Measurement("emulated", f"{MEASURE}.emulated", ranks=(4, 8), arguments=_once_each_schedule),
    Measurement("memory", f"{MEASURE}.memory"),
    Measurement("tracing", f"{MEASURE}.tracing", arguments=_each_size),
    Measurement("messages", f"{MEASURE}.messages"),
    Measurement("startup", f"{MEASURE}.startup", ranks=(None,), takes_device=False),
    Measurement("preparation", f"{MEASURE}.preparation", ranks=(None,), takes_device=False),
    Measurement("wins", f"{MEASURE}.wins", ranks=(None,), takes_device=False),
    Measurement("suite", f"{MEASURE}.suite", ranks=(None,), arguments=_no_rounds, takes_device=False),
)
ONLY_WHEN_NAMED = ("suite",)  # it takes minutes, and measures the tests, not the course


def planned(options: BenchOptions) -> list[tuple[str, str, int | None, list[str]]]:
    """Family, module, number of ranks and arguments of each run of the chosen programs."""
    chosen = options.families or [name for name in TITLES if name not in ONLY_WHEN_NAMED]
    found = []
    for one in MEASUREMENTS:
        if one.family in chosen:
            for ranks, arguments in itertools.product(one.ranks, one.arguments(options)):
                device = ["--device", options.device_for(ranks)] if one.takes_device else []
                found.append((one.family, one.module, ranks, [*arguments, *device]))
    return found


def prepare(options: BenchOptions) -> Path:
    """Makes the directory, and returns the file for the tables. Raises UsageError where nothing can be written."""
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {str(options.out)!r} cannot be made ({error.strerror}); choose another place"
        ) from None
    check_writable("--out", options.out / "bench.json")
    results = options.results or options.out / "RESULTS.md"
    check_writable("--results" if options.results else "--out", results)
    return results


def commit() -> str | None:
    """The commit that is measured, and whether files differ from it; None without git."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" and changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def main() -> None:
    """Measures, and writes what was found."""
    (options,) = parse(PROGRAM, __doc__, {BenchOptions: None})
    report = read_report("--rewrite", options.rewrite) if options.rewrite else None
    results = prepare(options)
    if report is None:
        now, began = datetime.now().astimezone(), time.monotonic()
        version = commit()  # as it is at the start, when the programs are read
        with ending_on_signals():
            runs = [run(*one) for one in planned(options)]
        command, seconds = shlex.join([*PROGRAM.split(), *sys.argv[1:]]), time.monotonic() - began
        report = Report(command, now.isoformat(" ", "minutes"), version, seconds, conditions(), runs)
        text = json.dumps(report.to_json(), indent=1)
        write_whole(options.out / "bench.json", lambda file: file.write_text(text, encoding="utf-8"))
    tables = markdown(report, draw(report, results.parent))
    write_whole(results, lambda file: file.write_text(tables, encoding="utf-8"))
    print(f"\n{summary(report)} The tables are in {results}.")
    if failed := [one.command for one in report.runs if one.error]:
        raise RunError(f"not measured: {'; '.join(failed)}")


if __name__ == "__main__":
    run_program(main)
