"""One iteration under each of many tables, stage by stage against the monolith."""

from step0_monolith.config import Config
from step1_partition.partition import bounds, partition
from step5_orchestrator.prediction import peak_in_flight
from step5_orchestrator.table import Table
from step5_orchestrator.trainer import Trainer
from tests.monolith import assert_same_bits, monolith, named
from tests.training import stage_class_for


def train_once(world, jobs: list[tuple[Config, Table]]) -> list[tuple]:
    """For each job the loss, the gradients of each stage on this rank, and the peak in flight."""
    results = []
    for config, table in jobs:
        trainer = Trainer(config, world, table, stage_class=stage_class_for(table))
        loss = trainer.step()
        stages = trainer.pipeline.stages
        gradients = {s: named(stage.modules, stage.first_layer, gradients=True) for s, stage in stages.items()}
        results.append((loss, gradients, trainer.pipeline.executor.peak_in_flight))
        trainer.close()
    return results


def assert_trained_right(ranks: list[tuple], config: Config, table: Table) -> None:
    """Loss and gradients against the monolith's, in bits where a stage adds in order, and peaks against the table's."""
    expected = monolith(config)
    assert [peak for _, _, peak in ranks] == peak_in_flight(table)
    sizes = bounds(partition(config.num_layers, table.num_stages))
    seen = set()
    for rank, (loss, gradients, _) in enumerate(ranks):
        assert loss == expected.losses[0], table
        assert sorted(gradients) == table.stages_of(rank)
        for stage, found in gradients.items():
            wanted = {n: g for n, g in expected.gradients.items() if int(n.split(".")[0]) in range(*sizes[stage])}
            seen |= wanted.keys()
            if stage not in table.unordered_stages:
                assert_same_bits(found, wanted)
                continue
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                difference = (found[name] - gradient).abs().max()
                assert difference <= 1e-12 * gradient.abs().max(), f"{name} under\n{table}"
    assert seen == expected.gradients.keys()
