"""Step 6 through the commands that a student types: results, pictures, and mistakes found before any message."""

import dataclasses
import json

import pytest
import torch.distributed as dist
from PIL import Image

import step4_sharded.__main__ as step4
import step5_orchestrator.__main__ as step5
import step5_orchestrator.program as step5_program
import step6_schedules.__main__ as step6
import step6_schedules.train as main_job
from step0_monolith.options import RunError, UsageError
from step0_monolith.result import read_result
from step0_monolith.train import result_of, train
from step5_orchestrator.costs import costs
from step5_orchestrator.prediction import bubble, peak_in_flight
from step6_schedules.schedules import SCHEDULES
from tests.monolith import monolith
from tests.ranks import python, torchrun
from tests.training import Config

SIZES = ["--num-layers", 9, "--width", 16, "--batch-size", 13, "--num-microbatches", 4, "--num-iterations", 6]
CONFIG = Config(num_layers=9, width=16, batch_size=13, num_microbatches=4, num_iterations=6)


def check_run(num_ranks, schedule, directory, *more):
    result, picture = directory / "result.json", directory / "timeline.png"
    ran = torchrun(
        num_ranks, "step6_schedules", *SIZES, "--schedule", schedule, "--result", result, "--timeline", picture, *more
    )
    assert ran.status == 0, ran.text
    found = read_result(result)
    expected = monolith(CONFIG)
    assert found.weights_sha256 == expected.weights_sha256
    assert found.losses == expected.losses
    num_chunks = SCHEDULES[schedule].default_chunks
    assert (found.schedule, found.num_ranks, found.num_stages) == (schedule, num_ranks, num_ranks * num_chunks)
    assert f"weights sha256 {expected.weights_sha256}" in ran.stdout
    assert ran.stdout.count("weights sha256") == 1
    shown = [line for line in ran.stdout.splitlines() if line.startswith("iteration")]
    assert shown == [f"iteration {i:5d}  loss {loss:.4f}" for i, loss in enumerate(expected.losses, 1)]
    assert Image.open(picture).size[0] > 1000
    assert sorted(p.name for p in directory.iterdir()) == ["result.json", "timeline.png"]
    return found, ran


def test_1f1b_through_torchrun_equals_the_monolith(tmp_path):
    found, _ = check_run(4, "1f1b", tmp_path)
    assert found.peak_in_flight == [4, 3, 2, 1]
    assert found.bubble["predicted"] == pytest.approx(3 / 7)
    assert json.loads((tmp_path / "result.json").read_text())["bytes_sent"] == [832, 1664, 1664, 832]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "schedule"), [(1, "1f1b"), (2, "naive"), (3, "gpipe"), (8, "1f1b")])
def test_schedules_through_torchrun_equal_the_monolith(tmp_path, num_ranks, schedule):
    check_run(num_ranks, schedule, tmp_path, "--emulate", "F=1,B=2")


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, "dualpipe-v"), (3, "zb-h1"), (4, "interleaved"), (4, "zb-v")])
def test_more_schedules_through_torchrun_equal_the_monolith(tmp_path, num_ranks, schedule):
    found, ran = check_run(num_ranks, schedule, tmp_path, "--emulate", "F=2,B=4,comm=1")
    cost = costs(2, 4, comm=1)
    table = SCHEDULES[schedule].table(num_ranks, 4, None, cost)
    assert found.peak_in_flight == peak_in_flight(table)
    assert found.bubble["predicted"] == pytest.approx(bubble(table, cost))
    assert f"peak in flight: predicted {found.peak_in_flight}, measured {found.peak_in_flight}" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("module", ["step5_orchestrator", "step6_schedules"])
def test_a_table_from_a_file_trains_through_torchrun(tmp_path, module):
    path, result = tmp_path / "my table.csv", tmp_path / "r.json"
    path.write_text("0F0;0F1;0B0;0F2;0B1;0F3;0B2;0B3;\r\n;1F0;1B0;1F1;1B1;1F2;1B2;1F3;1B3\r\n", encoding="utf-8-sig")
    ran = torchrun(2, module, *SIZES, "--schedule", path, "--memory-cap", "2", "--result", result)
    assert ran.status == 0, ran.text
    assert read_result(result).weights_sha256 == monolith(CONFIG).weights_sha256
    assert (read_result(result).schedule, read_result(result).peak_in_flight) == ("my table.csv", [2, 1])


