"""torchrun --standalone --nproc-per-node 4 -m step5_orchestrator: trains a pipeline from a table of actions."""

from step0_monolith.options import run_program
from step5_orchestrator.choose import ScheduleOptions, choose
from step5_orchestrator.program import Job, train_program


def main() -> None:
    train_program(Job("step5_orchestrator", __doc__, ScheduleOptions, choose))


if __name__ == "__main__":
    run_program(main)
