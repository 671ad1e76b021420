"""The test of the tests: each of these faults, planted in a copy of the repository, makes the named test fail."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.ranks import ROOT, run_command


@dataclass(frozen=True)
class Fault:
    """A change of one place in the source, and the test that must fail because of it."""

    name: str
    file: str
    old: str
    new: str
    test: str


SCHEDULES = "tests/test_step6_schedules.py"
EQUAL = "tests/test_step6_equality.py::test_uneven_batches"
FAULTS = [
    Fault(
        "the loss is not divided by the batch", "step0_monolith/loss.py", 'IGNORE_INDEX) / weight', "IGNORE_INDEX)",
        "tests/test_step0_monolith.py::test_microbatches_do_not_change_loss_and_gradients",
    ),
    Fault(
        "a mean of means", "step5_orchestrator/pipeline.py",
        "targets=piece, weight=weight", "targets=piece, weight=batch_weight(piece) * len(pieces)", EQUAL,
    ),
    Fault(
        "detach forgotten", "step1_partition/stage.py",
        "x.detach().requires_grad_(x.requires_grad) for", "x for",
        "tests/test_step1_partition.py::test_stages_by_hand_equal_the_monolith",
    ),
    Fault(
        "requires_grad forgotten", "step2_comms/channel.py", "x.requires_grad_(s.requires_grad)", "x", EQUAL,
    ),
    Fault(
        "warmup off by one", "step6_schedules/one_f_one_b.py", "num_ranks - 1 - rank", "num_ranks - rank",
        "tests/test_step5_tables.py::test_closed_forms",
    ),
    Fault(
        "another microbatch's gradient", "step1_partition/stage.py",
        "self._saved.pop(microbatch)", "self._saved.pop(max(self._saved))", EQUAL,
    ),
    Fault(
        "a seed that depends on the rank", "step4_sharded/shard.py", "layers(config, start, stop)",
        '''layers(__import__("dataclasses").replace(config, seed=stage), start, stop)''',
        "tests/test_step4_sharded.py::test_layers_per_stage",
    ),
    Fault(
        "the handle of a send dropped", "step2_comms/channel.py",
        "        handle = Handle(self, call, works, buffers, specs)\n",
        "        handle = Handle(self, call, works if specs else [], buffers, specs)\n",
        "tests/test_step2_messages.py",
    ),
    Fault(
        "targets shifted by one row", "step5_orchestrator/pipeline.py",
        "targets = targets.to(self.world.device)", "targets = targets.to(self.world.device).roll(1)", EQUAL,
    ),
    Fault(
        "gradients not set to zero", "step5_orchestrator/optimizer.py", "self.wrapped.zero_grad()", "pass", EQUAL,
    ),
    Fault(
        "backwards in descending order", "step6_schedules/phases.py",
        'rank, "B", m) for chunk, m in order]',
        'rank, "B", m) for chunk, m in (order if warmup(rank) < len(order) else order[::-1])]',
        EQUAL,
    ),
    Fault(
        "activations kept after the backward", "step1_partition/stage.py",
        "self._saved.pop(microbatch)", "self._saved[microbatch]",
        "tests/test_step5_pipeline.py::test_1f1b_holds_the_same_memory_for_more_microbatches_and_gpipe_grows",
    ),
    Fault(
        "the first message of a pass used for all", "step5_orchestrator/executor.py",
        "partial(receive, str(value), wait=False, peer=peer)",
        "partial(receive, str(value._replace(microbatch=0)), wait=False, peer=peer)", EQUAL,
    ),
    Fault(
        "evaluation in training mode", "step0_monolith/model.py", "        module.eval()\n", "        pass\n",
        "tests/test_step0_monolith.py::test_evaluation_leaves_everything_as_it_was",
    ),
    Fault(
        "interleaving without groups", "step6_schedules/interleaved.py",
        "for group in groups(num_ranks, num_microbatches)\n", "for group in [range(num_microbatches)]\n", SCHEDULES,
    ),
    Fault(
        "W one I too early", "step6_schedules/zero_bubble.py", "lag=lambda rank: rank\n",
        "lag=lambda rank: max(0, rank - 1)\n", SCHEDULES,
    ),
    Fault(
        "a microbatch let go of at I", "step5_orchestrator/actions.py", 'return action.op in ("B", "W")',
        'return action.op in ("B", "I")', SCHEDULES,
    ),
    Fault(
        "W of another microbatch", "step6_schedules/split_backward.py",
        "self._kept.pop(microbatch)", "self._kept.pop(max(self._kept))", EQUAL,
    ),
    Fault(
        "a weight gradient of twice its size", "step6_schedules/split_backward.py",
        "_add(weight, g.t().mm(x))", "_add(weight, 2 * g.t().mm(x))", EQUAL,
    ),
    Fault(
        "messages that take no time", "step5_orchestrator/prediction.py",
        "travel[boundary] = cost.message(boundary)", "travel[boundary] = 0.0", "tests/test_step6_simulate.py",
    ),
    Fault(
        "a duplicate in a file", "step5_orchestrator/spreadsheet.py", "if action in places:", "if False:",
        "tests/test_step5_spreadsheet.py",
    ),
    Fault(
        "each rank clips by its own norm", "step5_orchestrator/agreement.py",
        "norm_of(values[1 + self._num_stages :]) if with_norm", "norm_of(self._norm.squares()) if with_norm",
        "tests/test_step5_update.py::test_clipped_and_scheduled_training_equals_the_monolith",
    ),
    Fault(
        "a NaN on one rank is not told to the others", "step5_orchestrator/agreement.py",
        "                values[1 + index] = 1\n", "                pass\n",
        "tests/test_step5_optimizer.py::test_all_ranks_stop_at_the_same_iteration_and_nothing_has_changed",
    ),
    Fault(
        "the moments are not restored", "step0_monolith/state.py",
        'prefix = f"optimizer/{name}/"', 'prefix = f"optimizer/{name}/no/"',
        "tests/test_step0_update.py::test_a_killed_run_goes_on_with_the_same_bits",
    ),
    Fault(
        "the number of updates is not restored", "step5_orchestrator/optimizer.py",
        "self.updates, self.iterations = updates,", "self.updates, self.iterations = 0,",
        "tests/test_step5_optimizer.py::test_schedulers_advance_once_an_update_and_survive_their_bytes",
    ),
    Fault(
        "visible before it is on the disk", "step0_monolith/checkpoints.py",
        "        sync(part)\n", "        pass\n",
        "tests/test_step0_checkpoints.py::test_all_is_on_the_disk_before_it_is_visible",
    ),
    Fault(
        "a replica's rows weigh as if they were the batch", "step5_orchestrator/trainer.py",
        "weight = self.config.batch_size * self.config.accumulate",
        "weight = self.config.batch_size * self.config.accumulate // self._piece[1]",
        "tests/test_step5_replicas.py::test_replicas_equal_the_monolith_and_each_other",
    ),
    Fault(
        "a rank's own clock in the trace", "step6_schedules/trace.py",
        "iteration.moved(clock.aligned)", "iteration.moved(lambda t: t)",
        "tests/test_step6_trace.py::test_clocks_that_differ_by_5_seconds_are_brought_together",
    ),
    Fault(
        "clocks that messages do not bring together", "step6_schedules/trace.py",
        "lambda t, by=correction: t + by", "lambda t, by=correction: t",
        "tests/test_step6_trace.py::test_messages_bring_clocks_together_that_a_comparison_left_apart",
    ),
    Fault(
        "a value that is there in the slot that makes it", "step6_schedules/sheet.py",
        "if made < slot:", "if made <= slot:",
        "tests/test_step6_worksheet.py::test_each_kind_of_fault_has_its_reason",
    ),
    Fault(
        "advice beyond the cap", "step6_schedules/advice.py",
        "limit is None or each.memory <= limit + EPSILON]", "True]",
        "tests/test_step6_compare.py::test_the_advice_holds_for_any_choice_of_schedules",
    ),
    Fault(
        "needs of another action on the page", "step6_schedules/page.py",
        "for value in needs(action)] for action in order]", "for value in needs(order[0])] for action in order]",
        "tests/test_step6_page.py::test_the_page_holds_the_times_and_what_each_action_needs",
    ),
]  # fmt: skip


def run_with(fault, folder):
    """What pytest says about the fault's test in a copy of the repository that has the fault."""
    for source in (*ROOT.glob("step*"), ROOT / "tests"):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / fault.file
    source = path.read_text()
    assert source.count(fault.old) == 1, f"{fault.old!r} is in {fault.file} {source.count(fault.old)} times"
    path.write_text(source.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", fault.test]
    return run_command(command, cwd=folder, limit=280, environment={"PYTHONPATH": str(folder)})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_planted_fault_makes_its_test_fail(tmp_path):
    folders = [tmp_path / str(index) for index in range(len(FAULTS))]
    with ThreadPoolExecutor(2) as both:  # each spends half of its time starting
        runs = list(both.map(run_with, FAULTS, folders))
    bad = [
        f"{fault.name}: status {ran.status}\n{ran.text[-2000:]}"
        for fault, ran in zip(FAULTS, runs, strict=True)
        if ran.status != 1 or "FAILED" not in ran.stdout
    ]
    assert not bad, "\n\n".join(bad)