@pytest.mark.slow
def test_the_main_job_takes_a_schedule_that_splits(tmp_path):
    flags = ["--num-iterations", 6, "--schedule", "zb-v", "--timeline", tmp_path / "t.png"]
    ran = torchrun(2, "step6_schedules.train", *flags)
    assert ran.status == 0, ran.text
    assert "schedule zb-v: 2 ranks, 2 chunks a rank, 8 microbatches" in ran.stdout
    assert "equal to the monolith, bit for bit: 6 losses and all final weights" in ran.stdout


@pytest.mark.slow
def test_the_main_job_proves_itself(tmp_path):
    ran = torchrun(
        4, "step6_schedules.train", "--num-iterations", 20, "--result", tmp_path / "r.json", "--timeline",
        tmp_path / "t.png",
    )  # fmt: skip
    assert ran.status == 0, ran.text
    assert "equal to the monolith, bit for bit: 20 losses and all final weights" in ran.stdout
    assert "bubble: predicted 0.273 (F=5, B=10), measured 0." in ran.stdout
    assert read_result(tmp_path / "r.json").peak_in_flight == [4, 3, 2, 1]
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_a_difference_from_the_monolith_is_an_error(capsys):
    trained = train(CONFIG)
    table = SCHEDULES["1f1b"](1, 4)
    result = dataclasses.replace(
        result_of(CONFIG, trained), schedule="1f1b", bubble={"predicted": 0.0, "measured": 0.1}
    )  # fmt: skip
    main_job.conclude(CONFIG, table, result)
    assert "equal to the monolith, bit for bit: 6 losses" in capsys.readouterr().out
    wrong = [
        dataclasses.replace(result, weights_sha256="0" * 64),
        dataclasses.replace(result, losses=[*result.losses[:-1], result.losses[-1] + 1e-12]),
    ]
    for changed in wrong:
        with pytest.raises(RunError, match="differ from the monolith's"):
            main_job.conclude(CONFIG, table, changed)


def test_the_stretch_takes_any_schedule_of_the_step_size():
    long = dataclasses.replace(CONFIG, lr_schedule="warmup-cosine", warmup_iterations=30, num_iterations=40)
    assert main_job.stretch_config(long).num_iterations == main_job.STRETCH_ITERATIONS


class Opened(Exception):
    pass


@pytest.mark.parametrize("program", [step4, step6, main_job])
def test_threads_reach_the_ranks(monkeypatch, program):
    def opened(launch, options, threads):
        raise Opened(threads)

    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["program", "--threads", "3"])
    monkeypatch.setattr(program if hasattr(program, "open_world") else step5_program, "open_world", opened)
    with pytest.raises(Opened, match="3"):
        program.main()


