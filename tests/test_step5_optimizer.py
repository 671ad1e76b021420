"""Step 5: the optimizer across stages, on real ranks, against one process with the same optimizer."""

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR, StepLR

from step0_monolith.loss import loss_share
from step0_monolith.options import RunError, UsageError
from step0_monolith.payload import PayloadError
from step0_monolith.result import raw_bytes
from step1_partition.stage import Stage
from step5_orchestrator.naive import naive
from step5_orchestrator.optimizer import PipelineParallelOptimizer
from step5_orchestrator.pipeline import Pipeline
from step6_schedules.schedules import SCHEDULES
from tests.monolith import assert_same_bits, joined, monolith, small
from tests.sizes import admits
from tests.training import Job, train_jobs
from tests.updates import (
    Case,
    batch_of,
    build,
    chain,
    chain16,
    chain32,
    go_on,
    parameters_of,
    part_of,
    train_cases,
    uncut,
)

ADAM = partial(Adam, lr=0.01)
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
OPTIMIZERS = (
    partial(SGD, lr=0.1),
    MOMENTUM,
    ADAM,
    partial(AdamW, lr=0.01, amsgrad=True),
    partial(RMSprop, lr=0.01, momentum=0.5, centered=True),
)


def warm_up(update):
    return 0.05 * min(1.0, (update + 1) / 3)


def falling(epoch):
    return 1 / (1 + epoch)


def assert_equal_uncut(pool, num_ranks, cases, limit=60):
    results = pool.run(num_ranks, train_cases, cases, limit=limit)
    for index, case in enumerate(cases):
        expected = uncut(case)
        assert expected.losses[0] != expected.losses[-1]
        for rank in results:
            assert rank[index][0] == expected.losses, f"{case}: losses"
        assert_same_bits(joined([rank[index][1] for rank in results]), expected.parameters)


QUICK = [
    Case(OPTIMIZERS[0], chain32, "1f1b", max_grad_norm=0.5),
    Case(OPTIMIZERS[1], chain16, "gpipe", ignored=True),
    Case(OPTIMIZERS[2], schedule="interleaved", max_grad_norm=0.3, accumulate=2, rate=warm_up, ignored=True),
    Case(OPTIMIZERS[3], chain32, "zb-h1", max_grad_norm=0.3),
    Case(OPTIMIZERS[4], schedule="zb-v", accumulate=2),
    Case(OPTIMIZERS[2], chain16, "naive", max_grad_norm=0.3, rate=warm_up),
]


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_equals_the_uncut_model(pool, num_ranks):
    assert_equal_uncut(pool, num_ranks, {1: QUICK[:2], 2: QUICK, 4: QUICK[2:5]}[num_ranks])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_optimizer_schedule_and_dtype_equals_the_uncut_model(pool, num_ranks):
    kinds = itertools.cycle(itertools.product((None, 0.3), (1, 2), (False, True), (None, warm_up)))
    dtypes = itertools.cycle((chain, chain32, chain16, chain))
    cases = [
        Case(optimizer, next(dtypes), schedule, m, 11, None, 4, norm, accumulate, rate=rate, ignored=ignored)
        for schedule in SCHEDULES
        for m in [2 * num_ranks if schedule == "dualpipe-v" else 3]
        if admits(schedule, num_ranks, m)
        for optimizer in OPTIMIZERS
        for norm, accumulate, ignored, rate in [next(kinds)]
    ]
    assert len(cases) == 5 * len(SCHEDULES)
    assert_equal_uncut(pool, num_ranks, cases, limit=110)


