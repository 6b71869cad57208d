"""quantize, train and evaluate: commands that make or measure a network."""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import typer
from torch import nn

from ompq.allocation.problem import Allocation
from ompq.amounts import digits, in_bytes, seconds as duration
from ompq.budgets import Budget
from ompq.cli.console import (
    Column,
    Console,
    View,
    facts,
    in_first_process,
    mute_warnings,
    say,
)
from ompq.cli.loading import (
    check_score,
    decoder_metrics,
    find_data,
    labelled_batches,
    load_network,
    plan_count,
    provenance,
    read_samples,
    use_threads,
    user_metrics,
)
from ompq.cli.option_groups import (
    CALIBRATION_SAMPLES,
    CHECKPOINT,
    FORMATS,
    SEARCH,
    START,
    TRAINING,
    CacheOptions,
    EvaluateOptions,
    GoalOptions,
    RefineOptions,
    RunOptions,
    SourceOptions,
    TrainOptions,
)
from ompq.cli.options import apply_options, check_writable, typed_toml
from ompq.cli.views import quality_rows, quality_text, time_line, totals, used, warning
from ompq.configs import (
    EFFORTS,
    QUANTIZE_PROTOCOLS,
    Goal,
    QuantizeConfig,
    ReconstructConfig,
    RoundingConfig,
    TrainConfig,
    TuningConfig,
)
from ompq.datasets.images import image_views
from ompq.datasets.named_data import Data
from ompq.datasets.training_sets import HeldSet, training_data
from ompq.errors import BudgetError, DataError, PlanError
from ompq.evaluation import evaluate as measure
from ompq.files import (
    GGUF,
    ONNX,
    PACKED,
    PLAN,
    RESULT,
    locked_folder,
    remove_unfinished,
)
from ompq.forecasts import Forecast, forecast
from ompq.integer.engine import IntegerNetwork
from ompq.models.exported_models import exported_model
from ompq.models.named_models import NamedModel
from ompq.packed.packed_files import load, save
from ompq.parallel import main_has
from ompq.plans import Plan, read_bits
from ompq.quantization.record import BlockError, quantization_of
from ompq.report_sections import Remark
from ompq.runtimes.runnable_files import is_runnable
from ompq.samples import model_device
from ompq.smallest_network import Smallest
from ompq.training.step import Loss
from ompq.training.training_batches import TrainingData, as_labelled, checked_length
from ompq.training.training_loop import train as learn
from ompq.training.training_run import check_installed
from ompq.untrusted_json import read_json
from ompq.user_functions import is_user_function, user_function
from ompq.workflow import (
    ANYTHING,
    Outcome,
    Workflow,
    learning_config,
    made_folder,
)
from ompq.working_memory import check_free


def finished_view(run: RunOptions) -> View:
    """Return the result of a run that had already finished."""
    line = f"{run.folder}: this run is finished; there is nothing to resume"
    return View(read_json(run.folder / RESULT), line)


def reconstruction(
    run: RunOptions, inputs: Data, protocol: str | None
) -> ReconstructConfig | None:
    """Return the settings of reconstruction, or None if there is none."""
    base = EFFORTS[run.effort]
    if base is None:
        return None
    name, seed = inputs.model.name, inputs.seed
    config = learning_config(
        protocol, name, base=base, iterations=run.iterations, seed=seed
    )
    tuning, epochs = config.tuning, run.tune_epochs
    if epochs is not None:
        if not isinstance(config.rounding, RoundingConfig):
            raise ValueError(
                f"--protocol {protocol} does not tune networks; omit --tune-epochs"
            )
        tuning = TuningConfig(epochs=epochs, always=True) if epochs else None
    return replace(apply_options(config, run), tuning=tuning)


def calibration_count(run: RunOptions, inputs: Data) -> int:
    """Return the number of inputs used for calibration."""
    return run.samples or min(CALIBRATION_SAMPLES, len(inputs))


def check_same_budget(run: RunOptions, plan: Plan, place: Path) -> None:
    """Raise a BudgetError if ``--budget`` differs from the plan's budget."""
    wanted = None if run.budget is None else Budget.of(run.budget)
    if wanted is not None and plan.target is not None:
        wanted = wanted.of_file(plan.target.file)
    if wanted is not None and str(wanted) != str(plan.budget):
        raise BudgetError(
            f"{place} was started with the budget {plan.budget}, not {wanted}; "
            "use that budget, or start over in another folder"
        )


