"""torchrun ... -m tests.programs.skewed_clock: step 6's program; each rank's clock is 5 s ahead of the one before."""

import os

from step0_monolith.options import run_program
from step6_schedules.__main__ import main
from tests.skewed import skewed

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    with skewed(5.0 * rank, 1 + 1e-4 * rank):
        run_program(main)