ACCUMULATED = {"data": "random", "batch_size": 12, "num_microbatches": 3, "num_iterations": 6}
FLAGS = [
    ({"accumulate": 2}, "1f1b"),
    (
        {"accumulate": 3, "max_grad_norm": 0.5, "optimizer": "adam", "dtype": "float64", "lr_schedule": "warmup-cosine",
         "warmup_iterations": 3},
        "interleaved",
    ),
    ({"accumulate": 2, "max_grad_norm": 0.5, "dtype": "bfloat16", "lr_schedule": "warmup-cosine",
      "warmup_iterations": 2}, "zb-h1"),
]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accumulating_equals_the_monolith_and_one_batch_so_many_times_as_large(pool, num_ranks):
    jobs = [Job(small(**ACCUMULATED, **flags), schedule) for flags, schedule in FLAGS]
    results = pool.run(num_ranks, train_jobs, jobs)
    for index, job in enumerate(jobs):
        ranks, config = [rank[index] for rank in results], job.config
        assert_equals_monolith_but_gradients(ranks, job)
        times = config.accumulate
        whole = dataclasses.replace(
            config,
            accumulate=1,
            batch_size=12 * times,
            num_microbatches=3 * times,
            num_iterations=6 // times,
            warmup_iterations=config.warmup_iterations // times,
        )
        assert ranks[0].weights_sha256 == monolith(whole).weights_sha256, f"{job}: one batch {times} times as large"
        means = [sum(ranks[0].losses[i : i + times]) / times for i in range(0, 6, times)]
        assert means == pytest.approx(monolith(whole).losses, rel=1e-2 if config.dtype == "bfloat16" else 1e-6)


def assert_equals_monolith_but_gradients(ranks, job):
    expected = monolith(job.config)
    assert all(rank.losses == expected.losses for rank in ranks), f"{job}: losses"
    assert_same_bits(joined([rank.parameters for rank in ranks]), expected.parameters)
    assert ranks[0].weights_sha256 == expected.weights_sha256


def test_a_stage_without_parameters(pool):
    case = Case(ADAM, num_iterations=3, max_grad_norm=0.3, sizes=(1, 1, 6))
    results = pool.run(3, train_cases, [case])
    assert all(rank[0][0] == uncut(case).losses for rank in results)
    assert results[1][0][1] == {}
    assert_same_bits(joined([rank[0][1] for rank in results]), uncut(case).parameters)