def bits_source(
    run: RunOptions, goal: Goal | None = None
) -> Plan | Allocation | Budget:
    """Return what decides the bits: a plan, an allocation or a budget."""
    run.check_unfinished()
    if goal is not None:
        return Budget.of(ANYTHING)
    if run.plan is not None:
        return within_budget(read_bits(run.plan), run)
    if run.started and not run.overwrite:
        plan = Plan.load(run.folder / PLAN)
        check_same_budget(run, plan, run.folder)
        return plan
    if run.budget is None:
        raise BudgetError(
            "no budget: give --budget, for example 4.0MiB, or --plan, or a goal, "
            "for example --min-agreement 99%"
        )
    return Budget.of(run.budget)


def within_budget(source: Plan | Allocation, run: RunOptions) -> Plan | Allocation:
    """Return the bits of ``--plan``, which may have been edited.

    Raises:
        BudgetError: They exceed the plan's budget, and nobody said to ignore it.
    """
    if run.ignore_budget or not isinstance(source, Plan) or source.meets_budget():
        return source
    raise BudgetError(
        f"the bits in {run.plan} exceed the plan's own budget: "
        f"{'; '.join(used(source))}. Lower some bits, solve again with ompq replan, or "
        "accept them with --ignore-budget"
    )


@contextmanager
def run_folder(run: RunOptions, console: Console) -> Iterator[None]:
    """Create and lock the folder; if stopped, say how to continue."""
    lock = locked_folder(run.folder) if in_first_process() else nullcontext()
    finished = run.folder / RESULT
    try:
        with made_folder(run.folder), lock:
            before = (run.folder / PLAN).exists()
            for name in (".", TRAINING, SEARCH):
                remove_unfinished(run.folder / name)
            try:
                yield
            finally:
                # A plan without a network made from it is of no use.
                if not before and run.started is None and not finished.exists():
                    (run.folder / PLAN).unlink(missing_ok=True)
    except KeyboardInterrupt:
        if run.started is None:
            raise
        if in_first_process():
            # Under torchrun, sys.argv does not show the command that was typed.
            again = "the command that started all processes, with --resume added"
            if "RANK" not in os.environ:
                typed = [word for word in sys.argv[1:] if word != "--resume"]
                again = shlex.join(["ompq", *typed, "--resume"])
            say(console.err, f"stopped; progress is kept in {run.started}")
            say(console.err, f"continue with: {again}")
        raise typer.Exit(130) from None


def check_planning(sources: SourceOptions, planning: RefineOptions) -> None:
    """Raise an error for wrong options of planning, before the network is loaded."""
    check_score(planning.config(), planning.of_orm)
    planning.refinement(sources.seed)


def make_plan(
    planning: RefineOptions,
    work: Workflow,
    source: Plan | Allocation | Budget,
    inputs: Data,
) -> Plan:
    """Plan as the options ask; a plan is returned unchanged."""
    count = plan_count(planning.protocol, inputs.model.name)
    refinement = planning.refinement(inputs.seed)
    return work.plan(source, planning.config(), count=count, refinement=refinement)


def run_quantize(
    sources: SourceOptions,
    run: RunOptions,
    goals: GoalOptions,
    planning: RefineOptions,
    caching: CacheOptions,
    console: Console,
    *,
    dry_run: bool,
) -> View:
    """Plan, quantize, reconstruct, evaluate and save, in one command."""
    check_writable(run.folder, folder=True)
    run.check(planning)
    goals.check(run, dry_run=dry_run)
    with run_folder(run, console):
        if run.is_finished():
            return finished_view(run)
        metrics, cache = user_metrics(run.metric), caching.folder()
        source = bits_source(run, goal := goals.goal(metrics.values()))
        # Report wrong options before the network is loaded.
        check_planning(sources, planning)
        model = load_network(sources, console)
        inputs = find_data(sources, model)
        # Read now, so that unsuitable labels are not found after an hour of work.
        judged = labelled_batches(sources, run.eval_data, model, run.limit)
        samples = read_samples(inputs, calibration_count(run, inputs), console)
        work = Workflow(model.module, samples, console.stages, cache)
        search, learning = None, reconstruction(run, inputs, planning.protocol)
        if goal is None:
            found = forecast(
                model.module,
                samples,
                learning,
                coded=planning.coded,
                evaluated=len(judged.order) if judged else 0,
            )
            if dry_run:
                return _forecast_view(found)
            _announce(found, console)
        run.clear(run.plan)
        if goal is None:
            plan, network = _make_quantized(work, source, inputs, run, planning)
        else:
            base, tried = make_plan(planning, work, source, inputs), run.folder / SEARCH
            search = work.smallest(base, goal, learning, batches=judged, folder=tried)
            plan, network = search.plan, search.network
        about = provenance(
            inputs,
            eval_data=run.eval_data,
            samples=len(samples),
            iterations=learning.rounding.iterations if learning else 0,
            input_shape=sources.input_shape,
        )
        outcome = work.outcome(
            network, plan, judged, about, metrics or decoder_metrics(model)
        )
        return _finish(outcome, run, console, work, search)


