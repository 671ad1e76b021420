"""torchrun --standalone --max-restarts 1 --nproc-per-node 4 -m step5_orchestrator.dies_once: a killed rank, survived.

Rank 1 kills itself after iteration 7, with checkpoints every 5. torchrun starts all ranks again, they resume, and the
final weights are compared with those of the monolith, which nobody has killed.
"""

import os
import shutil
import signal
import tempfile
from pathlib import Path

from step0_monolith.checkpoints import CheckpointOptions
from step0_monolith.config import Config
from step0_monolith.options import RunError, UsageError, parse, run_program
from step0_monolith.result import weights_sha256
from step0_monolith.train import train
from step1_partition.partition import evenly
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch
from step2_comms.world import open_world
from step5_orchestrator.checkpoint import Checkpoints
from step5_orchestrator.naive import naive
from step5_orchestrator.trainer import Trainer

DIES_AFTER = 7
CONFIG = Config(num_iterations=20, optimizer="adam")


def main() -> None:
    """Trains with checkpoints, dies once, resumes, and compares."""
    program = "step5_orchestrator.dies_once"
    command = f"torchrun --standalone --max-restarts 1 --nproc-per-node 4 -m {program}"
    (world_options,) = parse(command, __doc__, {WorldOptions: None})
    launch = read_launch(program, at_least=2)
    evenly(CONFIG.num_layers, launch.size)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        raise UsageError(f"{program} dies, and nobody would start it again; run: {command}")
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    run = os.environ.get("TORCHELASTIC_RUN_ID", "alone")
    folder = Path(tempfile.gettempdir()) / f"dies_once-{os.getuid()}-{run}"
    saving = CheckpointOptions(checkpoint_dir=folder, checkpoint_every=5, resume=True)
    with Checkpoints(saving, CONFIG, launch) as checkpoints, open_world(launch, world_options, CONFIG.threads) as world:
        trainer = Trainer(CONFIG, world, naive(world.size, CONFIG.num_microbatches))
        checkpoints.start(trainer)
        while trainer.iteration < CONFIG.num_iterations:
            if world.rank == 1 and trainer.iteration == DIES_AFTER and is_first_attempt:
                checkpoints.finish(world)  # so that the checkpoint of iteration 5 is whole, on a slow disk too
                print(f"rank 1 kills itself after iteration {DIES_AFTER}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)  # the fault
            trainer.step()
            checkpoints.after_iteration(trainer)
        checkpoints.finish(world)
        result = trainer.result()
        trainer.close()
    if result is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    expected = train(CONFIG)
    if (result.losses, result.weights_sha256) != (expected.losses, weights_sha256(expected.parameters)):
        raise RunError("the losses or the final weights differ from those of a run that nobody has killed")
    print(f"equal to a run that nobody has killed, bit for bit: {len(result.losses)} losses and all final weights")


if __name__ == "__main__":
    run_program(main)
