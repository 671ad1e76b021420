"""Step 5: replicas of a pipeline, together equal to the monolith, and equal to each other bit for bit."""

import dataclasses
import math
import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Adam

from step0_monolith.config import Config
from step0_monolith.options import RunError, UsageError
from step0_monolith.update import norm_of, squared_norms
from step2_comms.launch import Launch
from step5_orchestrator.buckets import GradientSum, buckets
from step5_orchestrator.naive import naive
from step5_orchestrator.replicas import ReplicaOptions, Replicas
from step5_orchestrator.trainer import Trainer
from step6_schedules.choose import ScheduleOptions, choose
from step6_schedules.schedules import SCHEDULES
from tests.monolith import joined, monolith, small
from tests.sizes import admits
from tests.training import Job, state_sha256, train_jobs
from tests.updates import WIDTH, Case, batch_of, build, chain, chain16, chain32, go_on, part_of, train_cases, uncut

RELATIVE = 1e-12  # replicas add in another order than the monolith
ADAM = partial(Adam, lr=0.01)
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
SHAPES = [(2, 1), (2, 2), (2, 3), (4, 1)]


def assert_close(found, expected, what=""):
    """Every tensor within the relative error, measured by its own largest element."""
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())}"
    assert expected, f"{what}: there is nothing to compare with"
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        difference = (found[name].double() - tensor.double()).abs().max().item()
        assert difference <= RELATIVE * tensor.double().abs().max().item(), f"{what}: {name} by {difference:.3g}"


def by_replica(ranks, num_replicas):
    size = len(ranks) // num_replicas
    return [ranks[i * size : (i + 1) * size] for i in range(num_replicas)]


def assert_jobs(pool, num_replicas, num_ranks, jobs, limit=60):
    """Losses and weights of the monolith, within the relative error in float64; replicas equal bit for bit."""
    assert jobs
    results = pool.run(num_replicas * num_ranks, train_jobs, jobs, limit=limit)
    for index, job in enumerate(jobs):
        ranks, expected = [rank[index] for rank in results], monolith(job.config)
        assert all(rank.losses == ranks[0].losses for rank in ranks), job
        first, *others = ([rank.state_sha256 for rank in part] for part in by_replica(ranks, num_replicas))
        assert len(first) == num_ranks
        assert all(other == first for other in others), f"{job}: replicas differ"
        assert len({*first}) == num_ranks
        assert [rank.weights_sha256 is None for rank in ranks] == [False] + [True] * (len(ranks) - 1)
        if job.config.dtype == "float64":
            assert ranks[0].losses == pytest.approx(expected.losses, rel=RELATIVE, abs=0)
            for part in by_replica(ranks, num_replicas):
                assert_close(joined([rank.parameters for rank in part]), expected.parameters, str(job))
        else:
            wide = 0.1 if job.config.dtype == "bfloat16" else 1e-4
            assert ranks[0].losses == pytest.approx(expected.losses, rel=wide)


def job_of(schedule, num_replicas, **changes):
    defaults = {"data": "random", "dtype": "float64", "num_microbatches": 3, "num_iterations": 4}
    return Job(small(**{**defaults, **changes}), schedule, data_parallel=num_replicas)


QUICK = {
    (2, 1): [("1f1b", {"max_grad_norm": 0.5, "optimizer": "adam"})],
    (2, 2): [
        ("1f1b", {"accumulate": 2, "max_grad_norm": 0.5}),
        ("zb-v", {"optimizer": "adam"}),
        ("interleaved", {"dtype": "bfloat16"}),
        ("gpipe", {"dtype": "float32", "optimizer": "adam"}),
    ],
    (2, 3): [("zb-h1", {"batch_size": 11})],
    (4, 1): [("gpipe", {"batch_size": 15, "accumulate": 2})],
}


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[pytest.mark.slow] * (shape == (2, 3))) for shape in SHAPES],
    ids=lambda shape: "{}x{}".format(*shape),
)
def test_replicas_equal_the_monolith_and_each_other(pool, shape):
    assert_jobs(pool, *shape, [job_of(schedule, shape[0], **changes) for schedule, changes in QUICK[shape]])


