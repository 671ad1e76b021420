"""Step 6: what the measuring programs count, on events made by hand and on tiny models; and that they run."""

import json
import statistics

import pytest
import torch

from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.model import layers
from step0_monolith.reference import forward_backward
from step1_partition.stage import Stage
from step4_sharded.shard import shard
from step5_orchestrator.actions import Value, parse_action
from step5_orchestrator.executor import Event
from step5_orchestrator.lowering import Receive, Send
from step5_orchestrator.prediction import makespan
from step6_schedules.measure import actions, emulated, handover, memory
from step6_schedules.measure.rounds import Sample
from step6_schedules.schedules import SCHEDULES
from tests.monolith import assert_same_bits
from tests.ranks import torchrun

FLOAT = 4  # bytes


def events(text):
    """Such as `0F0 0 1, 0F1 1 2`: an action, its start and its end."""
    cells = [cell.split() for cell in text.split(",")]
    return [Event(parse_action(action), float(start), float(end)) for action, start, end in cells]


def test_a_handover_counts_where_the_taker_was_idle_already():
    rows = [
        # 0B0 waits from 2 on for the 4 of 1B0; 0B1 has its gradient at 5.5, before 0B0 ends.
        events("0F0 0 1, 0F1 1 2, 0B0 4.25 6, 0B1 6.5 8"),
        # 1F0 is the first; 1F1 could have started at 2 and was not idle then; all others are made here.
        events("1F0 1.5 2.5, 1B0 2.5 4, 1F1 4.5 5, 1B1 5 5.5"),
    ]
    assert handover.gaps(rows) == [0.25]
    # The other way round: 1F1 waits for 0F1.
    late = [events("0F0 0 1, 0F1 5 7"), events("1F0 1 2, 1B0 2 4, 1F1 7.5 8")]
    assert handover.gaps(late) == [0.5]


def test_a_handover_within_a_rank_does_not_count():
    rows = [events("0F0 0 1, 1F0 3 4, 1B0 5 6, 0B0 9 10")]
    assert handover.gaps(rows) == []


def test_the_handover_figure_is_a_ratio_round_by_round():
    micros = {
        "ours": [30.0, 20.0, 90.0],
        "by hand": [20.0, 20.0, 30.0],
        "library": [40.0, 80.0, 60.0],
        "bare hop": [9.0],
    }
    figure = handover.figure(micros, 0.0, "any")
    assert figure.value == 1.5
    assert figure.is_met
    assert figure.beside["library / by hand"] == 2.0
    assert figure.beside["ours, us"] == 30.0


def one_iteration(world, name):
    config = Config(num_layers=4, width=16, batch_size=8, num_microbatches=4, data="random")
    runs, close = handover.contestants(world, config, name)
    found = {}
    for who, run in runs.items():
        run()
        found[who] = [str(event.action) for event in run()]
    hop = handover.hop_seconds(world, 64)
    close()
    return found, hop


def test_all_contestants_of_the_handover_run_one_table(pool):
    ranks = pool.run(2, one_iteration, "1f1b")
    for rank, (found, hop) in enumerate(ranks):
        for ran in found.values():
            assert ran == SCHEDULES["1f1b"](2, 4).cells(rank)
        assert hop == ranks[0][1] > 0


def test_an_emulated_iteration_lasts_from_the_first_start_to_the_last_end():
    spans = [[(0.0, 0.25), (1.0, 1.5)], [(0.125, 0.5), (0.75, 1.25)]]
    assert emulated.span_ratios(spans, 500.0) == [1.0, 1.5]


