"""What a run can be looked at with: a timeline as picture or page, and a trace."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from step0_monolith.options import Options, UsageError, option, optional, output_file, switch
from step5_orchestrator.executor import Event
from step5_orchestrator.trainer import Trainer
from step6_schedules.chrome import write_trace
from step6_schedules.page import other_timelines, write_page
from step6_schedules.timed import Timed, measured, predicted
from step6_schedules.timeline import cost_of_run, run_figure, save
from step6_schedules.trace import Tracing


@dataclass(frozen=True)
class ViewOptions(Options):
    """Where pictures and traces go."""

    timeline: Path | None = option(
        None,
        optional(output_file(".png", ".svg", ".html")),
        "file for a picture of one iteration, predicted above measured; .html is a page to zoom and step through",
    )
    critical_path: bool = option(False, switch, "outline in the picture the actions that the length hangs on")
    trace: Path | None = option(
        None, optional(output_file(".json")), "file for the last iterations with all messages, for ui.perfetto.dev"
    )

    def check_together(self) -> None:
        """Only a picture has outlines."""
        if self.critical_path and (self.timeline is None or self.timeline.suffix == ".html"):
            raise UsageError("--critical-path belongs to a picture: add --timeline FILE.png (a page has a key for it)")


class Views:
    """The views of one trainer's run; made on every rank before it trains."""

    def __init__(self, options: ViewOptions, trainer: Trainer, caps: tuple[int, ...] | None = None) -> None:
        """caps: for each rank the most chunk activations that it may hold, for the timeline."""
        self._options, self._trainer, self._caps = options, trainer, caps
        self._tracing = Tracing(trainer) if options.trace is not None else None
        self._first = trainer.iteration

    def write(self) -> list[str]:
        """Writes what was asked for, on rank 0; called on every rank after the training. Returns what to say there."""
        options, said = self._options, []
        if options.timeline is not None:
            events = self._trainer.timeline()
            if events is not None:
                self._write_timeline(events)
                said.append(f"timeline of one iteration: {options.timeline}")
        if self._tracing is not None:
            trace = self._tracing.trace()
            if trace is not None:
                write_trace(options.trace, trace)
                numbers = [iteration.number for iteration in trace.ranks[0].iterations]
                which = f"iterations {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"iteration {numbers[0]}"
                said.append(f"trace of {which}: {options.trace} ({trace.clock_note})")
        if self._trainer.iteration == self._first and (options.timeline or options.trace):
            said.append("no iteration was left to run, so no picture and no trace was written")
        return said

    def _write_timeline(self, events: Sequence[Sequence[Event]]) -> None:
        planned, ran = self.timelines(events)
        if self._options.timeline.suffix == ".html":
            write_page(self._options.timeline, [planned, ran, *other_timelines(planned)])
        else:
            save(run_figure(planned, ran, self._options.critical_path), self._options.timeline)

    def timelines(self, events: Sequence[Sequence[Event]]) -> tuple[Timed, Timed]:
        """What the table predicts, and what was measured, both in milliseconds."""
        trainer = self._trainer
        if trainer.is_emulated:
            notes, cost = ("", "on emulated devices"), trainer.predicted_cost
        else:
            # The table's slots have no length of their own: without emulation the run itself says what an action takes.
            notes, cost = ("(ms, this run's medians)", ""), cost_of_run(events)
        planned = predicted(trainer.table, cost, "ms", self._caps, notes[0])
        return planned, measured(trainer.table, events, notes[1], self._caps)
