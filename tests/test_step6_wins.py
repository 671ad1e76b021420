"""Step 6: where a pipeline wins. What ranks hold, a limit on memory, emulated devices; and what the page says of it."""

import json
import resource
import statistics
import sys

import pytest
import torch

from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.options import RunError, UsageError
from step0_monolith.train import Training
from step5_orchestrator.actions import Action, needs
from step5_orchestrator.costs import costs
from step5_orchestrator.executor import ROOM
from step5_orchestrator.lowering import Receive
from step5_orchestrator.prediction import makespan
from step5_orchestrator.trainer import Trainer
from step6_schedules.measure import limited, wins, wins_devices, wins_sizes
from step6_schedules.measure.contestants import Ours
from step6_schedules.measure.holds import Activations, counted, formula
from step6_schedules.measure.late_receives import no_room
from step6_schedules.measure.program import SIZES
from step6_schedules.measure.rounds import Sample
from step6_schedules.schedules import SCHEDULES
from tests.lessons import difference
from tests.ranks import ROOT, python, torchrun

PAGE = (ROOT / "step6_schedules" / "cost.md").read_text(encoding="utf-8")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to a limit of its memory")


def says(text):
    assert text in " ".join(PAGE.split()), f"cost.md does not say {text!r}"


def small(**changes):
    sizes = {"num_layers": 5, "width": 24, "batch_size": 48, "num_microbatches": 6, "data": "random"}
    return Config(**{**sizes, **changes})


def held(world, config, schedule):
    """What a rank held by the end of two iterations, and what autograd still holds."""
    table = SCHEDULES[schedule](world.size, config.num_microbatches)
    trainer = Trainer(config, world, table)
    activations = Activations(trainer.pipeline.parameters())
    with activations.counting():
        trainer.step()
        trainer.step()
    found = counted(trainer.pipeline.parameters(), trainer.optimizer.wrapped, activations)
    trainer.close()
    return found, activations.held


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("schedule", "optimizer", "dtype"),
    [("1f1b", "adam", "float32"), ("gpipe", "sgd", "float32"), ("1f1b", "sgd", "float64")],
)
def test_what_a_rank_holds_is_what_the_formula_says(pool, num_ranks, schedule, optimizer, dtype):
    config = small(optimizer=optimizer, dtype=dtype)
    table = SCHEDULES[schedule](num_ranks, config.num_microbatches)
    for rank, (found, left) in enumerate(pool.run(num_ranks, held, config, schedule)):
        assert found == formula(config, table, rank)
        assert left == 0


def test_the_formula_in_the_words_of_the_page():
    config = limited.config_of(limited.LimitOptions())
    rows = config.batch_size // config.num_microbatches
    table = SCHEDULES["1f1b"](4, config.num_microbatches)
    width = config.width
    found = formula(config, table, 1)  # four layers, and three microbatches in flight
    assert found.weights == found.gradients == 4 * 4 * (width * width + width)
    assert found.state == 2 * found.weights + 4 * 8
    assert found.activations == 3 * 4 * rows * (width + 4 * width)


def test_the_whole_model_exceeds_the_limit_by_half_and_no_stage_does():
    options = limited.LimitOptions()
    config, limit = limited.config_of(options), options.megabytes * limited.MEGABYTE
    tables = {p: SCHEDULES["1f1b"](p, config.num_microbatches) for p in (1, wins.LIMITED_RANKS)}
    assert formula(config, tables[1], 0).total > 1.5 * limit
    assert all(2 * formula(config, tables[4], rank).total < limit for rank in range(4))


def text_block(command):
    """The output that the page shows under a command that the lessons' own tests do not run."""
    shown = PAGE.split(f"```text\n$ {command}\n")[1].split("```")[0]
    return "".join(line + "\n" for line in shown.splitlines())


@needs_linux
@pytest.mark.slow
def test_under_one_limit_the_monolith_is_refused_and_ranks_train():
    module = limited.PROGRAM
    alone = python(module)
    assert alone.status == 1
    assert not difference(text_block(f"python -m {module}"), alone.stderr)
    assert not alone.stdout
    ranks = torchrun(wins.LIMITED_RANKS, module)
    assert ranks.status == 0, ranks.text
    command = f"torchrun --standalone --nproc-per-node {wins.LIMITED_RANKS} -m {module}"
    assert not difference(text_block(command), ranks.stdout)
    # Here the monolith has room, and comes to the same loss.
    training = Training(limited.config_of(limited.LimitOptions()))
    losses = [training.step() for _ in range(limited.NUM_ITERATIONS)]
    assert ranks.stdout.split()[-1] == f"{losses[-1]:.6f}"