def test_emulated_tables_and_those_that_there_are_none_of():
    tables, missing = emulated.runnable(SCHEDULES, 8, (8, 16))
    assert [(table.name, table.num_microbatches) for table, _ in tables] == [
        (name, m) for m in (8, 16) for name in SCHEDULES if (name, m) != ("dualpipe-v", 8)
    ]
    ((case, reason),) = missing
    assert case == "dualpipe-v, P=8, M=8"
    assert "at least twice as many microbatches" in reason
    for table, cost in tables:
        # However the rank's share is cut, all its layers together take F=10 and B=20 ms a microbatch.
        chunks = len(table.stages_of(0))
        assert (chunks * cost.F, chunks * cost.B, cost.I + cost.W) == (10, 20, cost.B)
    assert makespan(*tables[list(SCHEDULES).index("1f1b")]) == (8 + 7) * 30


def test_the_arithmetic_is_the_monoliths():
    config = Config(num_layers=4, width=16, batch_size=9, num_microbatches=4, data="random")
    whole = layers(config)
    forward_backward(whole, *batch(config, 0), 4)
    for num_chunks in (1, 2):
        stages = [shard(config, num_chunks, index) for index in range(num_chunks)]
        alone = actions.Arithmetic(stages, *batch(config, 0), 4)
        alone()
        wanted = [p.grad for layer in whole for p in layer.parameters()]
        assert_same_bits(
            {str(i): p.grad for i, p in enumerate(alone.parameters)}, {str(i): g for i, g in enumerate(wanted)}
        )


def test_what_python_adds_to_an_action():
    def turns(*microseconds):
        return [Sample(value / 1e6, 0.0, 0.0) for value in microseconds]

    samples = {
        "ours": turns(120, 130, 140, 500),
        "library": turns(140, 180, 140, 90),
        "arithmetic": turns(100, 110, 100, 100),
    }
    figure = actions.figure(samples, 10, "any")
    # 20/40, 20/70, 40/40; in the last round the library seems to take less than its arithmetic.
    assert figure.value == pytest.approx(0.5)
    assert figure.beside["ours adds, us"] == pytest.approx(3.0)
    assert figure.beside["library adds, us"] == pytest.approx(4.0)
    assert figure.beside["arithmetic, us"] == pytest.approx(10.0)


def test_a_ledger_counts_storages_once_and_until_they_are_given_back():
    parameter = torch.zeros(8)
    ledger = memory.Ledger([parameter])
    ledger.note(parameter[2:])
    assert ledger.held == 0
    x = torch.zeros(4, 4)
    ledger.note(x[1:].t())  # holds all of x
    ledger.note(x)
    assert ledger.held == ledger.peak == 16 * FLOAT
    view = x[0]
    del x
    assert ledger.held == 16 * FLOAT
    del view
    assert (ledger.held, ledger.peak) == (0, 16 * FLOAT)


def test_what_autograd_keeps_is_held_until_its_backward():
    held = memory.Held()
    x = torch.ones(5, requires_grad=True)
    with held.watching():
        y = torch.relu(x).exp().sum()
    assert held.activations.held == 2 * 5 * FLOAT
    y.backward()
    assert held.activations.held == 0


def test_bytes_of_a_microbatch_by_hand():
    config = Config(num_layers=6, width=16, batch_size=8, num_microbatches=4, data="random")
    activation = 2 * 16 * FLOAT
    # Stage 0 keeps the outputs of its two layers, and the next also its input. The last layer has no ReLU: its output
    # is not kept, but the 10 logarithms of each row's probabilities are, and the number of rows that count.
    assert memory.bytes_of_stages(config, 3) == [2 * activation, 3 * activation, 2 * activation + (2 * 10 + 1) * FLOAT]


def test_receives_posted_ahead():
    a, b = Value("activation", 1, 0), Value("activation", 1, 1)
    f0, f1 = parse_action("1F0"), parse_action("1F1")
    sizes = {a: 3, b: 4}
    assert memory.posted_ahead([Receive(a, 0), Receive(b, 0), f0, f1], sizes.__getitem__) == 7
    assert memory.posted_ahead([Receive(a, 0), f0, Receive(b, 0), f1], sizes.__getitem__) == 4
    assert memory.posted_ahead([f0, Send(Value("gradient", 1, 0), 0)], sizes.__getitem__) == 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe-v"])
