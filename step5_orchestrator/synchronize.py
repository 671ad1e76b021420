"""What ranks must have in common: compared over stages, compared and repaired over replicas."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from step0_monolith.options import RunError
from step0_monolith.payload import Payload, PayloadError
from step0_monolith.result import raw_bytes
from step0_monolith.state import hyper_parameters
from step2_comms.world import World
from step5_orchestrator.replicas import Replicas

if TYPE_CHECKING:
    from step5_orchestrator.optimizer import PipelineParallelOptimizer


def common(optimizer: "PipelineParallelOptimizer") -> dict[str, Any]:
    """What is the same on every stage: by name, as plain values; None where a stage has nothing to compare."""
    wrapped = optimizer.wrapped
    steps = [float(state["step"]) for state in wrapped.state.values() if "step" in state]
    values = {
        "number of updates": optimizer.updates,
        "optimizer": type(wrapped).__name__,
        "number of groups": len(wrapped.param_groups),
        "step counter": max(steps, default=None),
    }
    for index, group in enumerate(wrapped.param_groups):
        where = f" of group {index}" if len(wrapped.param_groups) > 1 else ""
        values |= {f"{name}{where}": value for name, value in hyper_parameters(group).items()}
    return values


def check_stages(world: World, optimizer: "PipelineParallelOptimizer") -> None:
    """Raises RunError on every rank when two stages differ in what all must have in common; it says both values."""
    ranks = world.gather_everywhere(common(optimizer))
    for name in dict.fromkeys(name for values in ranks for name in values):
        found = [(rank, values.get(name)) for rank, values in enumerate(ranks)]
        if name == "step counter":
            found = [(rank, value) for rank, value in found if value is not None]
        differing = next(((rank, value) for rank, value in found if value != found[0][1]), None)
        if differing is not None:
            (first, a), (other, b) = found[0], differing
            raise RunError(
                f"the stages do not agree: {name} is {a!r} on rank {world.ranks[first]} and {b!r} on rank "
                f"{world.ranks[other]}"
            )


def repair_replicas(replicas: Replicas, optimizer: "PipelineParallelOptimizer") -> list[str]:
    """Sets ranks that have drifted from replica 0's to what that has; returns what differed, on every rank."""
    state = optimizer.state()
    digests = {name: _digest(value) for name, value in state.tensors.items()}
    peers = replicas.peers.gather_everywhere((digests, state.scalars))
    reports: list[str] = []
    error = None
    if any(other != peers[0] for other in peers):
        there = _from_replica_0(replicas, state.tensors, state.scalars, peers[0][0])
        reports = _differences(replicas, state.tensors, state.scalars, there)
        try:
            optimizer.load([there])
        except PayloadError as found:
            error = f"rank {replicas.whole.rank} cannot be set to what replica 0 has: {found}"
    everyones = replicas.whole.gather_everywhere((reports, error))
    for _, error in everyones:
        if error is not None:
            raise RunError(error)
    return [line for lines, _ in everyones for line in lines]


def _digest(value: Tensor) -> tuple:
    return tuple(value.shape), str(value.dtype), hashlib.sha256(raw_bytes(value)).hexdigest()


def _from_replica_0(
    replicas: Replicas, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], layout: Mapping[str, tuple]
) -> Payload:
    peers = replicas.peers
    found = {}
    for name, (shape, dtype, _) in layout.items():
        own = tensors.get(name) if peers.rank == 0 else None
        kind = getattr(torch, dtype.removeprefix("torch."))
        found[name] = peers.broadcast(torch.empty(shape, dtype=kind) if own is None else own.clone(), 0)
    everyones = peers.gather_everywhere(dict(scalars) if peers.rank == 0 else None)
    return Payload(found, everyones[0], "")


def _differences(replicas: Replicas, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], there: Payload) -> list:
    who = f"replica {replicas.index} (rank {replicas.whole.rank})"
    lines = []
    for name in dict.fromkeys([*there.tensors, *tensors]):
        a, b = tensors.get(name), there.tensors.get(name)
        if a is None or b is None:
            lines.append(f"{who}: {name} was {'missing' if a is None else 'there'}, unlike in replica 0")
        elif _digest(a) != _digest(b):
            size = (a.double() - b.double()).abs().max().item()
            lines.append(f"{who}: {name} differed from replica 0's by up to {size:.3g}")
    for name in scalars.keys() | there.scalars.keys():
        lines += [
            f"{who}: {where} was {a!r}, in replica 0 {b!r}"
            for where, a, b in _unlike(name, scalars.get(name), there.scalars.get(name))
        ]
    return lines


def _unlike(name: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            found for key in sorted(a.keys() | b.keys()) for found in _unlike(f"{name}/{key}", a.get(key), b.get(key))
        ]
    return [] if a == b else [(name, a, b)]
