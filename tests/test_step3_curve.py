"""Step 3: the curve has every size and checks what it times; the picture is a whole file. No time is asserted."""

import math
from unittest import mock

import pytest
import torch

from step0_monolith.options import RunError
from step2_comms.p2p import Messages, edges_of_a_line
from step3_pingpong import curve
from step3_pingpong.curve import Fit, Point, fit, measure, rounds_for, sizes
from step3_pingpong.picture import draw, size_name


def test_sizes_run_from_4_bytes_to_64_mib():
    assert sizes(4) == [4]
    assert sizes(1000) == [4, 16, 64, 256]
    assert sizes(64 * 2**20) == [4**power for power in range(1, 14)]
    assert all(rounds_for(num_bytes) >= 3 for num_bytes in sizes(2**30))


def measured(world, max_bytes):
    messages = Messages(world, edges_of_a_line(2))
    points = measure(world, messages, max_bytes)
    messages.close()
    return points


def test_a_point_for_every_size_and_both_ways(pool):
    points, nothing = pool.run(2, measured, 4096)
    assert nothing is None
    assert [point.num_bytes for point in points] == [4, 16, 64, 256, 1024, 4096]
    assert all(math.isfinite(s) and s > 0 for point in points for s in (point.ours, point.bare))


def late_and_wrong(world, way, bad_rank):
    """As `measured`, but one value of the third message that this way brings to `bad_rank` is wrong."""
    plain = getattr(curve, way)

    def spoiled(*arguments):
        send, receive = plain(*arguments)
        received = []

        def receive_wrong():
            received.append(receive())
            if len(received) == 3 and world.rank == bad_rank:
                received[-1][-1] += 1
            return received[-1]

        return send, receive_wrong

    with mock.patch.object(curve, way, spoiled):
        return measured(world, 16)


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("way", ["_through_channels", "_bare"])
def test_a_wrong_value_while_measuring_is_noticed(pool, way, bad_rank):
    outcomes = pool.outcomes(2, late_and_wrong, way, bad_rank)
    assert f"4 B, round 2, on rank {bad_rank}: 1 of 1 values differ" in outcomes[bad_rank].error


def stale(world):
    """A receive that hands out the first message again and again."""
    plain = curve._bare

    def spoiled(*arguments):
        send, receive = plain(*arguments)
        kept = []

        def receive_stale():
            kept.append(receive().clone())
            return kept[0]

        return send, receive_stale

    with mock.patch.object(curve, "_bare", spoiled):
        return measured(world, 16)


def test_an_old_message_handed_out_again_is_noticed(pool):
    outcomes = pool.outcomes(2, stale)
    assert any("4 B, round 1, on rank" in outcome.error for outcome in outcomes)


def test_fit_recovers_latency_and_bandwidth():
    line = Fit(latency=1e-4, bandwidth=2e9)
    points = [Point(n, 1.0, line.seconds(n)) for n in sizes(64 * 2**20)]
    found = fit(points)
    assert found.latency == pytest.approx(1e-4, rel=0.02)
    assert found.bandwidth == pytest.approx(2e9, rel=0.02)
    disturbed = [point._replace(bare=0.01) if point.num_bytes == 16 else point for point in points]
    assert fit(disturbed).latency == pytest.approx(found.latency, rel=0.02)
    assert fit(points[:1]) is None
    assert fit([Point(4, 1.0, 1.0), Point(16384, 1.0, 0.5)]) is None


@pytest.mark.parametrize("max_bytes", [4, 64 * 2**20])
def test_the_picture_is_a_whole_file(tmp_path, max_bytes, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    points = [Point(n, 2e-4 + n / 1e9, 1e-4 + n / 2e9) for n in sizes(max_bytes)]
    path = tmp_path / "a curve.png"
    draw(points, fit(points), path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "curve.png"
    path.write_text("older")
    with mock.patch("matplotlib.figure.Figure.savefig", side_effect=OSError(28, "No space left on device")):
        with pytest.raises(RunError, match="No space left"):
            draw([Point(4, 1e-4, 1e-4)], None, path, "title")
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_sizes():
    assert [size_name(n) for n in (4, 1024, 65536, 2**20, 2**30)] == ["4 B", "1 KiB", "64 KiB", "1 MiB", "1024 MiB"]


def test_payloads_of_two_rounds_differ_everywhere():
    cpu = torch.device("cpu")
    assert (curve._payload(64, 0, cpu) != curve._payload(64, 1, cpu)).all()
    assert curve._payload(64, 3, cpu).nbytes == 64
