"""quantize: from a float network to a small one, in one command."""

from ompq.cli.making import (
    Given,
    bits_source,
    finish,
    labelled_batches,
    plan_for,
    quantized_network,
)
from ompq.cli.options import DataOptions, NetworkOptions, OutputOptions, PlanOptions
from ompq.cli.runs import RunOptions, calibration_count, run_folder
from ompq.cli.screen import opened
from ompq.cli.settings import (
    check_folder,
    load_inputs,
    load_network,
    plan_config,
    read_samples,
    sample_count,
)


def quantize(
    network: NetworkOptions,
    data: DataOptions,
    run: RunOptions,
    planning: PlanOptions,
    output: OutputOptions,
) -> None:
    """Plan, quantize, reconstruct, evaluate and save, in one command.

    Examples:
      ompq quantize torchvision:resnet18 --data train/ --budget 4.0MiB -o out/
      ompq quantize timm:resnet18 --data train/ --eval-data val/ --budget 3.2bits
        --iterations 2000 -o out/
      ompq quantize net.py:make --data digits --plan plan.json -o out/
      ompq quantize ompq:demo --data digits --budget 36KiB -o out/

    Ctrl-C keeps what is done: the same command with --resume continues.
    """
    check_folder(run.folder)
    with opened(output) as screen, run_folder(run, screen):
        config = plan_config(planning)
        source = bits_source(run)
        model = load_network(network, screen)
        inputs = load_inputs(data, model, "train")
        # Before the work: labels that do not fit should not cost an hour.
        judged = labelled_batches(run.eval_data, data, model, limit=run.limit)
        count = calibration_count(run, inputs)
        samples = read_samples(inputs, count, screen)
        few = samples[: sample_count(network.network, None, planning.protocol)]
        plan = plan_for(model.module, few, source, config, screen)
        made = quantized_network(model.module, plan, samples, run, data.seed, screen)
        given = Given(model, inputs, samples, judged)
        steps = 0 if run.no_reconstruct else run.iterations
        finish(made, plan, given, run, screen, samples=count, iterations=steps)
        run.checkpoint.unlink(missing_ok=True)
