"""Step 3's programs: mistakes are refused before any message, and a whole run writes its picture."""

import sys

import pytest

from step0_monolith.options import UsageError
from step3_pingpong import __main__ as program
from step3_pingpong import deadlock
from tests.ranks import torchrun

LAUNCHED = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip


def refuse_to_open(*arguments):
    raise AssertionError("the process group was opened")


@pytest.mark.parametrize(
    ("main", "flags", "environment", "words"),
    [
        ("program", "", {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "at least 2 ranks, not 1; run: torchrun"),
        ("program", "", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "at most 2 ranks, not 4; run: torchrun"),
        ("program", "", dict.fromkeys(LAUNCHED), "not started by torchrun; run: torchrun --standalone"),
        ("program", "--max-bytes 3", {}, "--max-bytes must be at least 4, not 3"),
        ("program", "--max-bytes 4.5", {}, "--max-bytes must be a whole number, not '4.5'"),
        ("program", "--max-bytes 1073741825", {}, "--max-bytes 1073741825 is more than 1073741824 bytes"),
        ("program", "--curve curve.jpg", {}, "--curve 'curve.jpg' must end in .png"),
        ("program", "--curve absent/curve.png", {}, "cannot be written"),
        ("program", "--num-layers 1", {}, "1 layers cannot fill 2 stages"),
        ("program", "--dtype int8", {}, "--dtype 'int8' is unknown"),
        ("program", "--timeout 0", {}, "--timeout must be a finite number above 0"),
        ("deadlock", "", {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "at least 2 ranks, not 1"),
        ("deadlock", "", {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}, "at most 2 ranks, not 3"),
        ("deadlock", "--num-floats 0", {}, "--num-floats must be at least 1, not 0"),
        ("deadlock", "--cure prayer", {}, "--cure 'prayer' is unknown; choose one of: none, order, isend"),
    ],
)
def test_mistakes_are_refused_before_any_message(monkeypatch, tmp_path, main, flags, environment, words):
    module = {"program": program, "deadlock": deadlock}[main]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [main, *flags.split()])
    monkeypatch.setattr(module, "open_world", refuse_to_open)
    for name, value in {**LAUNCHED, **environment}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        module.main()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_whole_program_with_its_picture(tmp_path):
    picture = tmp_path / "my curve.png"
    ran = torchrun(2, "step3_pingpong", "--curve", picture, "--dtype", "bfloat16", "--num-layers", 3)
    assert ran.status == 0, ran.text
    assert "message: (64, 128) bfloat16, 16,384 bytes there, as many back" in ran.stdout
    assert "bit for bit: 9 of 9 tensors" in ran.stdout
    assert "\n64 MiB " in ran.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