def _forecast_view(found: Forecast) -> View:
    """Return what ``--dry-run`` shows."""
    rows = found.to_dict()
    columns = [
        Column(title, [row[title] for row in rows], "left" if not at else "right")
        for at, title in enumerate(rows[0])
    ]
    return View(found.to_json(), found.in_words, [found.in_words, columns])


def _announce(found: Forecast, console: Console) -> None:
    """Say how long a run will take, unless it cannot fit in memory.

    Raises:
        HostMemoryError: It needs more memory than is free.
    """
    check_free(found.needed_bytes)
    console.stages.left.expect(found.by_stage)
    if console.quiet:
        return
    say(console.err, found.in_words)
    stages = (f"{one.name} {duration(one.seconds)}" for one in found.stages)
    say(console.err, f"  {', '.join(stages)}")


def _make_quantized(
    work: Workflow,
    source: Plan | Allocation | Budget,
    inputs: Data,
    run: RunOptions,
    planning: RefineOptions,
) -> tuple[Plan, nn.Module]:
    """Plan, quantize and, unless the options say otherwise, reconstruct."""
    plan = make_plan(planning, work, source, inputs)
    if run.views > 1:
        images: Any = work.samples.first_batch(len(work.samples))
        views = image_views(images, run.views, seed=inputs.seed)
        work = replace(work, given=views)
    protocol = planning.protocol or "ours"
    rounded = work.quantize(plan, QUANTIZE_PROTOCOLS.get(protocol, QuantizeConfig()))
    config = reconstruction(run, inputs, planning.protocol)
    if config is None:
        return plan, rounded
    plan.save(run.folder / PLAN)  # a stopped run resumes with it
    return plan, work.reconstruct(rounded, config, checkpoint=run.folder / CHECKPOINT)


def _finish(
    outcome: Outcome,
    run: RunOptions,
    console: Console,
    work: Workflow,
    search: Smallest | None = None,
) -> View:
    """Write the files, and return the network's sizes and quality."""
    if run.measure_layers:
        effects = work.layer_effects(outcome.plan, run.measure_layers)
        outcome = replace(outcome, remarks=effects)
    if search is not None:
        about = {**outcome.about, "search": search.to_json()}
        remarks = [Remark("tried", str(one)) for one in search.trials]
        outcome = replace(outcome, about=about, remarks=[*outcome.remarks, *remarks])
    with console.stage("writing files") as progress:
        files = outcome.write(run.folder, progress, typed_toml())
    (run.folder / CHECKPOINT).unlink(missing_ok=True)
    rmtree(run.folder / SEARCH, ignore_errors=True)
    folder, evaluation = run.folder, outcome.evaluation
    listed = [
        f"{folder / name}: {in_bytes(one.bytes)}"
        + ("" if one.planned is None else f", planned {in_bytes(one.planned)}")
        + _limited_by(name, outcome.plan)
        for name, one in files.items()
    ]
    searched = outcome.about.get("search", {"goal": [], "tried": []})
    rows = [
        *totals(outcome.plan),
        ("goal", searched["goal"]),
        ("tried", searched["tried"]),
        *_error_rows(outcome.errors),
        *([("tuned", outcome.tuned)] if outcome.tuned else []),
        *quality_rows(evaluation),
        ("arithmetic", outcome.about["arithmetic"]),
        ("time", time_line(outcome.seconds)),
        ("files", listed),
        *_next_rows(run.folder, outcome.plan),
    ]
    sizes = {name: one._asdict() for name, one in files.items()}
    written = {"folder": str(folder), "files": [*files], "sizes": sizes}
    accuracy = "" if evaluation is None else f", {quality_text(evaluation)}"
    line = f"{folder}: {'; '.join(used(outcome.plan))}{accuracy}"
    body = [facts(rows), *warning(outcome.about, "the results")]
    return View({**outcome.to_json(), **written}, line, body)


