"""torchrun --standalone --nproc-per-node 4 -m step5_orchestrator: trains a pipeline under naive stop-and-wait."""

from step0_monolith.options import run_program
from step5_orchestrator.naive import naive
from step5_orchestrator.program import schedule_options, train_program

SCHEDULES = {"naive": naive}
ScheduleOptions = schedule_options(SCHEDULES, "naive")


def main() -> None:
    train_program("step5_orchestrator", __doc__, SCHEDULES, ScheduleOptions)


if __name__ == "__main__":
    run_program(main)