LAUNCH = {
    "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
BAD = [
    (step6, ["--schedule", "zb-h9"], "--schedule 'zb-h9' is unknown; the known ones are: naive, gpipe, 1f1b"),
    (step5, ["--schedule", "gpipe"], "the known ones are: naive"),
    (step6, ["--num-layers", "3"], "3 layers cannot fill 4 stages"),
    (step5, ["--num-layers", "3"], "3 layers cannot fill 4 stages"),
    (step4, ["--num-layers", "3"], "3 layers cannot fill 4 stages"),
    (main_job, ["--num-layers", "3"], "3 layers cannot fill 4 stages"),
    (step6, ["--layers-per-stage", "3,3,2"], "has 3 numbers with sum 8; it must have 4"),
    (step4, ["--layers-per-stage", "2,2,2,1"], "with sum 7; it must have 4"),
    (step6, ["--num-microbatches", "65"], "--num-microbatches 65 is more than the 64 rows"),
    (step6, ["--device", "tpu"], "choose one of: auto, cpu, cuda"),
    (step6, ["--dtype", "int8"], "choose one of: float32, float64, bfloat16"),
    (step6, ["--backend", "nccl", "--device", "cpu"], "--backend nccl needs --device cuda"),
    (step6, ["--timeout", "0"], "--timeout must be a finite number above 0"),
    (step6, ["--emulate", "F=5"], "must name F and B"),
    (step6, ["--result", "absent/r.json"], "--result 'absent/r.json' cannot be written"),
    (step6, ["--timeline", "absent/t.png"], "--timeline 'absent/t.png' cannot be written"),
    (step6, ["--timeline", "t.gif"], "must end in .png or .svg"),
    (main_job, ["--result", "absent/r.json"], "cannot be written"),
    (step6, ["--num-iterations", "many"], "must be a whole number, not 'many'"),
    (step6, ["--width", "1" + "0" * 30], "--width must be at most"),
    (step6, ["--num-layers", "1000000000"], "--num-layers must be at most"),
    (step6, ["--threads", "100000"], "--threads must be at most 1024"),
    (step6, ["--learning-rate", "1e39"], "--learning-rate must be at most 1e+38"),
    (step6, ["--emulate", "F=1e300,B=1"], "must be at most"),
    (step6, ["--result", "b" * 300 + ".json"], "cannot be written (File name too long)"),
    (step6, ["--result", ""], "is no file name"),
    (step6, ["--width", "1_0"], "must be a whole number, not '1_0'"),
    (step6, ["a\nb"], "unrecognized arguments: a b"),
    (step6, ["--nonsense"], "unrecognized arguments: --nonsense"),
    (step6, ["extra"], "unrecognized arguments: extra"),
    (step5, ["--timeline", "t.png"], "unrecognized arguments"),
    (step5, ["--num-chunks", "2"], "unrecognized arguments"),
    (step5, ["--schedule", "absent.csv"], "absent.csv"),
    (step5, ["--memory-cap", "1,1,1"], "--memory-cap has 3 numbers; give one, or one for each of the 4 ranks"),
    (step6, ["--schedule", "gpipe", "--memory-cap", "7"], "gpipe: rank 0 holds 8 chunk activations after 0F7"),
    (step6, ["--schedule", "interleaved", "--num-chunks", "3"], "8 layers cannot fill 12 stages"),
    (step6, ["--schedule", "zb-v", "--num-chunks", "1"], "--num-chunks 1: zb-v has 2 chunks a rank"),
    (step6, ["--schedule", "zb-v", "--placement", "loop"], "--placement loop: zb-v has its stages in a v"),
    (step6, ["--schedule", "dualpipe-v", "--num-microbatches", "7"], "dualpipe-v needs at least twice as many"),
    (step6, ["--schedule", "auto", "--num-chunks", "2", "--memory-cap", "1"], "so 2 is the least"),
    (step6, ["--schedule", "zb-h1", "--split", "no"], "--split no: zb-h1 splits the backward"),
    (step6, ["--split", "maybe"], "--split 'maybe' is unknown; choose one of: yes, no"),
    (step6, ["--cost", "F=1"], "--cost 'F=1' must name F and B"),
    (main_job, ["--schedule", "step6_schedules/broken.csv"], "broken.csv: rank 2 cannot run 2B2"),
]


@pytest.mark.parametrize(
    ("program", "arguments", "message"), BAD, ids=[f"{p.__name__.split('.')[0]} {' '.join(a)}" for p, a, _ in BAD]
)
def test_mistakes_are_found_before_any_message(monkeypatch, program, arguments, message):
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["program", *arguments])
    with pytest.raises(UsageError) as caught:
        program.main()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_without_torchrun_one_line_shows_the_command():
    ran = python("step6_schedules")
    assert ran.status == 2
    assert len(ran.stderr.strip().splitlines()) == 1
    assert "torchrun --standalone --nproc-per-node" in ran.stderr
    assert "-m step6_schedules" in ran.stderr


@pytest.mark.slow
def test_a_mistake_under_torchrun_shows_one_line_a_rank_and_no_traceback_of_ours():
    ran = torchrun(2, "step6_schedules", "--schedule", "zb-h9")
    assert ran.status == 1
    assert 1 <= ran.stderr.count("error: --schedule 'zb-h9' is unknown") <= 2
    assert "step6_schedules/" not in ran.stderr
    assert "exitcode  : 2" in ran.stderr