_LIMITS = {
    PACKED: ("size_mib", "size_mb", "percent", "graph_mib"),
    ONNX: ("onnx_mib",),
}


def _limited_by(file: str, plan: Plan) -> str:
    """Return what limits the size of a file, for its line in the summary."""
    names = _LIMITS.get(file, ())
    given = {n: v for n in names if (v := getattr(plan.budget, n)) is not None}
    return f", limited to {Budget(**given)}" if given else ""


def _next_rows(folder: Path, plan: Plan) -> list[tuple[str, str]]:
    """Return how to use the network, or to get a file for another runtime."""
    if plan.budget.gguf_mib:
        return [("next", f"llama-server -m {folder / GGUF} answers with it")]
    if plan.target is not None and plan.target.name in FORMATS:
        name = plan.target.name
        return [("next", f"ompq export {folder} --format {name} writes the folder")]
    if plan.budget.onnx_mib or plan.budget.graph_mib:
        return []
    return [
        ("next", f"ompq export {folder} writes the ONNX file, which is larger"),
        (
            "",
            "The budget is about the packed file; --budget onnx:SIZE limits the other",
        ),
    ]


def _error_rows(errors: Sequence[BlockError]) -> list[tuple[str, str]]:
    if not errors:
        return []
    improved = sum(error.improved for error in errors)
    worst = sorted(errors, key=lambda error: -error.after)[:3]
    texts = [f"{e.block} {digits(e.before)} → {digits(e.after)}" for e in worst]
    rest = "; the others keep their rounding" if improved < len(errors) else ""
    return [
        ("blocks", f"{improved} of {len(errors)} improved{rest}"),
        ("worst", f"{', '.join(texts)} (relative squared error)"),
    ]


def own_loss(training: TrainOptions) -> Loss | None:
    """Return the user's own loss, or None if none was given."""
    if training.loss is None:
        return None
    if not is_user_function(training.loss):
        raise ValueError(f"--loss {training.loss}: write FILE.py:FUNCTION")
    return user_function(training.loss, DataError)


def run_train(
    sources: SourceOptions,
    run: RunOptions,
    training: TrainOptions,
    planning: RefineOptions,
    caching: CacheOptions,
    console: Console,
) -> View | None:
    """Plan, quantize, reconstruct, train, evaluate and save, in one command."""
    check_writable(run.folder, folder=True)
    with run_folder(run, console):
        training.check(run, planning)
        if run.is_finished():
            return finished_view(run)
        cache = caching.folder()
        config = training.config(planning.protocol, sources.seed, run.folder)
        if config.start == "float":  # training would discard the reconstruction
            run = replace(run, effort="fast")
        if in_first_process():  # others may start after it has written files
            run.check_unfinished()
        if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # one per process
        model = load_network(sources, console)
        inputs = find_data(sources, model)
        # Read now, so that unsuitable data is not found after an hour of work.
        loss = own_loss(training)
        images = _images(inputs, config, console, class_indices=loss is None)
        samples = read_samples(
            inputs, min(256, calibration_count(run, inputs)), console
        )
        judged = labelled_batches(sources, run.eval_data, model, run.limit)
        validation = labelled_batches(sources, training.validation, model)
        _clear(run, training)
        if in_first_process() and training.start is None:
            _prepare(inputs, run, planning, cache, console)
        plan, start = _starting_point(training, run, model)
        with console.stage("training") as progress:
            trained = learn(
                start,
                images,
                config,
                teacher=model.module,
                validation=validation,
                checkpoint=run.folder / TRAINING,
                loss=loss,
                progress=progress,
            )
        if not in_first_process():
            return None
        work = Workflow(model.module, samples, console.stages)
        about = provenance(inputs, eval_data=run.eval_data, epochs=config.epochs)
        outcome = work.outcome(trained, plan, judged, about, user_metrics(run.metric))
        return _finish(outcome, run, console, work)


def _images(
    inputs: Data, config: TrainConfig, console: Console, *, class_indices: bool
) -> TrainingData:
    """Return the training images, checked before any work is done."""
    device = model_device(inputs.model.module)
    with console.stage("reading images") as progress:
        images = training_data(inputs, device=device, progress=progress)
    if isinstance(images, HeldSet):
        as_labelled((images.inputs, images.targets), class_indices=class_indices)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    checked_length(images, config, processes, device)
    check_installed(config)
    return images