def test_peaks_are_what_the_table_says(pool, name):
    config = Config(num_layers=8, width=16, batch_size=16, num_microbatches=8, data="random", learning_rate=1e-4)
    message = 2 * 16 * FLOAT
    ranks = pool.run(2, memory.run, config, name, 3)
    for rank in ranks:
        # Every iteration holds as much as the one before, to the byte.
        assert len({iteration[:2] for iteration in rank.iterations}) == 1
        activations, with_gradients, _ = rank.iterations[0]
        # Neighbouring stages on one rank share what lies between them, and a sent value may still be under way.
        assert 0.8 * rank.predicted <= activations <= rank.predicted + 2 * message
        # dualpipe-v holds the most where no W is put off.
        assert (with_gradients > activations) == (name == "zb-h1")
    if name == "gpipe":
        assert [rank.iterations[0].activations for rank in ranks] == [rank.predicted for rank in ranks]
        assert ranks[0].predicted == 8 * 4 * message
    figure = memory.peak_figure(ranks, name)
    assert figure.value == max(rank.iterations[0].activations / rank.predicted for rank in ranks)


def forgets_late(world, config, num_backwards):
    """Each microbatch's outputs stay after its backward, and the first so many are let go of at the one after them."""
    backward, kept = Stage.backward, []

    def keeping(stage, microbatch, gradients):
        if len(kept) == num_backwards:
            kept.clear()
            Stage.backward = backward
        else:
            kept.append(stage._saved[microbatch])
        return backward(stage, microbatch, gradients)

    Stage.backward = keeping
    try:
        return memory.run(world, config, "1f1b", 22)
    finally:
        Stage.backward = backward


def test_a_stage_that_forgets_nothing_is_seen(pool):
    config = Config(num_layers=8, width=16, batch_size=16, num_microbatches=8, data="random", learning_rate=1e-4)
    ranks = pool.run(2, forgets_late, config, 1000)
    assert not memory.peak_figure(ranks, "1f1b").is_met
    held, resident = memory.growth_figures(ranks, "1f1b")
    assert held.value == pytest.approx(22 / 20, rel=0.02)
    assert resident.value > 0


def test_each_iteration_has_a_peak_of_its_own(pool):
    config = Config(num_layers=8, width=16, batch_size=16, num_microbatches=8, data="random", learning_rate=1e-4)
    for rank in pool.run(2, forgets_late, config, 8):
        first, _, *later = (iteration.activations for iteration in rank.iterations)
        assert len(set(later)) == 1
        assert first > later[0]


PROGRAMS = {
    "actions": (1, ["--schedules", "1f1b", "--rounds", "1"], 1),
    "handover": (2, ["--schedules", "1f1b", "--rounds", "1"], 1),
    "emulated": (2, ["--schedules", "1f1b,dualpipe-v", "--num-microbatches", "2", "--rounds", "1"], 1),
    "memory": (2, ["--schedules", "1f1b", "--rounds", "1", "--num-iterations", "20"], 3),
    "tracing": (2, ["--schedules", "1f1b", "--rounds", "1"], 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "memory")) for name in PROGRAMS]
)
def test_the_program_runs_and_writes_its_figures(name, tmp_path):
    num_ranks, arguments, num_figures = PROGRAMS[name]
    file = tmp_path / "figures.json"
    ran = torchrun(num_ranks, f"step6_schedules.measure.{name}", *arguments, "--json", file)
    assert ran.status == 0, ran.text
    figures = json.loads(file.read_text())
    assert len(figures) == num_figures == ran.stdout.count("; goal at most")
    for figure in figures:
        assert figure["value"] > 0
        assert figure["is_met"] == (figure["value"] <= figure["goal"])
        assert figure["case"].startswith("1f1b")
    if name == "emulated":
        assert "left out: dualpipe-v, P=2, M=2: " in ran.stdout
        assert statistics.median(figures[0]["samples"]["makespan, ms"]) >= figures[0]["beside"]["table's, ms"] == 90.0
