"""Step 5: the pipeline on real ranks, with modules of every kind, against the same modules uncut."""

import itertools
import weakref

import pytest
import torch
from torch import nn

from step0_monolith.data import batch, microbatch_sizes
from step0_monolith.data import test_set as the_test_set
from step0_monolith.model import layers
from step0_monolith.reference import evaluate, forward_backward
from step1_partition.stage import Stage
from step2_comms.channel import Channel
from step5_orchestrator.actions import Action, is_given, makes, needs
from step5_orchestrator.costs import costs
from step5_orchestrator.gather import gather_parameters
from step5_orchestrator.naive import naive
from step5_orchestrator.pipeline import Pipeline
from step5_orchestrator.prediction import peak_in_flight
from step5_orchestrator.table import make_table
from step5_orchestrator.trainer import Trainer, measured_bubble
from step6_schedules.schedules import SCHEDULES
from tests.modules import batch_normed, embedded, frozen_first, no_parameters_at_first, residual
from tests.monolith import assert_same_bits, joined, monolith, named, small
from tests.ranks import RanksFailed
from tests.sizes import admits, every_size
from tests.training import (
    Job,
    assert_equals_monolith,
    buffers_of,
    linear_chain,
    run_modules,
    stage_class_for,
    train_job,
)

KINDS = [
    (embedded, [1, 1, 2, 2]),
    (residual, [1, 1, 2, 1]),
    (residual, [2, 1, 2]),
    (frozen_first, [1, 1, 1, 1]),
    (batch_normed, [1, 1, 2]),
    (no_parameters_at_first, [1, 1, 2]),
]


@pytest.mark.filterwarnings("ignore:layer . uses batch")
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize(("make", "sizes"), KINDS, ids=lambda v: v.__name__ if callable(v) else str(v))
def test_any_modules_equal_the_uncut_ones(pool, make, sizes, autocast):
    torch.manual_seed(0)
    inputs = torch.randint(50, (7,)) if make is embedded else torch.randn(7, 8)
    targets = torch.randint(10, (7,))
    targets[1] = -100
    ranks = pool.run(len(sizes), run_modules, make, sizes, inputs, targets, 3, "1f1b", autocast)
    torch.manual_seed(3)
    whole = make()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = forward_backward(whole, inputs, targets, 3)
    assert all(torch.equal(found, loss) for found, _, _ in ranks)
    assert_same_bits(joined([gradients for _, gradients, _ in ranks]), named(whole, gradients=True))
    if make is batch_normed:
        assert_same_bits(joined([buffers for _, _, buffers in ranks]), buffers_of(Stage(whole)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_targets_that_are_ignored_uneven_and_permuted(pool, schedule):
    torch.manual_seed(1)
    inputs, targets = torch.randn(8, 8, dtype=torch.float64), torch.randint(10, (8,))
    ignored = targets.clone()
    ignored[[0, 1, 2, 5]] = -100
    losses = []
    m = 3 if admits(schedule, 2, 3) else 5
    for chosen in (targets, ignored, targets.roll(1), torch.full_like(targets, -100)):
        ranks = pool.run(2, run_modules, linear_chain, None, inputs, chosen, m, schedule)
        whole = linear_chain()
        loss = forward_backward(whole, inputs, chosen, m)
        assert all(torch.equal(found, loss) for found, _, _ in ranks)
        assert_same_bits(joined([gradients for _, gradients, _ in ranks]), named(whole, gradients=True))
        losses.append(loss.item())
    assert len(set(losses)) == 4
    assert losses[3] == 0.0


def test_two_batches_without_zero_grad_add_up(pool):
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 8, dtype=torch.float64), torch.randint(10, (6,))
    ranks = pool.run(2, run_modules, linear_chain, None, inputs, targets, 2, "gpipe", False, 2)
    whole = linear_chain()
    forward_backward(whole, inputs, targets, 2)
    forward_backward(whole, inputs, targets, 2)
    assert_same_bits(joined([gradients for _, gradients, _ in ranks]), named(whole, gradients=True))


def test_dropout_differs_from_iteration_to_iteration_as_in_the_monolith(pool):
    inputs, targets = torch.arange(6), torch.arange(6)
    ranks = pool.run(2, run_modules, embedded, None, inputs, targets, 2, "gpipe", False, 2)
    torch.manual_seed(3)
    whole = embedded()
    first, second = (forward_backward(whole, inputs, targets, 2, iteration=i) for i in range(2))
    assert first != second
    assert all(torch.equal(loss, second) for loss, _, _ in ranks)
    assert_same_bits(joined([gradients for _, gradients, _ in ranks]), named(whole, gradients=True))


def run_placed(world, placement, inputs, targets):
    """Stages of one layer each, on the ranks that `placement` names, in stop-and-wait order."""
    modules = linear_chain(num_layers=len(placement))
    rows = [[] for _ in range(world.size)]
    for m in range(3):
        for op, order in (("F", range(len(placement))), ("B", reversed(range(len(placement))))):
            for stage in order:
                rows[placement[stage]].append(Action(stage, op, m))
    stages = {s: Stage([modules[s]], s) for s, rank in enumerate(placement) if rank == world.rank}
    pipeline = Pipeline(world, stages, make_table("placed", rows))
    pipeline.open("train", inputs.shape, inputs.dtype)
    pipeline.open("evaluate", inputs.shape, inputs.dtype)
    loss = pipeline.run(inputs, targets)
    found = pipeline.evaluate(inputs, targets)
    gathered = gather_parameters(world, stages, pipeline.table.rank_of_stage)
    pipeline.close()
    return loss, joined([named(s.modules, i, gradients=True) for i, s in stages.items()]), found, gathered


@pytest.mark.parametrize("placement", [[1, 0], [0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 0], [2, 0, 1]], ids=str)
def test_stages_may_lie_on_any_ranks(pool, placement):
    torch.manual_seed(1)
    inputs, targets = torch.randn(7, 8, dtype=torch.float64), torch.randint(10, (7,))
    ranks = pool.run(max(placement) + 1, run_placed, placement, inputs, targets)
    whole = linear_chain(num_layers=len(placement))
    loss = forward_backward(whole, inputs, targets, 3)
    assert all(torch.equal(rank[0], loss) for rank in ranks)
    assert_same_bits(joined([rank[1] for rank in ranks]), named(whole, gradients=True))
    assert all(rank[2] == evaluate(whole, inputs, targets, 3) for rank in ranks)
    flat = [p.detach() for module in whole for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][3], flat, strict=True))


