"""Step 6: traces in Chrome's format, of ranks whose clocks differ, and what recording leaves alone."""

import json
import random
from functools import partial

import pytest

from step2_comms.p2p import Messages
from step5_orchestrator.actions import Action, Value
from step5_orchestrator.executor import Event, Executor
from step5_orchestrator.recording import Recording, Transfer
from step5_orchestrator.trainer import Trainer
from step6_schedules.chrome import THREADS, as_json
from step6_schedules.narrow import narrowed
from step6_schedules.schedules import SCHEDULES
from step6_schedules.trace import Iteration, RankRecord, Tracing, messages, together
from tests.monolith import monolith, small
from tests.ranks import torchrun
from tests.skewed import skewed
from tests.traces import arrows, assert_valid, counters, end_of, slices
from tests.training import stage_class_for

CONFIG = small(num_iterations=4, num_layers=9, num_microbatches=4, batch_size=13, data="random")


def traced(world, schedule: str, seconds: float = 0.0, rate: float = 1.0, replicas: int = 1):
    """Trains with a trace, on ranks whose clocks are wrong; what the file would hold, and the final weights."""
    with skewed(seconds * world.rank, 1 + (rate - 1) * world.rank):
        table = SCHEDULES[schedule](world.size // replicas, CONFIG.num_microbatches)
        trainer = Trainer(CONFIG, world, table, stage_class=stage_class_for(table), data_parallel=replicas)
        tracing = Tracing(trainer)
        trainer.train()
        trace = tracing.trace()
        result = trainer.result()
        trainer.close()
    if trace is None:
        return None
    return json.loads(json.dumps(as_json(trace))), result


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 3), ("zb-v", 2), ("gpipe", 1)])
def test_a_trace_holds_every_action_and_message_and_is_valid(pool, schedule, num_ranks):
    trace, result = pool.run(num_ranks, traced, schedule)[0]
    assert_valid(trace)
    table = SCHEDULES[schedule](num_ranks, CONFIG.num_microbatches)
    found = slices(trace)
    for rank, row in enumerate(table.rows):
        names = [event["name"] for event in found[rank, 0]]
        one = [str(action) for action in row]
        assert names == [name for number in range(1, 5) for name in (f"iteration {number}", *one)]
        counted = counters(trace)
        assert max(counted[rank, "activations in flight"]) == result.peak_in_flight[rank]
        assert max(counted[rank, "bytes of activations"]) > 0
        # The payload of one iteration, as the result has it.
        sends = [event for thread in (1, 3) for event in found.get((rank, thread), ())]
        assert sum(event["args"]["bytes"] for event in sends) == 4 * result.bytes_sent[rank]
    assert len(arrows(trace)) == sum(len(events) for (_, thread), events in found.items() if thread in (1, 3))
    assert trace["otherData"]["clocks"] == "all ranks read one clock"
    # Recording changes nothing of what is computed.
    assert result.weights_sha256 == monolith(CONFIG).weights_sha256


def test_clocks_that_differ_by_5_seconds_are_brought_together(pool):
    trace, _ = pool.run(3, traced, "1f1b", 5.0, 1.0001)[0]
    assert_valid(trace)
    assert_aligned(trace)