def refused_on_one_rank(world):
    """What a pipeline of one rank says to optimizers and batches that do not fit."""
    modules = chain()
    pipeline = Pipeline(world, {0: Stage(modules)}, naive(1, 3))
    own, inputs, targets = pipeline.parameters(), *batch_of(Case(ADAM), 0)
    foreign = nn.Parameter(torch.zeros(2))

    def make(parameters=own, num_microbatches=3, kind=OPTIMIZERS[0], **more):
        return PipelineParallelOptimizer(kind(parameters), pipeline, num_microbatches, **more)

    attempts = {
        "none": lambda: make(num_microbatches=0),
        "half": lambda: make(num_microbatches=1.5),
        "table's": lambda: make(num_microbatches=4),
        "default": lambda: PipelineParallelOptimizer(SGD(own, lr=0.1), pipeline),
        "norm": lambda: make(max_grad_norm=0.0),
        "NaN": lambda: make(max_grad_norm=math.nan),
        "accumulate": lambda: make(accumulate=0),
        "word": lambda: make(on_nonfinite="ignore"),
        "foreign": lambda: make([*own, foreign]),
        "missing": lambda: make(own[:-1]),
        "closure": lambda: make(kind=torch.optim.LBFGS),
        "no inputs": lambda: make().optimize((None, targets)),
        "no targets": lambda: make().optimize((inputs, None)),
        "few": lambda: make().optimize((inputs[:2], targets[:2])),
        "unlike": lambda: make().optimize((inputs, targets[:-1])),
        "few later": lambda: [make().optimize((inputs, targets)), make().optimize((inputs[:1], targets[:1]))],
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            said[name] = error
    for parameter in own[:2]:
        parameter.requires_grad_(False)
    make(own[2:])  # a frozen layer need not be in the optimizer
    make(own)  # but may be
    return said


def test_what_does_not_fit_is_refused(pool):
    (said,) = pool.run(1, refused_on_one_rank)
    wanted = {
        "none": "num_microbatches must be at least 1, not 0",
        "half": "num_microbatches must be a whole number, not 1.5",
        "table's": "num_microbatches is 4, but the pipeline's table naive has 3",
        "default": "num_microbatches is 1, but the pipeline's table naive has 3",
        "norm": "max_grad_norm must be above 0, not 0.0",
        "NaN": "max_grad_norm must be above 0, not nan",
        "accumulate": "accumulate must be at least 1, not 0",
        "word": "on_nonfinite must be 'stop' or 'skip', not 'ignore'",
        "foreign": "the optimizer has a parameter that is in no stage of this rank",
        "missing": "7.bias requires a gradient, and the optimizer does not have it",
        "closure": "LBFGS runs the model several times a step, which a pipeline cannot",
        "no inputs": "rank 0 needs the inputs of the batch, and has None",
        "no targets": "rank 0 needs the targets of the batch, and has None",
        "few": "2 rows cannot be cut into 3 microbatches; give each a row",
        "unlike": "the batch has 8 rows of inputs, and 7 of targets",
        "few later": "1 rows cannot be cut into 3 microbatches; give each a row",
    }
    assert {name: str(error) for name, error in said.items()} == wanted
    assert all(isinstance(error, UsageError) for error in said.values())


SIZES = (8, 8, 5, 12, 3)


def other_sizes(world, case):
    """Batches of several sizes, each given to every rank."""
    optimizer = build(world, case)
    losses = []
    for rows in SIZES:
        batch = batch_of(dataclasses.replace(case, rows=rows), 0)
        losses.append(optimizer.optimize(batch).item())
    optimizer.pipeline.close()
    return losses, parameters_of(optimizer)


def test_the_batch_may_change_its_size_where_all_ranks_have_it(pool):
    case = Case(MOMENTUM)
    cut, whole = pool.run(3, other_sizes, case), pool.run(1, other_sizes, case)
    assert all(rank[0] == whole[0][0] for rank in cut)
    assert len(set(whole[0][0])) == len(SIZES)
    assert_same_bits(joined([rank[1] for rank in cut]), whole[0][1])


def two_schedulers(optimizer):
    return SequentialLR(optimizer, [LambdaLR(optimizer, falling), CosineAnnealingLR(optimizer, 5)], milestones=[2])


SCHEDULERS = [
    partial(StepLR, step_size=1, gamma=0.5),
    partial(LambdaLR, lr_lambda=falling),
    partial(OneCycleLR, max_lr=0.1, total_steps=8),
    two_schedulers,
]


def in_two_parts(world, cases):
    """Half of the iterations, then the rest by new objects that know nothing but the bytes; also the step sizes."""
    found = []
    for case in cases:
        first = build(world, case)
        losses = go_on(first, case, case.num_iterations // 2)
        data = first.serialize()
        first.pipeline.close()
        second = build(world, case)
        second.deserialize(data)
        rates = []
        for until in range(case.num_iterations // 2 + 1, case.num_iterations + 1):
            losses += go_on(second, case, until)
            rates.append(second.wrapped.param_groups[0]["lr"])
        second.pipeline.close()
        found.append((losses, parameters_of(second), rates, second.updates))
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedulers_advance_once_an_update_and_survive_their_bytes(pool):
    cases = [Case(ADAM, scheduler=kind, num_iterations=8, accumulate=2) for kind in SCHEDULERS]
    cases.append(Case(ADAM, rate=warm_up, num_iterations=8, accumulate=2))
    results = pool.run(2, in_two_parts, cases)
    for index, case in enumerate(cases):
        ranks, expected = [rank[index] for rank in results], uncut(case)
        assert all(rank[0] == expected.losses for rank in ranks), case.scheduler
        assert_same_bits(joined([rank[1] for rank in ranks]), expected.parameters)
        assert {rank[3] for rank in ranks} == {4}
        assert ranks[0][2] == ranks[1][2]
        # A step size changes after every second iteration alone.
        assert ranks[0][2][0] != ranks[0][2][1] or case.rate is warm_up
        assert ranks[0][2][-1] == expected.optimizer.param_groups[0]["lr"]


def test_bytes_without_the_schedulers_state_are_refused(pool):
    (said,) = pool.run(1, other_scheduler)
    assert said == ["PayloadError: the payloads hold no state of such a learning-rate scheduler"] * 2


def other_scheduler(world):
    said = []
    for saved in (None, partial(StepLR, step_size=2)):
        data = build(world, Case(ADAM, scheduler=saved)).serialize()
        here = build(world, Case(ADAM, scheduler=partial(LambdaLR, lr_lambda=falling)))
        said += errors(lambda here=here, data=data: here.deserialize(data))
    return said


def errors(*attempts):
    said = []
    for attempt in attempts:
        try:
            attempt()
        except (RunError, RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    return said


class Tied(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)


def tied() -> list[nn.Module]:
    """Layers 1 and 2 share a weight."""
    modules = chain(num_linear=3)
    return [modules[0], Tied(modules[2]), Tied(modules[2]), nn.ReLU(), modules[-1]]


def norm_of_tied(world):
    """The shared weight's gradient has a sum of squares of 800, and no other gradient counts."""
    optimizer = build(world, Case(partial(SGD, lr=1.0), tied, sizes=(1, 4), max_grad_norm=1.0))
    for stage in optimizer.pipeline.stages.values():
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
    if world.rank == 1:
        shared = optimizer.pipeline.stages[1].modules[0].linear.weight
        shared.grad.view(-1)[:8] = 10.0
    return optimizer._agree(torch.tensor(0.0), True).norm


def test_a_tied_parameter_counts_once_in_the_norm(pool):
    assert pool.run(2, norm_of_tied) == [math.sqrt(800)] * 2
    case = Case(ADAM, tied, sizes=(1, 4), max_grad_norm=0.1)
    results = pool.run(2, in_two_parts, [case])
    assert all(rank[0][0] == uncut(case).losses for rank in results)
    found, wanted = joined([rank[0][1] for rank in results]), uncut(case).parameters
    assert_same_bits(found, wanted)


WRONG_AT = 2  # counted from 0


class Share:
    """A loss that can be told to be no number, while its gradient stays one."""

    is_wrong = False

    def __call__(self, output, targets, weight):
        return loss_share(output, targets, weight) + (math.nan if self.is_wrong else 0.0)


def then_infinite(optimizer, run):
    """Runs a batch, after which stage 1 has a gradient that is not finite."""

    def spoiled(*arguments, **options):
        share = run(*arguments, **options)
        if 1 in optimizer.pipeline.stages:
            optimizer.pipeline.stages[1].parameters()[-1].grad[0] = math.inf
        return share

    return spoiled


def snapshot(optimizer):
    """All bits of parameters and of the optimizer's state, and all numbers."""
    tensors, scalars = optimizer.state()
    return {name: raw_bytes(value) for name, value in tensors.items()}, scalars


def goes_wrong(world, attempts):
    """Trains until something is not finite at the third iteration, on one rank alone, and on where that is skipped."""
    found = []
    for case, where in attempts:
        share = Share()
        optimizer, losses, said, same = build(world, case, share), [], "", None
        run = optimizer.pipeline.forward_backward
        for iteration in range(case.num_iterations):
            inputs, targets = batch_of(case, iteration)
            is_wrong = iteration == WRONG_AT
            if is_wrong and where == "input":
                inputs[5, 3] = math.nan
            share.is_wrong = is_wrong and where == "loss"
            spoiled = is_wrong and where == "gradient"
            optimizer.pipeline.forward_backward = then_infinite(optimizer, run) if spoiled else run
            before = snapshot(optimizer)
            try:
                losses.append(optimizer.optimize(part_of(optimizer, (inputs, targets))).item())
            except RunError as error:
                said = str(error)
            if is_wrong:
                same = snapshot(optimizer)[0] == before[0]
                updates = optimizer.updates
            if said:
                break
        optimizer.pipeline.close()
        found.append((losses, said, same, updates, parameters_of(optimizer), len(snapshot(optimizer)[0])))
    return found


WHERE = {
    "input": "iteration 3: the loss is nan and gradients of stages 0, 1, 2 are not finite",
    "loss": "iteration 3: the loss is nan",
    "gradient": "iteration 3: gradients of stage 1 are not finite",
}


def test_all_ranks_stop_at_the_same_iteration_and_nothing_has_changed(pool):
    kinds = [Case(ADAM, schedule="zb-h1"), Case(MOMENTUM, max_grad_norm=0.3)]
    attempts = [(case, where) for case in kinds for where in WHERE]
    results = pool.run(3, goes_wrong, attempts)
    for index, (case, where) in enumerate(attempts):
        for losses, said, same, updates, _, count in (rank[index] for rank in results):
            assert said.startswith(WHERE[where] + "; nothing was updated")
            assert losses == uncut(case).losses[:WRONG_AT]
            assert updates == WRONG_AT
            assert same
            assert count >= 4  # not only parameters


def test_a_skipped_update_is_left_out_and_training_goes_on(pool):
    kinds = [
        Case(ADAM, schedule="zb-h1", num_iterations=5, on_nonfinite="skip", rate=warm_up),
        Case(MOMENTUM, num_iterations=5, on_nonfinite="skip", max_grad_norm=0.3),
    ]
    attempts = [(case, where) for case in kinds for where in WHERE]
    results = pool.run(3, goes_wrong, attempts)
    for index, (case, where) in enumerate(attempts):
        ranks, expected = [rank[index] for rank in results], uncut(case, left_out={WRONG_AT})
        for losses, said, same, updates, _, _ in ranks:
            assert (said, same, updates) == ("", True, 2)
            assert math.isnan(losses.pop(WRONG_AT)) == (where != "gradient")
            assert losses == [loss for i, loss in enumerate(expected.losses) if i != WRONG_AT]
        assert_same_bits(joined([rank[4] for rank in ranks]), expected.parameters)
    assert uncut(kinds[0], left_out={WRONG_AT}).losses != uncut(kinds[0]).losses


def accumulates_a_nan(world, case, where):
    """The first of the two batches of the second update is bad, and the other one good."""
    share = Share()
    optimizer, losses, updates = build(world, case, share), [], []
    for iteration in range(case.num_iterations):
        inputs, targets = batch_of(case, iteration)
        if iteration == 2 and where == "input":
            inputs[0, 0] = math.nan
        share.is_wrong = iteration == 2 and where == "loss"
        losses.append(optimizer.optimize(part_of(optimizer, (inputs, targets))).item())
        updates.append(optimizer.updates)
    optimizer.pipeline.close()
    return losses, updates, parameters_of(optimizer)


@pytest.mark.parametrize("where", ["input", "loss"])
def test_one_bad_batch_of_several_leaves_out_their_update(pool, where):
    case = Case(ADAM, accumulate=2, num_iterations=6, on_nonfinite="skip", max_grad_norm=0.3)
    ranks = pool.run(2, accumulates_a_nan, case, where)
    assert all(rank[1] == [0, 1, 1, 1, 1, 2] for rank in ranks)
    assert [math.isnan(loss) for loss in ranks[0][0]] == [False, False, True, False, False, False]
    assert_same_bits(joined([rank[2] for rank in ranks]), uncut(case, left_out={1}).parameters)


# So large a step that bfloat16 or float32 overflows in the forward or in the backward of some stage, and comes back.
DIVERGING = [
    {"learning_rate": 1e5, "num_iterations": 6, "max_grad_norm": 1e30},
    {"learning_rate": 1e37, "dtype": "bfloat16", "num_iterations": 6, "accumulate": 2},
]


def test_a_diverging_run_that_skips_equals_the_monolith(pool):
    jobs = [Job(small(**changes, on_nonfinite="skip", data="random"), "1f1b") for changes in DIVERGING]
    results = pool.run(2, train_jobs, jobs)
    for index, job in enumerate(jobs):
        expected = monolith(job.config)
        texts = [loss.hex() for loss in expected.losses]
        assert {"nan", "inf"} & set(texts)
        assert all([loss.hex() for loss in rank[index].losses] == texts for rank in results)
        assert results[0][index].weights_sha256 == expected.weights_sha256


SAVED = Case(ADAM, num_iterations=6, max_grad_norm=0.3, rate=warm_up)
LOADED = [
    (1, SAVED),
    (3, dataclasses.replace(SAVED, schedule="gpipe", num_microbatches=3)),
    (4, dataclasses.replace(SAVED, schedule="interleaved")),
    (2, dataclasses.replace(SAVED, schedule="zb-v")),
    (3, dataclasses.replace(SAVED, sizes=(1, 1, 6))),
]


def saved(world, cases, until):
    found = []
    for case in cases:
        optimizer = build(world, case)
        go_on(optimizer, case, until)
        found.append(optimizer.serialize())
        optimizer.pipeline.close()
    return found


def loaded(world, cases, payloads):
    found = []
    for case, given in zip(cases, payloads, strict=True):
        optimizer = build(world, case)
        optimizer.deserialize(*given)
        losses = go_on(optimizer, case)
        optimizer.pipeline.close()
        found.append((losses, parameters_of(optimizer), optimizer.updates))
    return found


def assert_goes_on(ranks, case, until):
    expected = uncut(case)
    for losses, _, updates in ranks:
        assert losses == expected.losses[until:]
        assert updates == case.num_iterations // case.accumulate
    assert_same_bits(joined([rank[1] for rank in ranks]), expected.parameters)


def test_bytes_of_two_ranks_load_at_any_other_number(pool):
    payloads = [data for (data,) in pool.run(2, saved, [SAVED], 3)]
    for num_ranks, case in LOADED:
        ranks = pool.run(num_ranks, loaded, [case], [payloads])
        assert_goes_on([rank[0] for rank in ranks], case, 3)


@pytest.mark.slow
def test_bytes_of_any_number_of_ranks_load_at_any_other(pool):
    kinds = [(MOMENTUM, chain32, "1f1b"), (OPTIMIZERS[3], chain16, "interleaved"), (OPTIMIZERS[4], chain, "zb-h1")]
    cases = [Case(*kind, num_iterations=8, accumulate=2) for kind in kinds]
    for there in (1, 2, 3, 4):
        payloads = [list(of_case) for of_case in zip(*pool.run(there, saved, cases, 4), strict=True)]
        for here in (1, 2, 3, 4):
            others = [dataclasses.replace(c, schedule=cases[i - 1].schedule) for i, c in enumerate(cases)]
            ranks = pool.run(here, loaded, others, payloads)
            for index, case in enumerate(others):
                assert_goes_on([rank[index] for rank in ranks], case, 4)


def refuses(world, payloads, earlier, foreign):
    """What a fresh rank says to payloads that it cannot use, whether it has then changed, and that it still loads."""
    optimizer = build(world, SAVED)
    go_on(optimizer, SAVED, 1)
    before = snapshot(optimizer)
    flipped = [bytearray(data) for data in payloads]
    for data in flipped:
        data[-5] ^= 16
    attempts = [
        (),
        payloads[:1],
        payloads[1:],
        [payloads[0], bytes(flipped[1])],
        [payloads[0], payloads[1][:-7]],
        [payloads[0], b"\x80\x04cos\nsystem\n"],
        [payloads[0], earlier[1]],
        foreign,
    ]
    said = errors(*(lambda given=given: optimizer.deserialize(*given) for given in attempts))
    unchanged = snapshot(optimizer) == before
    optimizer.deserialize(*payloads)
    changed = snapshot(optimizer) != before
    return said, unchanged, changed


def test_payloads_that_do_not_fit_change_nothing(pool):
    payloads, earlier = ([data for (data,) in pool.run(2, saved, [SAVED], n)] for n in (3, 2))
    ((foreign,),) = pool.run(1, saved, [dataclasses.replace(SAVED, optimizer=MOMENTUM)], 3)
    ((said, unchanged, changed),) = pool.run(1, refuses, payloads, earlier, [foreign])
    assert unchanged
    assert changed
    assert said[:4] == [
        "PayloadError: nothing to load: no payload was given",
        "PayloadError: layers 4, 5, 6, 7 missing; what was given has layers 0, 1, 2, 3",
        "PayloadError: layers 0, 1, 2, 3 missing; what was given has layers 4, 5, 6, 7",
        "PayloadError: payload 2 of 2 is damaged: its checksum does not match its bytes",
    ]
    assert said[4].startswith("PayloadError: payload 2 of 2 is cut short: ")
    assert said[5].startswith("PayloadError: payload 2 of 2 is no safetensors file")
    assert said[6:] == [
        "PayloadError: the payloads are not of one moment: updates 3, 2",
        "PayloadError: it was saved by the optimizer SGD, and this is Adam",
    ]


def between_updates(world):
    optimizer = build(world, dataclasses.replace(SAVED, accumulate=3))
    go_on(optimizer, SAVED, 4)
    return errors(optimizer.serialize)


def loaded_between_updates(world, data):
    optimizer = build(world, dataclasses.replace(SAVED, accumulate=2))
    before = snapshot(optimizer)
    said = errors(lambda: optimizer.deserialize(data))
    return said, snapshot(optimizer) == before


def test_bytes_of_a_moment_between_two_updates_are_refused(pool):
    (((data,)),) = pool.run(1, saved, [SAVED], 3)
    assert pool.run(1, loaded_between_updates, data) == [
        (["PayloadError: saved after 3 iterations, between two updates of 2 iterations each"], True)
    ]


def test_nothing_is_saved_between_two_updates(pool):
    assert pool.run(1, between_updates) == [
        ["RuntimeError: 1 of 3 iterations are added up; save after the update"]
    ]  # fmt: skip


def disagree(world):
    """Stages that differ in one thing each, twice in the middle: what `synchronize_optimizer_state` says."""
    case = Case(ADAM, sizes=(3, 1, 4))  # the middle stage is a ReLU

    def differing(change, at=2):
        optimizer = build(world, case)
        go_on(optimizer, case, 2)
        if world.rank == at:
            change(optimizer)
        found = errors(optimizer.synchronize_optimizer_state)[0]
        optimizer.pipeline.close()
        return found

    def set_rate(optimizer):
        optimizer.wrapped.param_groups[0]["lr"] = 0.5

    def set_betas(optimizer):
        optimizer.wrapped.param_groups[0]["betas"] = (0.5, 0.9)

    def add_update(optimizer):
        optimizer.updates += 1

    def add_step(optimizer):
        for state in optimizer.wrapped.state.values():
            state["step"] += 1

    def replace_optimizer(optimizer):
        optimizer.wrapped = AdamW(optimizer.wrapped.param_groups, lr=0.01)

    def add_group(optimizer):
        optimizer.wrapped.add_param_group({"params": []})

    return [
        differing(lambda optimizer: None),
        differing(set_rate),
        differing(set_rate, at=1),
        differing(set_betas),
        differing(add_update, at=1),
        differing(add_step),
        differing(replace_optimizer),
        differing(add_group, at=1),
    ]


def test_stages_that_do_not_agree_say_both_values_on_every_rank(pool):
    ranks = pool.run(3, disagree)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0] == [""] + [
        f"RunError: the stages do not agree: {what}"
        for what in (
            "lr is 0.01 on rank 0 and 0.5 on rank 2",
            "lr is 0.01 on rank 0 and 0.5 on rank 1",
            "betas is [0.9, 0.999] on rank 0 and [0.5, 0.9] on rank 2",
            "number of updates is 2 on rank 0 and 3 on rank 1",
            "step counter is 2.0 on rank 0 and 3.0 on rank 2",
            "optimizer is 'Adam' on rank 0 and 'AdamW' on rank 2",
            "number of groups is 1 on rank 0 and 2 on rank 1",
        )
    ]


def test_what_is_raised_is_an_error_of_the_run():
    assert issubclass(PayloadError, RunError)
    assert not issubclass(UsageError, RunError)


# Last, since ranks that fail are started anew for the next test.


def without_targets(world):
    optimizer, (inputs, _) = build(world, Case(ADAM)), batch_of(Case(ADAM), 0)
    optimizer.optimize((inputs if world.rank == 0 else None, None))


def test_a_batch_that_only_one_rank_lacks_ends_all(pool):
    outcomes = pool.outcomes(2, without_targets, timeout=20)
    assert outcomes[1].error == "UsageError: rank 1 needs the targets of the batch, and has None"
    assert "rank 1 failed" in outcomes[0].error
    assert "needs the targets" in outcomes[0].error