class Marked(nn.Module):
    """Notes which microbatch it was given: every row holds its microbatch's number."""

    seen: list = []  # noqa: RUF012

    def forward(self, x):
        Marked.seen.append(int(x[0, 0]))
        return x


def marked_batch(world, schedule, num_microbatches):
    Marked.seen.clear()
    pairs = []

    def share(output, targets, weight):
        pairs.append((int(output[0, 0]), int(targets[0])))
        return output.sum() * 0

    rows = torch.cat([torch.full((n, 1), float(m)) for m, n in enumerate(microbatch_sizes(13, num_microbatches))])
    table = SCHEDULES[schedule](world.size, num_microbatches)
    stages = {i: stage_class_for(table)([Marked()], i) for i in table.stages_of(world.rank)}
    pipeline = Pipeline(world, stages, table, share=share)
    pipeline.open("train", rows.shape, rows.dtype)
    Marked.seen.clear()
    pipeline.run(rows, rows[:, 0].long())
    pipeline.close()
    return list(Marked.seen), pairs


@pytest.mark.parametrize(("schedule", "num_ranks", "m"), every_size([(3, 1), (3, 3), (3, 5)]))
def test_a_target_always_meets_its_own_input(pool, schedule, num_ranks, m):
    results = pool.run(num_ranks, marked_batch, schedule, m)
    table = SCHEDULES[schedule](num_ranks, m)
    for (seen, _), row in zip(results, table.rows, strict=True):
        assert seen == [action.microbatch for action in row if action.op == "F"]
    assert results[table.rank_of_stage[-1]][1] == [(i, i) for i in range(m)]


def evaluate_in_between(world, config):
    trainer = Trainer(config, world, SCHEDULES["1f1b"](world.size, config.num_microbatches))
    before = trainer.evaluate()
    while trainer.iteration < config.num_iterations:
        trainer.step()
        trainer.evaluate()
    stages = trainer.pipeline.stages.values()
    parameters = joined([named(s.modules, s.first_layer) for s in stages])
    after = trainer.evaluate()
    again = trainer.evaluate()
    trainer.close()
    return trainer.losses, parameters, before, after, again


def test_evaluation_in_between_changes_nothing_and_equals_the_monolith(pool):
    config = small()
    ranks = pool.run(3, evaluate_in_between, config)
    expected = monolith(config)
    assert_same_bits(joined([parameters for _, parameters, *_ in ranks]), expected.parameters)
    whole = layers(config)
    first = evaluate(whole, *the_test_set(config), config.num_microbatches)
    for losses, _, before, after, again in ranks:
        assert losses == expected.losses
        assert before == first
        assert after == again != before