@needs_linux
@pytest.mark.slow
def test_with_room_enough_the_monolith_trains_too():
    ran = python(limited.PROGRAM, "--megabytes", "1000")
    assert ran.status == 0, ran.text
    assert "rank 0 held" in ran.stdout
    assert "as the formula says" in ran.stdout
    assert "the monolith trained 3 iterations in 1000 MB each" in ran.stdout


@needs_linux
@pytest.mark.slow
def test_a_rank_that_is_refused_ends_all_with_a_line():
    ran = torchrun(2, limited.PROGRAM, "--megabytes", "200")
    assert ran.status == 1
    assert "cannot train in 200 MB: with weights" in ran.stderr
    assert 'Traceback (most recent call last):\n  File "<frozen runpy>"' not in ran.stderr
    assert "trained" not in ran.stdout


@needs_linux
def test_a_system_that_does_not_keep_the_limit_is_found_out(monkeypatch):
    monkeypatch.setattr(resource, "setrlimit", lambda *arguments: None)
    with pytest.raises(RunError, match="does not hold a process to a limit"):
        limited.limit_memory(10, [])


def test_a_system_without_limits_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="needs Linux: darwin"):
        limited.check_system()
    assert wins.memory() == []
    assert "left out: memory" in capsys.readouterr().out


def test_only_a_refusal_of_memory_is_called_one():
    weights = [torch.nn.Parameter(torch.zeros(500_000))]
    with pytest.raises(RunError, match=r"who cannot train in 7 MB: with weights 2\.0 MB and gradients 0\.0 MB there"):
        with limited.refusal("who", 7, weights):
            raise MemoryError
    with pytest.raises(RuntimeError, match=r"^shapes$"), limited.refusal("who", 7, weights):
        raise RuntimeError("shapes")
    with pytest.raises(RunError, match="refused more memory"), limited.refusal("who", 7, weights):
        torch.empty(2**60)


@needs_linux
@pytest.mark.parametrize("line", [None, "error: something else"])
def test_a_monolith_that_is_not_refused_is_no_proof(monkeypatch, line):
    monkeypatch.setattr(wins, "refused", lambda: line)
    with pytest.raises(RunError, match="should not fit into 350 MB"):
        wins.memory()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_one_device_does_the_work_of_all(num_ranks):
    f, b, m = wins_devices.F, wins_devices.B, wins_devices.NUM_MICROBATCHES
    pipeline = makespan(SCHEDULES["1f1b"](num_ranks, m), costs(f, b))
    for pieces in (m, 1):
        one = makespan(SCHEDULES["1f1b"](1, pieces), wins_devices.single_cost(num_ranks, pieces))
        assert one == num_ranks * m * (f + b)
        assert one / pipeline == pytest.approx(wins_devices.ideal(num_ranks, m))


def alone_on_each(world):
    one = wins_devices.alone(world)
    single = wins_devices.single(one, world.size, 1)
    single()
    events = single.trainer.pipeline.executor.events
    return one.size, [str(event.action) for event in events], min(event.end - event.start for event in events)


def test_one_device_is_emulated_for_as_long(pool):
    for size, actions, seconds in pool.run(2, alone_on_each):
        assert (size, actions) == (1, ["0F0", "0B0"])
        assert seconds >= 2 * wins_devices.NUM_MICROBATCHES * wins_devices.F / 1e3


def test_the_best_number_of_microbatches_is_the_opponent():
    times = {"2 ranks": 2.0, "1 thread": 9.0, 1: 4.0, 4: 3.0, 16: 5.0, 32: 6.0}
    samples = {
        name if isinstance(name, str) else wins_sizes.two_threads(name): [Sample(seconds, 0.0, 0.0)] * 3
        for name, seconds in times.items()
    }
    figure = wins_sizes.figure_of(samples, (64, 32, 65536, 32))
    assert figure.value == 2.0
    assert figure.beside == {
        "over the best M, 2 threads": 1.5,
        "over the same M, 2 threads": 3.0,
        "over the same M, 1 thread": 4.5,
        "best M": 4.0,
        "2 ranks, ms": 2000.0,
    }


