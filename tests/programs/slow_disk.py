"""torchrun ... -m tests.programs.slow_disk: step 6's program on a slow disk, so that saving can be hit."""

import os
import time

from step0_monolith.options import run_program
from step6_schedules.__main__ import main

FSYNC_SECONDS = 0.03
fsync = os.fsync


def slowly(descriptor: int) -> None:
    time.sleep(FSYNC_SECONDS)
    fsync(descriptor)


if __name__ == "__main__":
    os.fsync = slowly
    run_program(main)
