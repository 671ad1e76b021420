"""Tables travel to and from torch.distributed.pipelining: ours train there and its own here, with equal gradients."""

import csv
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as library
from torch import nn
from torch.distributed.pipelining import PipelineStage

from step0_monolith.data import batch
from step0_monolith.loss import batch_weight, loss_share
from step0_monolith.options import UsageError
from step4_sharded.shard import shard
from step5_orchestrator.actions import parse_action
from step5_orchestrator.legality import check
from step5_orchestrator.spreadsheet import read_csv, write_csv
from step5_orchestrator.table import make_table
from step5_orchestrator.trainer import Trainer
from step6_schedules.schedules import SCHEDULES
from step6_schedules.split_backward import SplitStage
from tests.monolith import joined, monolith, named, small

# 12 rows: the library wants microbatches of one size.
CONFIG = small(data="random", dtype="float64", batch_size=12, num_microbatches=4)

# Two chunks a rank in a loop, with pairs.
PAIRED = """
0F0 0F1 2F0 2F1 (0F2;2B0) (0F3;2B1) 2F2 (2F3;0B0) 0B1 2B2 2B3 0B2 0B3
1F0 1F1 3F0 (3F1;3B0) 3B1 1F2 (1F3;1B0) (3F2;1B1) (3F3;3B2) 3B3 1B2 1B3
"""
# One stage on rank 0 and two neighbours on rank 1; whole and split backwards.
MIXED = """
0F0 0F1 0F2 0I0 0B1 0W0 0F3 0I2 0I3 0W2 0W3
1F0 2F0 2B0 1F1 1I0 2F1 1W0 2I1 1B1 2W1 1F2 2F2 2B2 1B2 1F3 2F3 2I3 1I3 2W3 1W3
"""


def table_of(name, text):
    """A table from lines of actions, where `(0F2;2B0)` is a pair."""
    lines = text.split("\n")[1:-1]
    pairs = [cell[1 : cell.index(";")] for line in lines for cell in line.split() if ";" in cell]
    rows = [line.replace("(", "").replace(")", "").replace(";", " ").split() for line in lines]
    return make_table(name, [[parse_action(cell) for cell in row] for row in rows], map(parse_action, pairs))


def train_there(world, config, path, num_stages, own):
    """One batch in that library's runtime, from the file, with our weights: this rank's gradients and losses."""
    stages = [shard(config, num_stages, index, None, world.device) for index in own]
    theirs = [
        PipelineStage(nn.Sequential(*stage.modules), index, num_stages, world.device)
        for index, stage in zip(own, stages, strict=True)
    ]
    inputs, targets = batch(config, 0)
    loss = partial(loss_share, weight=batch_weight(targets))
    runtime = library._PipelineScheduleRuntime(theirs, config.num_microbatches, loss, scale_grads=False)
    runtime._load_csv(path)
    losses = []
    arguments = [inputs] if 0 in own else []
    runtime.step(*arguments, target=targets if num_stages - 1 in own else None, losses=losses)
    return joined([named(stage.modules, stage.first_layer, gradients=True) for stage in stages]), losses


def train_there_all(world, config, files):
    return [train_there(world, config, path, table.num_stages, table.stages_of(world.rank)) for path, table in files]


def train_here(world, config, path):
    """One iteration of ours under the table in a file; returns this rank's gradients."""
    trainer = Trainer(config, world, read_csv(path, world.size, config.num_microbatches), stage_class=SplitStage)
    loss = trainer.step()
    trainer.close()
    return joined([named(s.modules, s.first_layer, gradients=True) for s in trainer.pipeline.stages.values()]), loss


def train_here_all(world, config, paths):
    return [train_here(world, config, path) for path in paths]


def drawn_there(name, num_ranks, num_microbatches, num_chunks, folder):
    """The file that the library writes of its own schedule."""
    path = folder / f"{name}-{num_ranks}-{num_microbatches}-{num_chunks}.csv"
    # All that drawing looks at.
    stages = [
        SimpleNamespace(num_stages=num_ranks * num_chunks, group_size=num_ranks, group_rank=0, submod=None)
        for _ in range(num_chunks)
    ]
    if name in SINGLE:
        # These cannot write files, and their order names the reduction over replicas, which is no compute.
        order = getattr(library, name)(stages[0], num_microbatches)._get_pipeline_order()
        rows = [["" if a is None or not a.is_compute_op else a for a in order[rank]] for rank in range(num_ranks)]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    else:
        getattr(library, name)(stages, num_microbatches)._dump_csv(path, format="compute_only")
    return path


