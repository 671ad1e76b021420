"""Which device and which backend a rank uses."""

from dataclasses import dataclass

import torch

from step0_monolith.options import Options, UsageError, number, one_of, option


@dataclass(frozen=True)
class WorldOptions(Options):
    """Where ranks compute, and how they talk."""

    device: str = option("auto", one_of("auto", "cpu", "cuda"), "auto: CUDA when every local rank has a GPU of its own")
    backend: str = option("auto", one_of("auto", "gloo", "nccl"), "auto: nccl on CUDA, gloo on the CPU")
    timeout: float = option(60.0, number(above=0), "seconds that one message may take")

    def check_together(self) -> None:
        """Raises UsageError for a timeout that torch cannot count."""
        # torch counts whole milliseconds, and some of its clocks nanoseconds.
        if not 0.001 <= self.timeout <= 86400:
            raise UsageError(f"--timeout {self.timeout:g} must be between 0.001 and 86400 seconds (a day)")


@dataclass(frozen=True)
class Choice:
    """A device, a backend, and what a person should know about the choice (None: nothing)."""

    device: torch.device
    backend: str
    note: str | None = None


def choose(options: WorldOptions, local_rank: int, local_size: int, num_gpus: int, has_mps: bool) -> Choice:
    """Chooses the device and the backend of one rank; NCCL only when every local rank has a GPU of its own.

    Raises UsageError, before any backend starts, for a wish that the machine cannot fulfil; it says the way out.
    """
    cpu, enough = torch.device("cpu"), num_gpus >= local_size
    gpus = f"{num_gpus} GPU{'' if num_gpus == 1 else 's'}"
    share = "to share a GPU: --device cuda --backend gloo"
    if options.device == "cpu":
        if options.backend == "nccl":
            raise UsageError("--backend nccl needs --device cuda; on the CPU use --backend gloo")
        return Choice(cpu, "gloo")
    if options.device == "cuda" and num_gpus == 0:
        raise UsageError("--device cuda: torch finds no CUDA GPU here; use --device cpu, or a CUDA build of torch")
    wants_nccl = options.backend == "nccl" or (options.device == "cuda" and options.backend == "auto")
    if wants_nccl and not enough:
        raise UsageError(
            f"NCCL needs a GPU for each of the {local_size} ranks on this host, which has {gpus}; use --device cpu "
            f"--backend gloo" + (f", or --nproc-per-node {num_gpus}, or, {share}" if num_gpus else "")
        )
    if wants_nccl or (options.backend == "auto" and num_gpus and enough):
        return Choice(torch.device("cuda", local_rank), "nccl")
    if options.device == "cuda":
        return Choice(torch.device("cuda", local_rank % num_gpus), "gloo")
    if num_gpus and options.backend == "auto":
        return Choice(cpu, "gloo", f"{gpus} for {local_size} ranks: using the CPU with gloo; {share}")
    if has_mps:
        return Choice(cpu, "gloo", "torch.distributed does not run on MPS: using the CPU with gloo")
    return Choice(cpu, "gloo")


def choose_here(options: WorldOptions, local_rank: int, local_size: int) -> Choice:
    """`choose` with what this machine has."""
    return choose(options, local_rank, local_size, torch.cuda.device_count(), torch.backends.mps.is_available())