KINDS = [
    {},
    {"batch_size": 37, "optimizer": "adam", "max_grad_norm": 0.5},
    {"batch_size": 38, "accumulate": 2, "max_grad_norm": 0.3, "lr_schedule": "warmup-cosine", "warmup_iterations": 2},
    {"batch_size": 39, "dtype": "bfloat16", "optimizer": "adam"},
    {"batch_size": 41, "dtype": "float32", "accumulate": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "{}x{}".format(*shape))
def test_every_schedule_equals_the_monolith(pool, shape):
    num_replicas, num_ranks = shape
    jobs = []
    for changes in KINDS:
        changes = {"batch_size": 40, **changes}
        for schedule in SCHEDULES if changes.get("dtype", "float64") == "float64" else ("1f1b", "interleaved", "zb-h1"):
            m = 3 if admits(schedule, num_ranks, 3) else 2 * num_ranks
            jobs.append(job_of(schedule, num_replicas, num_microbatches=m, **changes))
        for options in (ScheduleOptions(schedule="auto"), ScheduleOptions(schedule="auto", split="yes", placement="v")):
            table = choose(options, num_ranks, 3).make()
            jobs.append(job_of(table, num_replicas, **changes))
    assert len(jobs) == 3 * (9 + 2) + 2 * (3 + 2)
    assert_jobs(pool, num_replicas, num_ranks, jobs, limit=110)


def dropped() -> list[nn.Module]:
    modules = chain()
    return [*modules[:3], nn.Dropout(0.4), *modules[3:5], nn.Dropout(0.2), *modules[5:]]


class Sometimes(nn.Module):
    """Has one weight that is used for the later rows of the test's batch alone, one never, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.rare, self.unused, self.frozen = (nn.Parameter(torch.ones(WIDTH, dtype=torch.float64)) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        y = torch.relu(self.linear(x) * self.frozen)
        return y * self.rare if bool((x[:, 0] > LATE).all()) else y


LATE = 10.0


class Marked(nn.Module):
    """Lets the first feature of late rows through, as it is."""

    def forward(self, x):
        return torch.cat([x[:, :1], torch.tanh(x[:, 1:])], 1)


def sometimes() -> list[nn.Module]:
    modules = chain(num_linear=2)
    return [Marked(), Sometimes(), *modules]


def frozen_first() -> list[nn.Module]:
    modules = chain()
    modules[0].requires_grad_(False)
    return modules


class LateRows:
    """Batches whose second half is marked."""

    def __call__(self, case, iteration):
        inputs, targets = batch_of(dataclasses.replace(case, data=None), iteration)
        inputs[case.rows // 2 :, 0] += 100
        return inputs, targets


CASES = [
    Case(MOMENTUM, dropped, "1f1b", rows=12, data_parallel=2),
    Case(ADAM, dropped, "interleaved", rows=12, accumulate=2, max_grad_norm=0.3, data_parallel=2),
    Case(ADAM, frozen_first, "gpipe", rows=11, data_parallel=2, ignored=True),
    Case(ADAM, sometimes, "1f1b", rows=12, data_parallel=2, data=LateRows()),
    Case(MOMENTUM, sometimes, "zb-h1", rows=12, data_parallel=2, data=LateRows(), max_grad_norm=0.3),
    Case(MOMENTUM, chain32, "1f1b", rows=12, data_parallel=2, max_grad_norm=0.3),
    Case(ADAM, chain16, "1f1b", rows=12, data_parallel=2),
]


def assert_cases(pool, num_ranks, cases):
    results = pool.run(num_ranks * cases[0].data_parallel, train_cases, cases)
    for index, case in enumerate(cases):
        ranks, expected = [rank[index] for rank in results], uncut(case)
        assert all(rank[0] == ranks[0][0] for rank in ranks)
        first, *others = by_replica([rank[2] for rank in ranks], case.data_parallel)
        assert all(other == first for other in others), f"{case}: replicas differ"
        if case.make not in (chain32, chain16):
            assert ranks[0][0] == pytest.approx(expected.losses, rel=RELATIVE, abs=0), str(case)
            for part in by_replica([rank[1] for rank in ranks], case.data_parallel):
                assert_close(joined(part), expected.parameters, str(case))


def test_modules_of_every_kind_equal_the_uncut_ones(pool):
    assert_cases(pool, 2, CASES)
    late = uncut(CASES[3]).parameters
    # What is used in one replica alone is trained, what is used nowhere is not.
    assert not torch.equal(late["1.rare"], torch.ones(WIDTH, dtype=torch.float64))
    assert torch.equal(late["1.unused"], torch.ones(WIDTH, dtype=torch.float64))


class IgnoredInOne:
    """All targets of the first replica are ignored, or in every second batch all of the batch."""

    def __call__(self, case, iteration):
        inputs, targets = batch_of(dataclasses.replace(case, data=None), iteration)
        targets[: case.rows // 2 if iteration % 2 == 0 else case.rows] = -100
        return inputs, targets


def test_a_replica_whose_targets_are_all_ignored(pool):
    assert_cases(pool, 1, [Case(MOMENTUM, chain, rows=12, data_parallel=2, data=IgnoredInOne())])


def test_one_rank_a_replica_and_four_replicas(pool):
    assert_cases(
        pool, 1, [dataclasses.replace(case, rows=24, data_parallel=4) for case in (CASES[1], CASES[3], CASES[5])]
    )


def sums(world, sizes, bucket_bytes):
    """The sum of gradients, which differ from rank to rank, in buckets of several sizes."""
    peers, found = Replicas(world, world.size).peers, {}
    for limit in bucket_bytes:
        parameters = [
            nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes for dtype in (torch.float64, torch.float32)
        ]
        generator = torch.Generator().manual_seed(world.rank)
        for index, parameter in enumerate(parameters):
            if index == 2 or (index == 3 and world.rank > 0):  # none anywhere; one rank alone
                continue
            parameter.grad = torch.randn(len(parameter), generator=generator, dtype=torch.float64).to(parameter.dtype)
        own = [None if p.grad is None else p.grad.clone() for p in parameters]
        stages = {5: Holder(parameters[:3]), 1: Holder(parameters[3:])}
        total = GradientSum(peers, stages, limit)
        total()
        found[limit] = own, [p.grad for p in parameters]
    return found


class Holder:
    def __init__(self, parameters):
        self._parameters = parameters

    def parameters(self):
        return self._parameters


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_buckets_of_any_size_give_the_sum(pool, num_replicas):
    limits = (1, 100, 4 * 2**20)
    ranks = pool.run(num_replicas, sums, (7, 1, 30, 5), limits)
    for limit in limits:
        own, totals = [rank[limit][0] for rank in ranks], [rank[limit][1] for rank in ranks]
        for index in range(8):
            parts = [gradients[index] for gradients in own if gradients[index] is not None]
            if not parts:
                assert index == 2
                assert all(total[index] is None for total in totals)
                continue
            assert len(parts) == (1 if index == 3 else num_replicas)
            exact = torch.stack(parts).double().sum(0)
            assert all(torch.equal(total[index], totals[0][index]) for total in totals)
            tight = 1e-14 if parts[0].dtype == torch.float64 else 1e-6
            assert torch.allclose(totals[0][index].double(), exact, rtol=0, atol=tight)


def test_buckets_hold_what_fits_and_keep_dtypes_apart():
    wide, narrow = torch.float64, torch.float32
    parameters = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in ((4, wide), (4, narrow), (4, wide), (9, wide))]
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def found(limit):
        place = {id(p): i for i, p in enumerate(parameters)}
        return [[place[id(p)] for p in bucket] for bucket in buckets([*parameters, frozen], limit)]

    assert found(1) == [[0], [1], [2], [3]]
    assert found(64) == [[0, 2], [1], [3]]
    assert found(10**6) == [[0, 2, 3], [1]]
    assert buckets([], 10) == []


def with_small_buckets(world, case, bucket_bytes):
    optimizer = build(world, case)
    optimizer._sum = GradientSum(optimizer.replicas.peers, optimizer.pipeline.stages, bucket_bytes)
    losses = go_on(optimizer, case)
    optimizer.pipeline.close()
    return losses, state_sha256(optimizer)


@pytest.mark.slow
def test_the_size_of_the_buckets_changes_no_bit_of_two_replicas(pool):
    case = dataclasses.replace(CASES[1], num_iterations=2)
    results = [pool.run(4, with_small_buckets, case, size) for size in (1, 1000, 2**22)]
    assert results[0] == results[1] == results[2]


def groups(world, num_replicas):
    replicas = Replicas(world, num_replicas)
    mesh = replicas.mesh
    ranks = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return {
        "mesh": (isinstance(mesh, DeviceMesh), mesh.mesh.tolist(), mesh.mesh_dim_names, mesh.get_coordinate()),
        "ranks": ranks,
        "sum": total.item(),
        "pipeline": (replicas.pipeline.rank, replicas.pipeline.size, replicas.pipeline.ranks),
        "peers": (replicas.peers.rank, replicas.peers.size, replicas.peers.ranks),
        "index": replicas.index,
    }


def test_the_mesh_is_replicas_by_ranks_of_a_pipeline(pool):
    for rank, found in enumerate(pool.run(6, groups, 2)):
        replica, within = divmod(rank, 3)
        row, column = [3 * replica + i for i in range(3)], [within, within + 3]
        assert found == {
            "mesh": (True, [[0, 1, 2], [3, 4, 5]], ("dp", "pp"), (replica, within)),
            "ranks": {"dp": column, "pp": row},
            "sum": float(sum(column)),
            "pipeline": (within, 3, tuple(row)),
            "peers": (replica, 2, tuple(column)),
            "index": replica,
        }


@pytest.mark.parametrize(
    ("replicas", "ranks", "rows", "message"),
    [
        (3, 4, 64, r"--data-parallel 3: 4 ranks cannot be 3 pipelines of one size; start a multiple of it: torchrun "
         r"--standalone --nproc-per-node 6 -m step5_orchestrator --data-parallel 3"),
        (8, 4, 64, r"--data-parallel 8: 4 ranks cannot be 8 pipelines"),
        (4, 4, 15, r"--num-microbatches 4 is more than the 3 rows that the smallest of 4 replicas has of a batch; "
         r"lower it or raise --batch-size"),
    ],
)  # fmt: skip
def test_ranks_and_rows_that_cannot_be_shared_out(replicas, ranks, rows, message):
    config = Config(batch_size=rows, num_microbatches=4)
    with pytest.raises(UsageError, match=message):
        ReplicaOptions(data_parallel=replicas).ranks_of_each(Launch(0, ranks, 0, ranks), config, "step5_orchestrator")


def test_ranks_of_each_replica():
    config = Config(batch_size=16, num_microbatches=4)
    launch = Launch(0, 4, 0, 4)
    assert [ReplicaOptions(data_parallel=d).ranks_of_each(launch, config, "m") for d in (1, 2, 4)] == [4, 2, 1]
    for wrong in (0, -1, "x", 2.5):
        with pytest.raises(UsageError, match="--data-parallel must be"):
            ReplicaOptions(data_parallel=wrong)


def results_of(world, config):
    trainer = Trainer(config, world, SCHEDULES["interleaved"](2, config.num_microbatches), data_parallel=2)
    first = trainer.evaluate()
    trainer.train()
    second, result = trainer.evaluate(), trainer.result()
    trainer.close()
    return first, second, result, trainer.timeline() is not None


def test_evaluation_and_result_with_replicas(pool):
    config = small(dtype="float64", batch_size=16, num_iterations=3)
    ranks = pool.run(4, results_of, config)
    (first, second, result, _), *others = ranks
    assert all(other[:3] == (first, second, None) for other in others)
    assert first != second
    assert (result.schedule, result.num_ranks, result.num_stages, result.num_microbatches) == ("interleaved", 4, 4, 4)
    assert [len(x) for x in (result.peak_in_flight, result.bytes_sent, result.losses)] == [4, 4, 3]
    assert result.peak_in_flight[:2] == result.peak_in_flight[2:]
    assert result.bytes_sent[:2] == result.bytes_sent[2:]
    assert result.test_accuracy == second["accuracy"]
    assert 0 <= result.bubble["measured"] < 1
    assert result.losses == pytest.approx(monolith(config).losses, rel=RELATIVE, abs=0)


def drift(optimizer, what):
    """Changes one thing on this rank."""
    parameter = optimizer.wrapped.param_groups[0]["params"][0]
    state = optimizer.wrapped.state[parameter]
    if what == "moment":
        state["exp_avg"].view(-1)[3] += 0.5
    elif what == "parameter":
        with torch.no_grad():
            parameter.view(-1)[0] = math.nan
    elif what == "last bit":
        with torch.no_grad():
            parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(9.0, dtype=parameter.dtype))
    elif what == "step":
        state["step"] += 1
    elif what == "lr":
        optimizer.wrapped.param_groups[0]["lr"] = 0.5
    elif what == "updates":
        optimizer.updates += 1
    elif what == "lost":
        del optimizer.wrapped.state[parameter]


DRIFTS = {
    "moment": ["optimizer/0.weight/exp_avg differed from replica 0's by up to 0.5"],
    "parameter": ["0.weight differed from replica 0's by up to nan"],
    "last bit": ["0.weight differed from replica 0's by up to "],
    "step": ["optimizer/0.weight/step differed from replica 0's by up to 1"],
    "lr": [
        f"optimizer/parameters/{name}/group/lr was 0.5, in replica 0 0.01"
        for name in ("0.bias", "0.weight", "2.bias", "2.weight")
    ],
    "updates": ["updates was 3, in replica 0 2"],
    "lost": [
        f"optimizer/0.weight/{name} was missing, unlike in replica 0" for name in ("step", "exp_avg", "exp_avg_sq")
    ],
    "nothing": [],
}


def drifting(world, case, drifts):
    """For each drift: what is reported, and the state at the end of the training that follows."""
    found = []
    for what in drifts:
        optimizer = build(world, case)
        go_on(optimizer, case, 2)
        if world.rank == world.size - 2:  # the first rank of the last replica
            drift(optimizer, what)
        reports = optimizer.synchronize_optimizer_state()
        again = optimizer.synchronize_optimizer_state()
        go_on(optimizer, case)
        optimizer.pipeline.close()
        found.append((reports, again, state_sha256(optimizer)))
    return found


def test_replicas_that_drifted_are_set_to_replica_0s(pool):
    case = Case(ADAM, rows=12, data_parallel=2, max_grad_norm=0.3)
    results = pool.run(4, drifting, case, [*DRIFTS])
    undrifted = [rank[0][2] for rank in pool.run(4, train_cases, [case])]
    for index, (what, lines) in enumerate(DRIFTS.items()):
        ranks = [rank[index] for rank in results]
        reports = ranks[0][0]
        assert all(rank[0] == reports for rank in ranks), what
        assert len(reports) == len(lines), reports
        for report, line in zip(reports, lines, strict=True):
            assert report.startswith(f"replica 1 (rank 2): {line}"), what
        assert all(rank[1] == [] for rank in ranks), what
        assert [rank[2] for rank in ranks] == undrifted, what


def of_another_kind(world, case, other):
    """Replica 1 has another optimizer: what each rank says."""
    optimizer = build(world, other if world.rank == 1 else case)
    go_on(optimizer, case, 1)
    with pytest.raises(RunError) as caught:
        optimizer.synchronize_optimizer_state()
    return str(caught.value)


def test_replicas_that_cannot_be_repaired_are_named_on_every_rank(pool):
    case = Case(ADAM, rows=12, data_parallel=2)
    said = pool.run(2, of_another_kind, case, dataclasses.replace(case, optimizer=partial(SGD, lr=0.1)))
    start = "rank 1 cannot be set to what replica 0 has: it was saved by the optimizer Adam, and this is SGD"
    assert said == [start, start]


def unfrozen_later(world, case, is_frozen):
    """A parameter that was frozen when the sum was set up, and is not when it is formed."""
    optimizer = build(world, case)
    parameter = optimizer.pipeline.parameters()[0]
    parameter.requires_grad_(not is_frozen)
    optimizer._sum = GradientSum(optimizer.replicas.peers, optimizer.pipeline.stages)
    parameter.requires_grad_(True)
    go_on(optimizer, case)
    optimizer.pipeline.close()
    return state_sha256(optimizer)


def test_a_parameter_that_is_unfrozen_later_is_summed_too(pool):
    case = Case(ADAM, rows=12, data_parallel=2)
    one, other = (pool.run(2, unfrozen_later, case, is_frozen) for is_frozen in (True, False))
    assert one == other
    assert one[0] == one[1]


def test_the_first_of_several_replicas_counts(pool):
    """Replica 0 is the one that drifts: the others follow it, and say so."""
    ranks = pool.run(4, leader_drifts, Case(ADAM, rows=24, data_parallel=4))
    assert all(rank == ranks[0] for rank in ranks)
    reports, _ = ranks[0]
    assert reports == [
        f"replica {i} (rank {i}): optimizer/0.weight/exp_avg differed from replica 0's by up to 0.5" for i in (1, 2, 3)
    ]


def leader_drifts(world, case):
    optimizer = build(world, case)
    go_on(optimizer, case, 2)
    if world.rank == 0:
        drift(optimizer, "moment")
    reports = optimizer.synchronize_optimizer_state()
    go_on(optimizer, case)
    optimizer.pipeline.close()
    return reports, state_sha256(optimizer)


def stops(world, case):
    """A NaN in the rows of replica 1 alone."""
    optimizer = build(world, case)
    go_on(optimizer, case, 2)
    inputs, targets = batch_of(case, 2)
    inputs[-1, 0] = math.nan
    before = state_sha256(optimizer)
    try:
        optimizer.optimize(part_of(optimizer, (inputs, targets)))
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    same = state_sha256(optimizer) == before
    optimizer.pipeline.close()
    return said, same


def test_a_nan_in_one_replica_stops_all(pool):
    ranks = pool.run(4, stops, Case(ADAM, rows=12, data_parallel=2, max_grad_norm=1.0))
    for said, same in ranks:
        assert said.startswith("RunError: iteration 3: the loss is nan and gradients of stages 0, 1 are not finite")
        assert same


def norms(world, case):
    optimizer = build(world, case)
    go_on(optimizer, case, 1)
    own = norm_of(squared_norms(optimizer.pipeline.parameters()))
    return own, optimizer._agree(torch.tensor(0.0), True).norm


def test_the_norm_counts_one_replica_once(pool):
    ranks = pool.run(4, norms, Case(partial(SGD, lr=0.1), rows=12, data_parallel=2))
    total = math.hypot(ranks[0][0], ranks[1][0])
    assert [norm for _, norm in ranks] == [pytest.approx(total, rel=1e-12)] * 4


# Last, since ranks that fail are started anew for the next test.


def test_a_table_of_one_replica_is_not_one_of_all_ranks(pool):
    (outcome, _) = pool.outcomes(2, wrong_table)
    assert "has 2 rows, but there are 1 ranks" in outcome.error


def wrong_table(world):
    Trainer(small(), world, naive(2, 4), data_parallel=2)


def fails_in_replica_1(world, how):
    case = Case(ADAM, rows=12, data_parallel=2)
    optimizer = build(world, case)
    go_on(optimizer, case, 1)
    if world.rank == 3:
        if how == "raise":
            raise ValueError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL)
    go_on(optimizer, case)


@pytest.mark.parametrize("how", ["raise", pytest.param("kill", marks=pytest.mark.slow)])
def test_a_rank_of_replica_1_that_fails_is_named_in_replica_0(pool, how):
    outcomes = pool.outcomes(4, fails_in_replica_1, how, timeout=20)
    assert all(outcome.error for outcome in outcomes)
    for outcome in outcomes[:3]:
        assert outcome.error.startswith("RunError: rank ")
    said = "\n".join(outcome.error for outcome in outcomes[:2])
    assert "rank 3 failed" in said if how == "raise" else "rank 3" in said, said
    if how == "raise":
        assert all("ValueError: on purpose" in outcome.error for outcome in outcomes)
