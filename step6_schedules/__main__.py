"""torchrun --standalone --nproc-per-node 4 -m step6_schedules: trains a pipeline under any schedule."""

from step0_monolith.options import run_program
from step5_orchestrator.program import train_program
from step5_orchestrator.trainer import Trainer
from step6_schedules.job import job_of
from step6_schedules.timeline import TimelineOptions, draw_timeline


def draw(options: TimelineOptions, trainer: Trainer) -> None:
    """Draws a typical iteration of the run, on rank 0."""
    if options.timeline is None:
        return
    measured = trainer.timeline()
    if measured is not None:
        note = "on emulated devices" if trainer.is_emulated else ""
        draw_timeline(options.timeline, trainer.table, trainer.predicted_cost, measured, trainer.cost_unit, note)


def main() -> None:
    train_program(job_of("step6_schedules", __doc__), TimelineOptions, draw)


if __name__ == "__main__":
    run_program(main)