def count_calls(world, config):
    """Calls of the stage's first module and boundary gradients in each of 5 iterations."""
    trainer = Trainer(config, world, SCHEDULES["1f1b"](world.size, config.num_microbatches))
    (stage,) = trainer.pipeline.stages.values()
    calls, gradients = [], []
    stage.modules[0].register_forward_pre_hook(lambda module, args: calls.append(args[0]))
    counts = []
    for _ in range(5):
        calls.clear()
        trainer.step()
        counts.append(len(calls))
        gradients.append([x.grad.clone() if x.grad is not None else None for x in calls])
        assert all(x.is_leaf for x in calls)
    trainer.close()
    return counts, gradients


def test_every_iteration_calls_a_stage_as_often_and_boundary_gradients_are_fresh(pool):
    config = small()
    for rank, (counts, gradients) in enumerate(pool.run(3, count_calls, config)):
        assert counts == [config.num_microbatches] * 5
        for first, second in itertools.pairwise(gradients):
            for a, b in zip(first, second, strict=True):
                assert (a is None) == (b is None) == (rank == 0)
                assert rank == 0 or not torch.equal(a, b)


def corrupt(world, job, how):
    """Trains with every message from rank 0 changed on its way."""
    original = Channel._outgoing
    held = []

    def changed(channel, tensor):
        if channel.source != 0 or channel.direction != "forward":
            return original(channel, tensor)
        if how == "zeroed":
            tensor = torch.zeros_like(tensor)
        elif how == "negated":
            tensor = -tensor
        elif how == "noisy":
            tensor = tensor * (1 + 1e-6)
        elif how == "shuffled":
            tensor = tensor.roll(1, 0)
        elif how == "one late":
            held.append(tensor)
            tensor = held[-2] if len(held) > 1 and held[-2].shape == tensor.shape else tensor
        return original(channel, tensor.clone())

    Channel._outgoing = changed
    try:
        return train_job(world, job)
    finally:
        Channel._outgoing = original


@pytest.mark.parametrize("how", ["untouched", "zeroed", "negated", "noisy", "shuffled", "one late"])
def test_changed_messages_are_caught_by_gradients(pool, how):
    job = Job(small(), "1f1b")
    ranks = pool.run(2, corrupt, job, how)
    if how == "untouched":
        assert_equals_monolith(ranks, job)
        return
    with pytest.raises(AssertionError):
        assert_same_bits(joined([r.gradients for r in ranks]), monolith(job.config).gradients)
    with pytest.raises(AssertionError):
        assert_equals_monolith(ranks, job)


def peak_bytes(world, schedule, num_microbatches):
    """The most bytes that autograd holds for backward passes on this rank, over microbatches of 4 rows each."""
    held, peak, alive = 0, 0, weakref.WeakSet()

    class Held:
        def __init__(self, tensor):
            nonlocal held, peak
            self.tensor = tensor
            held += tensor.nbytes
            peak = max(peak, held)
            alive.add(self)

        def __del__(self):
            nonlocal held
            held -= self.tensor.nbytes

    torch.manual_seed(0)
    width = 32
    stage = Stage([nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))], world.rank)
    table = SCHEDULES[schedule](world.size, num_microbatches)
    pipeline = Pipeline(world, {world.rank: stage}, table, share=lambda output, targets, weight: output.sum())
    rows = torch.randn(4 * num_microbatches, width)
    pipeline.open("train", rows.shape, rows.dtype)
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda h: h.tensor):
        pipeline.run(rows, torch.zeros(len(rows), dtype=torch.long))
    left = held
    pipeline.close()
    return peak, left, pipeline.executor.peak_in_flight


def test_1f1b_holds_the_same_memory_for_more_microbatches_and_gpipe_grows(pool):
    peaks = {(s, m): pool.run(4, peak_bytes, s, m) for s in ("1f1b", "gpipe") for m in (4, 8, 16)}
    assert all(left == 0 for ranks in peaks.values() for _, left, _ in ranks)
    for rank in range(4):
        # Bytes of one microbatch on this rank, from a run that holds exactly 4.
        one = peaks["gpipe", 4][rank][0] / 4
        for m in (4, 8, 16):
            assert peaks["1f1b", m][rank][0] == one * (4 - rank)
            assert peaks["gpipe", m][rank][0] == one * m
            assert peaks["1f1b", m][rank][2] == 4 - rank
            assert peaks["gpipe", m][rank][2] == m


