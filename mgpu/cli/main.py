"""The subcommands of `mgpu` and their options; the work is done elsewhere, imported when it starts."""

import os
from pathlib import Path

import click

import mgpu
from mgpu.cli.horovod import horovod
from mgpu.cli.run import run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(mgpu.__version__, message="mgpu %(version)s")
def main() -> None:
    """Data-parallel training of Keras 3 models on TensorFlow."""


main.add_command(horovod)
main.add_command(run)


@main.command(short_help="Train on the built-in digits data.")
@click.option(
    "--towers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Devices to train on: GPUs where there are as many, else logical CPU devices.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=16, show_default=True)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Rows of one step, over all towers.",
)
@click.option("--staging-depth", type=click.IntRange(min=0), default=1, show_default=True)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for digits.keras.",
)
@click.option("--seed", type=int, default=0, show_default=True)
def train(towers: int, epochs: int, batch_size: int, staging_depth: int, output: Path, seed: int) -> None:
    """Train a small convolutional net on scikit-learn's handwritten digits, and check what came out.

    The exit status is 1 when the test accuracy is below 97 %, or when the saved model, loaded
    back without mgpu, does not predict the same.
    """
    # Must be set before TensorFlow is loaded; its start-up notes would bury the progress lines.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import rich  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise click.ClickException(
            f"mgpu train needs the package {error.name}, which is not installed. Run: pip install 'mgpu[demo]'"
        ) from error
    from mgpu.cli.train import TrainingFailure, run

    try:
        run(
            towers=towers,
            epochs=epochs,
            batch_size=batch_size,
            staging_depth=staging_depth,
            output=output,
            seed=seed,
        )
    except (mgpu.MgpuError, TrainingFailure) as error:
        raise click.ClickException(str(error)) from error


@main.command(short_help="Check versions, devices, MPI and Horovod; under mpirun, the ranks too.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings for a machine to read.")
def doctor(as_json: bool) -> None:
    """Check whether this environment can train, and name what mends each fault.

    Under mpirun it also compares the ranks and adds 1 MiB up over them. The exit status is 1 if
    a check fails; a warning (!) is none.
    """
    from mgpu.cli.doctor import run

    raise SystemExit(run(as_json))


if __name__ == "__main__":
    main()