def posted_ahead(row):
    """For each receive of a row, how many actions lie between it and the one that needs its value."""
    ahead = []
    for place, instruction in enumerate(row):
        if isinstance(instruction, Receive):
            actions = [one for one in row[place:] if isinstance(one, Action)]
            ahead.append(next(i for i, action in enumerate(actions) if instruction.value in needs(action)))
    return ahead


def late_and_ahead(world, config, schedule):
    before = dict(ROOM)
    table = SCHEDULES[schedule].table(world.size, config.num_microbatches)
    with no_room():
        late = Ours(config, world, table)
    assert before == ROOM
    ahead = Ours(config, world, table)
    found = []
    for one in (late, ahead):
        for _ in range(2):
            one()
        one.close()
        weights = [p.detach().clone() for p in one.trainer.pipeline.parameters()]
        found.append((posted_ahead(one.trainer.pipeline.executor.row), weights))
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_late_receives_are_late_and_change_no_bit(pool, schedule):
    for (late, ours), (ahead, theirs) in pool.run(2, late_and_ahead, small(), schedule):
        assert sum(ahead) > sum(late)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_devices_are_measured_by_the_program_that_starts_them(tmp_path):
    file = tmp_path / "wins.json"
    ran = python(wins.PROGRAM.removeprefix("python -m "), "--parts", "devices", "--rounds", "1", "--json", str(file),
                 limit=180)  # fmt: skip
    assert ran.status == 0, ran.text
    figures = json.loads(file.read_text())
    assert [figure["case"] for figure in figures] == ["1f1b, P=2, M=8", "1f1b, P=4, M=8"]
    # An action takes at least its time, so that no device can be faster than its table; the one alone can be late.
    for figure in figures:
        times = {name: statistics.median(values) for name, values in figure["samples"].items()}
        assert times["one device, ms"] >= int(figure["case"][8]) * 8 * 30
        assert times["P devices, ms"] >= (8 + int(figure["case"][8]) - 1) * 30


def test_a_mistake_is_one_line():
    ran = python(wins.PROGRAM.removeprefix("python -m "), "--parts", "luck")
    assert (ran.status, ran.stderr.count("\n")) == (2, 1)
    assert "'luck'" in ran.stderr


def cells(heads):
    """The rows of the page's table with these heads."""
    rows = PAGE.split(f"| {' | '.join(heads)} |\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_pages_table_of_bytes():
    config = limited.config_of(limited.LimitOptions())
    rows = cells(["ranks", "weights", "gradients", "Adam", "activations", "the largest rank, MB"])
    assert [row[0] for row in rows] == ["1", "2", "4"]
    for num_ranks, *row in rows:
        table = SCHEDULES["1f1b"](int(num_ranks), config.num_microbatches)
        largest = max((formula(config, table, rank) for rank in range(int(num_ranks))), key=lambda h: h.total)
        assert row == [f"{value / 1e6:.1f}" for value in (*largest, largest.total)]


def test_the_pages_sizes_are_those_of_the_program():
    heads = ["width, layers, rows, M", "over the full batch, 2 threads", "over the best M, 2 threads",
             "over the same M, 1 thread"]  # fmt: skip
    assert [row[0] for row in cells(heads)] == [", ".join(map(str, size)) for size in wins_sizes.GRID]
    says(f"the full batch, {4 * 64 * 65536 / 1e6:.0f} MB a layer")


def test_the_targets_of_the_exercises():
    says(f"which is {wins_devices.ideal(2, 8):.2f} for P = 2 and {wins_devices.ideal(4, 8):.2f} for P = 4 with M = 8")
    says(f"128/35 = {wins_devices.ideal(4, 32):.2f}")
    options = limited.LimitOptions(optimizer="sgd")
    config = limited.config_of(options)
    whole = formula(config, SCHEDULES["1f1b"](1, config.num_microbatches), 0).total
    assert whole < 0.9 * options.megabytes * limited.MEGABYTE
    says(f"yes, it holds {whole / 1e6:.1f} MB")
    width, num_layers, rows, _ = SIZES["large"]
    large = Config(num_layers=num_layers, width=width, batch_size=rows, num_microbatches=16, data="random")
    sent, weights = 2 * rows * width * 4, formula(large, SCHEDULES["1f1b"](1, 16), 0).weights
    says(f"{sent / 1e6:.1f} MB in all against {weights / 1e6:.1f} MB from each: {weights / sent:.0f} times as many")
    says(f"(M+P−1)/(M·P) = {9 / 16:.2f}")
    assert batch(large, 0)[0].shape == (rows, 64)
