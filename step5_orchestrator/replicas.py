"""Data parallelism: several copies of the pipeline, each with rows of its own."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from step0_monolith.config import Config
from step0_monolith.options import Options, UsageError, option, whole
from step2_comms.launch import Launch, torchrun_command
from step2_comms.world import World


@dataclass(frozen=True)
class ReplicaOptions(Options):
    """How many copies of the pipeline train together."""

    data_parallel: int = option(1, whole(1, 10_000), "replicas of the pipeline, each with its own rows of every batch")

    def ranks_of_each(self, launch: Launch, config: Config, module: str) -> int:
        """How many ranks a replica has. Raises UsageError when ranks or rows cannot be shared out."""
        replicas = self.data_parallel
        if launch.size % replicas:
            raise UsageError(
                f"--data-parallel {replicas}: {launch.size} ranks cannot be {replicas} pipelines of one size; start a "
                f"multiple of it: {torchrun_command(module, 2 * replicas)} --data-parallel {replicas}"
            )
        if config.batch_size // replicas < config.num_microbatches:
            raise UsageError(
                f"--num-microbatches {config.num_microbatches} is more than the {config.batch_size // replicas} rows "
                f"that the smallest of {replicas} replicas has of a batch; lower it or raise --batch-size"
            )
        return launch.size // replicas


class Replicas:
    """D pipelines of P ranks: rank d·P + p is rank p of replica d, in a DeviceMesh with the dimensions dp and pp.

    pipeline: the ranks of this replica, as a world. peers: the ranks that hold the same stages in all replicas, as a
    world in which this rank's number is its replica's.
    """

    def __init__(self, world: World, num_replicas: int) -> None:
        """Opens the groups of all rows and columns of the mesh; called on every rank."""
        self.whole, self.num_replicas = world, num_replicas
        grid = torch.arange(world.size).view(num_replicas, -1)
        self.peers = _part(world, grid.t().tolist())
        self.pipeline = _part(world, grid.tolist())
        self.mesh = DeviceMesh.from_group(
            [self.peers.group, self.pipeline.group], world.device.type, mesh=grid, mesh_dim_names=("dp", "pp")
        )

    @property
    def index(self) -> int:
        """This rank's replica."""
        return self.peers.rank


def _part(world: World, parts: list[list[int]]) -> World:
    # Not torch's own groups of a mesh: those take a timeout of 30 minutes.
    groups = []
    with world.watch.waiting("opening the groups of the replicas"):
        for ranks in parts:
            groups.append(dist.new_group(ranks, timeout=world.timeout))
    return world.part(parts, next(g for g, ranks in zip(groups, parts, strict=True) if world.rank in ranks))