def assert_aligned(trace: dict) -> None:
    """A receive never ends before its send began, though each rank's clock is 5 s ahead of the one before."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    length = max(map(end_of, events)) - min(event["ts"] for event in events)
    own = [end_of(event) - event["ts"] for event in events if event["name"].startswith("iteration")]
    assert length < sum(own) + 4e6, "no rank lies 5 s beside the others"
    error = trace["otherData"]["clock_error_us"]
    assert 0 < error < 4e6
    assert trace["otherData"]["clocks"].startswith("clocks differ from rank 0's by at most ")
    assert "the messages ask for" not in trace["otherData"]["clocks"], "what was compared was wrong"
    sends, receives = {}, {}
    for (rank, thread), found in slices(trace).items():
        for event in found:
            if thread in (1, 3):
                sends[rank, event["args"]["to rank"], event["args"]["iteration"], event["name"]] = event
            elif thread in (2, 4):
                receives[event["args"]["from rank"], rank, event["args"]["iteration"], event["name"]] = event
    assert sends.keys() == receives.keys()
    assert len(sends) > 20
    for key, receive in receives.items():
        assert end_of(receive) >= sends[key]["ts"] - 0.002, key  # times are rounded to a nanosecond


def test_replicas_are_told_apart(pool):
    trace, _ = pool.run(4, traced, "1f1b", 0.0, 1.0, 2)[0]
    assert_valid(trace)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"rank {r} (replica {r // 2}, its rank {r % 2})" for r in range(4)]
    assert {(start["pid"], end["pid"]) for start, end in arrows(trace)} == {(0, 1), (1, 0), (2, 3), (3, 2)}


def prepared(world):
    """The calls of a row with and without recording."""
    table = SCHEDULES["1f1b"](world.size, CONFIG.num_microbatches)
    trainer = Trainer(CONFIG, world, table)
    executor = trainer.pipeline.executor
    trainer.step()
    without = [part for call in executor._calls for part in parts(call)]
    executor.record()
    trainer.step()
    recorded = [part for call in executor._calls for part in parts(call)]
    trainer.close()
    return without, recorded


def parts(call) -> list[str]:
    """The functions that a prepared call makes, by name."""
    if not isinstance(call, partial):
        return [getattr(call, "__qualname__", "")]
    inner = [name for argument in (call.func, *call.args) if callable(argument) for name in parts(argument)]
    return [name for name in inner if name]


def test_nothing_of_recording_is_there_when_it_is_off(pool):
    for without, recorded in pool.run(2, prepared):
        assert not [name for name in without if name.startswith(Recording.__name__)]
        assert Recording.send.__qualname__ in recorded
        assert Recording.take.__qualname__ in recorded
        assert Executor._act.__qualname__ in without
        assert Messages.recv_forward.__qualname__ in recorded or Messages.recv_backward.__qualname__ in recorded


@pytest.mark.slow
def test_the_command_writes_a_trace_of_ranks_whose_clocks_differ(tmp_path):
    file = tmp_path / "trace.json"
    ran = torchrun(
        3, "tests.programs.skewed_clock", "--schedule", "1f1b", "--num-iterations", 5, "--num-microbatches", 6,
        "--batch-size", 12, "--data", "random", "--trace", file, "--timeline", tmp_path / "t.svg",
    )  # fmt: skip
    assert ran.status == 0, ran.text
    trace = json.loads(file.read_text())
    assert_valid(trace)
    assert_aligned(trace)
    assert f"trace of iterations 1 to 5: {file} (clocks differ from rank 0's by at most " in ran.stdout
    assert f"timeline of one iteration: {tmp_path / 't.svg'}" in ran.stdout


def record(rank: int, ahead: float, error: float) -> RankRecord:
    """A rank of two that run one microbatch; its clock is `ahead` of what its comparison with rank 0 found."""
    forward, backward = Value("activation", 1, 0), Value("gradient", 1, 0)
    actions = [(Action(0, "F", 0), 0.0, 1.0), (Action(0, "B", 0), 3.2, 4.2)]
    ends = [(forward, 1, True, 1.0, 1.01), (backward, 1, False, 1.01, 3.15)]
    if rank == 1:
        actions = [(Action(1, "F", 0), 1.1, 2.1), (Action(1, "B", 0), 2.1, 3.1)]
        ends = [(forward, 0, False, 0.0, 1.05), (backward, 0, True, 3.1, 3.11)]
    whole = Iteration(1, 0.0, 4.2, [Event(*a) for a in actions], [Transfer(*end) for end in ends])
    sizes = {forward: 8, backward: 8}
    return RankRecord(0, rank, (0, 1), error, {rank: [32]}, sizes, [whole.moved(lambda t: t + ahead)])


@pytest.mark.parametrize("ahead", [-0.8, -0.3, 0.0, 0.3, 0.8])
def test_messages_bring_clocks_together_that_a_comparison_left_apart(ahead):
    trace = together(SCHEDULES["1f1b"](2, 1), [record(0, 0.0, 0.0), record(1, ahead, 1.0)])
    # Both messages take 0.05 s, so that nobody can say more than that the clocks are 0.05 s apart at most.
    assert trace.clock_error == pytest.approx(0.05)
    assert abs(trace.ranks[1].iterations[0].events[0].start - 1.1) <= 0.05 + 1e-9
    assert_valid(as_json(trace))
    for _, _, send, receive in messages(trace.ranks):
        assert receive.end >= send.start


def test_an_action_that_starts_with_its_iteration_lies_inside_it():
    trace = as_json(together(SCHEDULES["1f1b"](2, 1), [record(0, 0.0, 0.0), record(1, 0.0, 1.0)]))
    names = [event["name"] for event in slices(trace)[0, 0]]
    assert names == ["iteration 1", "0F0", "0B0"]


# Clocks narrowed by messages


@pytest.mark.parametrize("seed", range(30))
def test_corrections_meet_every_condition_and_hold_the_truth(seed):
    """Clocks that are wrong by less than they say: the corrected times are no further off than is said afterwards."""
    draw = random.Random(seed)
    size = draw.randint(1, 6)
    errors = [0.0] + [draw.uniform(0, 1e-3) for _ in range(size - 1)]
    wrong = [draw.uniform(-error, error) for error in errors]  # to be taken away
    leads = {}
    for source in range(size):
        for destination in range(size):
            if abs(source - destination) == 1:
                truth = draw.uniform(0, draw.choice([1e-5, 1e-3]))
                leads[source, destination] = truth + wrong[destination] - wrong[source]
    corrections, left, widening = narrowed(errors, leads)
    assert widening == 0.0
    assert corrections[0] == left[0] == 0.0
    for (source, destination), lead in leads.items():
        assert lead + corrections[destination] - corrections[source] >= -1e-8
    for rank in range(size):
        assert abs(wrong[rank] + corrections[rank]) <= left[rank] + 1e-8
        assert left[rank] <= errors[rank] + 1e-8


def test_clocks_that_did_not_drift_evenly_are_widened_and_it_is_said():
    corrections, left, widening = narrowed([0.0, 1e-4], {(0, 1): -1e-3, (1, 0): 2e-3})
    assert 9e-4 <= widening <= 2e-3
    assert -1e-3 + corrections[1] >= -1e-8
    assert left[1] <= 2.2e-3


def test_the_names_of_threads():
    assert THREADS[0] == "compute"
    assert len(set(THREADS)) == 5