SINGLE = ("ScheduleGPipe", "Schedule1F1B")
DRAWN_RIGHT = {
    "ScheduleGPipe": 1,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def assert_gradients(found, expected, what):
    """Relative error of each gradient at most 1e-12 (float64)."""
    assert found.keys() == expected.keys(), what
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= 1e-12, f"{what}: {name} differs by {error}"


def assert_trains_there(pool, tables, config, folder):
    files = [(str(folder / f"{index}-{table.name}.csv"), table) for index, table in enumerate(tables)]
    for path, table in files:
        write_csv(table, path)
    expected = monolith(config)
    ranks = pool.run(tables[0].num_ranks, train_there_all, config, files)
    for table, parts in zip(tables, zip(*ranks, strict=True), strict=True):
        assert_gradients(joined([gradients for gradients, _ in parts]), expected.gradients, table.name)
        shares = [losses for _, losses in parts if losses]
        assert len(shares) == 1, f"{table.name}: one rank has the last stage"
        assert sum(share.item() for share in shares[0]) == pytest.approx(expected.losses[0], rel=1e-12)


def assert_trains_here(pool, num_ranks, paths, config):
    expected = monolith(config)
    ranks = pool.run(num_ranks, train_here_all, config, [str(path) for path in paths])
    for path, parts in zip(paths, zip(*ranks, strict=True), strict=True):
        assert_gradients(joined([gradients for gradients, _ in parts]), expected.gradients, path.name)
        assert [loss for _, loss in parts] == [pytest.approx(expected.losses[0], rel=1e-12)] * num_ranks


def test_our_tables_train_there(pool, tmp_path):
    tables = [schedule(2, 4) for schedule in SCHEDULES.values()]
    tables += [table_of("paired", PAIRED), table_of("mixed", MIXED)]
    assert {op for table in tables for op in table.ops} == set("FBIW")
    assert_trains_there(pool, tables, CONFIG, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(3, 6), (4, 8), (4, 2)])
def test_our_tables_of_more_ranks_train_there(pool, tmp_path, num_ranks, num_microbatches):
    config = small(data="random", dtype="float64", batch_size=24, num_microbatches=num_microbatches)
    tables = []
    for schedule in SCHEDULES.values():
        try:
            tables.append(schedule(num_ranks, num_microbatches))
        except UsageError:
            assert num_microbatches < num_ranks, schedule.name
    assert len(tables) >= 3
    assert_trains_there(pool, tables, config, tmp_path)


def test_their_tables_train_here(pool, tmp_path):
    paths = [drawn_there(name, 2, 4, num_chunks, tmp_path) for name, num_chunks in DRAWN_RIGHT.items()]
    assert_trains_here(pool, 2, paths, CONFIG)


@pytest.mark.slow
def test_their_tables_of_more_ranks_train_here(pool, tmp_path):
    config = small(data="random", dtype="float64", num_microbatches=8)  # 13 rows: here pieces may differ in size
    paths = [drawn_there(name, 4, 8, num_chunks, tmp_path) for name, num_chunks in DRAWN_RIGHT.items()]
    assert_trains_here(pool, 4, paths, config)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 2), (2, 4), (3, 6), (4, 8), (8, 16)])
def test_their_tables_are_legal_and_return_unchanged(tmp_path, num_ranks, num_microbatches):
    for name, num_chunks in DRAWN_RIGHT.items():
        path = drawn_there(name, num_ranks, num_microbatches, num_chunks, tmp_path)
        table = read_csv(path, num_ranks, num_microbatches)
        check(table)
        assert table.name == path.name
        assert table.num_stages == num_ranks * num_chunks
        assert bool(table.pairs) == (name == "ScheduleDualPipeV")
        # Breadth-first goes backward from the last microbatch to the first, and so adds in another order than ours.
        assert bool(table.unordered_stages) == (name == "ScheduleLoopedBFS")
        write_csv(table, tmp_path / "again.csv")
        again = read_csv(tmp_path / "again.csv")
        assert (again.rows, again.pairs) == (table.rows, table.pairs)
        read_there = library.PipelineScheduleMulti.__new__(library.PipelineScheduleMulti)
        read_there.pipeline_order = {}
        read_there._validate_and_set_stage_mapping = lambda actions: None
        read_there._load_csv(tmp_path / "again.csv")
        drawn = [[str(action) for action in row if action] for row in read_there.pipeline_order.values()]
        assert drawn == [table.cells(rank) for rank in range(num_ranks)]


def test_their_1f1b_is_drawn_wrongly_and_refused(tmp_path):
    """The last rank's row starts at microbatch 1; neither their checker takes it nor ours."""
    path = drawn_there("Schedule1F1B", 4, 8, 1, tmp_path)
    with pytest.raises(UsageError, match=r"O4 \(row 4, column 15\) holds 3F8, but microbatches are 0\.\.7"):
        read_csv(path, 4, 8)
    table = read_csv(path, 4)
    with pytest.raises(UsageError, match="rank 0 lacks 0F8"):
        check(table)
    order = {rank: [library._Action.from_str(cell) for cell in table.cells(rank)] for rank in range(4)}
    with pytest.raises(AssertionError, match="microbatch 0 without first running Forward"):
        library._validate_schedule(order, 4, 4, 8)


def test_their_lowered_tables_are_refused(tmp_path):
    path = tmp_path / "lowered.csv"
    stages = [SimpleNamespace(num_stages=4, group_size=2, group_rank=0, submod=None) for _ in range(2)]
    library.ScheduleInterleaved1F1B(stages, 4)._dump_csv(path)
    with pytest.raises(UsageError, match=r"A1 \(row 1, column 1\) holds '0UNSHARD': UNSHARD is communication"):
        read_csv(path)
