"""torchrun --standalone --nproc-per-node 4 -m step6_schedules: trains a pipeline under any schedule."""

from step0_monolith.options import run_program
from step5_orchestrator.program import train_program
from step6_schedules.job import job_of
from step6_schedules.views import ViewOptions, Views


def main() -> None:
    train_program(job_of("step6_schedules", __doc__), ViewOptions, Views)


if __name__ == "__main__":
    run_program(main)
