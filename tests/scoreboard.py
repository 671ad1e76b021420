"""The scoreboard at the end of the tests: for each step what passed, failed and could not run, and why.

A test marked `gpu`, `root` or `browser` is skipped where the machine has none; REQUIRE=gpu,root,browser in the
environment makes it fail instead. `--step 3` runs the tests and the lesson of one step. The run also fails when it ran
no test at all, and when a process that it started outlives it.
"""

import os
import re
import shutil
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

STEPS = range(7)
GROUPS = [*(f"step {step}" for step in STEPS), "lessons", "notebooks", "course", "repository"]
MARK = "PIPELINE_COURSE_TESTS"
MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", MAC_CHROME)


def _has_gpu() -> bool:
    import torch  # here, since it takes seconds and few tests ask

    return torch.cuda.is_available()


# word in REQUIRE and name of the marker -> (why a test was not run, whether the machine has it)
NEEDS = {
    "gpu": ("no GPU", _has_gpu),
    "root": ("not root", lambda: os.geteuid() == 0),
    "browser": ("no browser", lambda: bool(shutil.which("chromedriver")) and any(map(shutil.which, BROWSERS))),
}


def group_of(nodeid: str) -> str:
    """The scoreboard's line that a test or test module belongs to."""
    module = Path(nodeid.split("::")[0]).stem
    if match := re.match(r"test_step(\d)_", module):
        return f"step {match[1]}"
    return next(
        (group for group in ("lessons", "notebooks", "course") if module.startswith(f"test_{group}")), "repository"
    )


@dataclass
class Line:
    """What became of a group's tests; `results` maps a test to passed, failed or not run."""

    results: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, result: str) -> int:
        return sum(value == result for value in self.results.values())

    def put(self, test: str, result: str, reason: str = "") -> None:
        """Notes a later result in place of an earlier one, but a test that once failed stays failed."""
        if self.results.get(test) != "failed":
            self.results[test] = result
            self.reasons[test] = reason

    def why(self) -> str:
        counted = Counter(self.reasons[test] for test, result in self.results.items() if result == "not run")
        return ", ".join(f"{count} {reason}" for reason, count in counted.most_common())


def required_words(text: str) -> set[str]:
    """The words of REQUIRE; raises pytest.UsageError for one that is unknown."""
    words = set(text.replace(",", " ").split())
    if unknown := words - set(NEEDS):
        raise pytest.UsageError(
            f"REQUIRE={text!r}: {', '.join(sorted(unknown))} is unknown; choose from {','.join(NEEDS)}"
        )
    return words


def pytest_addoption(parser):
    parser.addoption("--step", type=int, choices=STEPS, help="run the tests and the lesson of one step only")


def pytest_configure(config):
    required = required_words(os.environ.get("REQUIRE", ""))
    config.pluginmanager.register(Scoreboard(config, required), "scoreboard")


class Scoreboard:
    """Collects the results, and prints them after pytest's own closing line."""

    def __init__(self, config, required: set[str]) -> None:
        self.config = config
        self.step = config.getoption("--step")
        self.required = required
        self.lines: dict[str, Line] = defaultdict(Line)
        self.left_out = 0
        self._has: dict[str, bool] = {}
        self._mark = uuid.uuid4().hex
        # Inherited by everything that the tests start, so that what outlives them can be found.
        os.environ[MARK] = self._mark

    def pytest_ignore_collect(self, collection_path):
        name = collection_path.name
        if self.step is None or not name.startswith("test_") or name == "test_lessons.py":
            return None
        return True if not name.startswith(f"test_step{self.step}_") else None

    def pytest_collection_modifyitems(self, config, items):
        if self.step is None:
            return
        kept = [i for i in items if group_of(i.nodeid) != "lessons" or f"[step{self.step}_" in i.nodeid]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_deselected(self, items):
        self.left_out += sum(item.get_closest_marker("slow") is not None for item in items)

    def pytest_runtest_setup(self, item):
        for word, (reason, has) in NEEDS.items():
            if item.get_closest_marker(word):
                if word not in self._has:
                    self._has[word] = has()
                if not self._has[word]:
                    pytest.skip(reason)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        return self._fail_if_required((yield))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        return self._fail_if_required((yield))

    def _fail_if_required(self, report):
        reason = _skip_reason(report)
        for word in self.required:
            if reason.startswith(NEEDS[word][0]):
                report.outcome = "failed"
                report.longrepr = f"not run: {reason}, and REQUIRE asks for {word}"
        return report

    def pytest_collectreport(self, report):
        if report.failed:
            self.lines[group_of(report.nodeid)].put(report.nodeid, "failed")
        elif report.skipped:
            self.lines[group_of(report.nodeid)].put(report.nodeid, "not run", _skip_reason(report))

    def pytest_collection_finish(self, session):
        for item in session.items:
            self.lines[group_of(item.nodeid)].put(item.nodeid, "not run", "the run was stopped")

    def pytest_runtest_logreport(self, report):
        line = self.lines[group_of(report.nodeid)]
        line.seconds += report.duration
        if report.failed:
            line.put(report.nodeid, "failed")
        elif report.skipped:
            line.put(report.nodeid, "not run", _skip_reason(report))
        elif report.when == "call":
            line.put(report.nodeid, "passed")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        result = yield
        nothing_ran = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
        if self.config.option.collectonly or exitstatus in nothing_ran:
            return result
        remarks = [f"left behind: {text}" for text in self._end_what_is_left()]
        if not any(line.count("passed") + line.count("failed") for line in self.lines.values()):
            remarks.append("no test was run")
        if (remarks or any(line.count("failed") for line in self.lines.values())) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("")
            for text in [*self.table(), *(f"FAILED: {remark}" for remark in remarks)]:
                reporter.write_line(text)
        return result

    def table(self) -> list[str]:
        """The scoreboard's lines of text."""
        groups = GROUPS if self.step is None else [group for group in GROUPS if group in self.lines]
        lines = [f"{'scoreboard':<10} {'passed':>7} {'failed':>7} {'not run':>8} {'seconds':>8}  why not run"]
        total = Line()
        for group in groups:
            line = self.lines[group]
            lines.append(_row(group, line, line.why() if line.results else "has no tests"))
            total.results.update(line.results)
            total.seconds += line.seconds
        verb = "test is" if self.left_out == 1 else "tests are"
        more = f"{self.left_out} slow {verb} left for make check-all" if self.left_out else ""
        return [*lines, _row("total", total, more)]

    def _end_what_is_left(self) -> list[str]:
        deadline = time.monotonic() + 3
        while (left := _living(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        texts = []
        for process in left:
            try:
                texts.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
                process.kill()
            except psutil.NoSuchProcess:
                continue
        return texts


def _row(name: str, line: Line, why: str) -> str:
    counts = f"{line.count('passed'):>7} {line.count('failed'):>7} {line.count('not run'):>8}"
    return f"{name:<10} {counts} {line.seconds:>8.1f}  {why}".rstrip()


def _skip_reason(report) -> str:
    """Why a report says skipped; empty when it does not."""
    if not report.skipped:
        return ""
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _living(mark: str) -> list[psutil.Process]:
    """Our children, and all that carry the mark although their parent has gone."""
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid in children or process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found
