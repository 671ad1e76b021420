"""python -m step0_monolith: trains the whole model in one process."""

from step0_monolith.checkpoints import CheckpointOptions
from step0_monolith.config import Config
from step0_monolith.files import check_writable
from step0_monolith.options import parse, run_program
from step0_monolith.train import ResultOptions, result_of, train


def main() -> None:
    takes = {Config: None, CheckpointOptions: None, ResultOptions: None}
    config, checkpoints, output = parse("python -m step0_monolith", __doc__, takes)
    check_writable("--result", output.result)
    trained = train(config, show=True, checkpoints=checkpoints)
    result = result_of(config, trained)
    num_parameters = sum(p.numel() for layer in trained.layers for p in layer.parameters())
    print(f"monolith: {config.num_layers} layers, width {config.width}, {num_parameters:,} parameters")
    if trained.left_out():
        print(trained.left_out())
    if result.test_accuracy is not None:
        print(f"test accuracy {result.test_accuracy:.4f}")
    print(f"weights sha256 {result.weights_sha256}")
    if output.result:
        result.write(output.result)


if __name__ == "__main__":
    run_program(main)