def _clear(run: RunOptions, training: TrainOptions) -> None:
    """Remove an earlier run's files, before another process can load them."""
    if in_first_process():
        run.clear(run.plan, training.start)
    main_has("cleared")


def _prepare(
    inputs: Data,
    run: RunOptions,
    planning: RefineOptions,
    cache: Path | None,
    console: Console,
) -> None:
    """Quantize, and write the network that all processes and resumed runs load."""
    source, model, start = bits_source(run), inputs.model, run.folder / START
    if start.exists():
        return
    samples = read_samples(inputs, calibration_count(run, inputs), console)
    work = Workflow(model.module, samples, console.stages, cache)
    plan, network = _make_quantized(work, source, inputs, run, planning)
    plan.save(run.folder / PLAN)
    save(network, start, plan=plan, network=model.name)
    (run.folder / CHECKPOINT).unlink(missing_ok=True)


def _starting_point(
    training: TrainOptions, run: RunOptions, model: NamedModel
) -> tuple[Plan, nn.Module]:
    """Return the plan and the network to train, once the first process wrote them."""
    path = training.start or run.folder / START
    while training.start is None and not path.exists():
        time.sleep(0.5)  # if the first process fails, the launcher stops all of them
    network = load(path, model.module)
    record, own_plan = quantization_of(network), path.parent / PLAN
    file = run.plan or own_plan
    if not file.exists():
        raise PlanError(
            f"{file}, the plan of {path}, does not exist; give it with --plan FILE"
        )
    source = read_bits(file)
    plan = source if isinstance(source, Plan) else Plan.load(own_plan)
    check_same_budget(run, plan, path)
    plan.check_network(record.graph)
    bits = source.allocation if isinstance(source, Plan) else source
    if dict(bits) != dict(record.allocation):
        raise PlanError(
            f"the bits in {file} differ from those of {path}; give that network's plan"
        )
    return plan, network


def _exported(
    sources: SourceOptions, options: EvaluateOptions, console: Console
) -> NamedModel:
    """Return a file of ompq export, which its runtime computes."""
    given = {
        "--weights": sources.weights,
        "--packed": options.packed,
        "--input-shape": sources.input_shape,
        "--device-memory": sources.device_memory,
    }
    unused = [name for name, value in given.items() if value is not None]
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: {sources.network} has its weights and its input "
            "shape; give either the file or the network"
        )
    use_threads(sources.threads)
    with console.stage("loading the file"):
        return exported_model(sources.network)


def run_evaluate(
    sources: SourceOptions, options: EvaluateOptions, console: Console
) -> View:
    """Measure a network's accuracy, with a confidence interval."""
    packed, engine = options.packed, options.engine
    if engine == "integer" and packed is None:
        raise ValueError(
            "--engine integer runs packed networks; give one with --packed FILE"
        )
    metrics = user_metrics(options.metric)
    if is_runnable(sources.network):
        model = _exported(sources, options, console)
    elif packed is None:
        model = load_network(sources, console)
    else:  # the packed file holds all weights; the float ones are not needed
        with mute_warnings():
            model = load_network(replace(sources, weights="none"), console)
        module = load(packed, model.module)
        model = replace(model, module=module, weights=str(packed))
    metrics = metrics or decoder_metrics(model)
    inputs = find_data(sources, model, "test")
    batches = inputs.batches(batch_size=options.batch_size, limit=options.limit)
    network = model.module
    if engine == "integer":
        network = IntegerNetwork.from_quantized(network.cpu(), inputs.samples(1))
    with console.stage("evaluating") as progress:
        result = measure(network, batches, metrics=metrics, progress=progress)
    about = {"network": model.name, "weights": model.weights, "data": inputs.name}
    about |= {} if packed is None else {"engine": engine}
    rows = [
        ("network", f"{model.name}, weights {model.weights}"),
        ("data", inputs.name),
        *([] if packed is None else [("engine", engine)]),
        *quality_rows(result),
        ("speed", f"{result.images_per_second:,.0f} samples per second"),
        ("time", time_line(console.stages.seconds)),
    ]
    data = {**about, **result.to_json(), "seconds": console.stages.seconds}
    end = warning(about, "the numbers")
    return View(data, quality_text(result), [facts(rows), *end])