def results(world, config, schedule, emulate):
    table = SCHEDULES[schedule](world.size, config.num_microbatches)
    trainer = Trainer(config, world, table, emulate=emulate, stage_class=stage_class_for(table))
    trainer.train()
    result, timeline = trainer.result(), trainer.timeline()
    trainer.close()
    return result, timeline


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_result_and_events_under_emulation(pool, schedule):
    m = 5 if admits(schedule, 4, 5) else 8
    config = small(num_microbatches=m)
    cost = costs(2.0, 4.0, comm=0.5)
    (result, timeline), *others = pool.run(4, results, config, schedule, cost)
    assert others == [(None, None)] * 3
    table = SCHEDULES[schedule](4, m)
    assert result.weights_sha256 == monolith(config).weights_sha256
    assert result.losses == monolith(config).losses
    assert (result.schedule, result.num_ranks, result.num_microbatches) == (schedule, 4, m)
    assert result.num_stages == table.num_stages
    assert len(result.iteration_seconds) == 5
    assert result.peak_in_flight == peak_in_flight(table)
    message = 13 * config.width * 4  # rows x width x bytes, one way
    sent = [0] * 4
    for here, there in itertools.pairwise(table.rank_of_stage):
        if here != there:
            sent[here] += message
            sent[there] += message
    assert result.bytes_sent == sent
    assert 0 < result.bubble["predicted"] <= result.bubble["measured"] < 1
    assert [[event.action for event in row] for row in timeline] == [list(row) for row in table.rows]
    for row in timeline:
        assert all(e.end - e.start >= cost.of(e.action) / 1e3 for e in row)
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))
    ends = {value: (e.end, e.action.stage) for row in timeline for e in row for value in makes(e.action)}
    owners = table.rank_of_stage
    for event in (event for row in timeline for event in row):
        for value in (v for v in needs(event.action) if not is_given(v, table.num_stages)):
            made, stage = ends[value]
            travels = 0.0005 if owners[stage] != owners[event.action.stage] else 0.0
            assert event.start >= made + travels, f"{event.action} starts before {value} is there"


def test_one_rank_sends_nothing(pool):
    config = small()
    ((result, _),) = pool.run(1, results, config, "1f1b", None)
    assert result.bytes_sent == [0]
    assert result.weights_sha256 == monolith(config).weights_sha256


def test_measured_bubble_counts_waiting():
    # Two ranks, four iterations of 10 s of which they work 6 and 8; the first two are left out.
    spans = [[(0.0, 10.0, 1.0)] * 2 + [(0.0, 10.0, 6.0)] * 2, [(0.0, 9.0, 1.0)] * 2 + [(1.0, 9.0, 8.0)] * 2]
    assert measured_bubble(spans) == pytest.approx(1 - 14 / 20)


def wrong_table(world, kind):
    stages = {world.rank: Stage(layers(small(), world.rank, world.rank + 1), world.rank)}
    if kind == "ranks":
        Pipeline(world, stages, naive(3, 2))
    elif kind == "stages":
        Pipeline(world, {5: next(iter(stages.values()))}, naive(2, 2))
    else:
        Pipeline(world, stages, naive(2, 9)).open("train", (5, 64), torch.float32)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("ranks", "has 3 rows, but there are 2 ranks"), ("stages", "not [5]"), ("rows", "5 rows cannot be cut into 9")],
)
def test_a_pipeline_that_does_not_fit_is_refused_on_every_rank(pool, kind, message):
    for outcome in pool.outcomes(2, wrong_table, kind):
        assert outcome.error.startswith("TableError")
        assert message in outcome.error


def test_one_row_for_batch_norm_is_refused(pool):
    with pytest.raises(RanksFailed, match="leave it one row alone"):
        pool.run(2, run_modules, batch_normed, [2, 2], torch.randn(5, 8), torch.randint(10, (5,)), 3, "naive")


def two_shapes(world, config):
    """Opens again with other batch sizes, between iterations."""
    stages = {world.rank: Stage(layers(config, 3 * world.rank, 3 * world.rank + 3), 3 * world.rank)}
    pipeline = Pipeline(world, stages, SCHEDULES["1f1b"](world.size, 3))
    losses = []
    for rows in (13, 7, 13, 5):
        inputs, targets = batch(config, 0)
        pipeline.open("train", (rows, 64), torch.float32)
        losses.append(pipeline.run(inputs[:rows], targets[:rows]))
    pipeline.close()
    return losses, named(stages[world.rank].modules, 3 * world.rank, gradients=True)


def test_the_batch_may_change_its_size_when_the_edges_are_opened_again(pool):
    config = small()
    ranks = pool.run(3, two_shapes, config)
    whole = layers(config)
    inputs, targets = batch(config, 0)
    losses = [forward_backward(whole, inputs[:rows], targets[:rows], 3) for rows in (13, 7, 13, 5)]
    assert [rank[0] for rank in ranks] == [losses] * 3
    assert_same_bits(joined([gradients for _, gradients in ranks]), named(whole, gradients=True))
