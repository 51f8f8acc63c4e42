"""The plan and the certificate as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.config.choices import ScalingRule, ScalingWeightDecay
from runner.plan import equivalent_micro_batches
from runner.plan.certificate import Certificate
from runner.plan.describe_sync import describe_sync_window
from runner.plan.experiment import Experiment
from runner.plan.properties import describe_adapter
from runner.plan.scaling import lr_formula, settings_text
from runner.plan.scaling_range import rule_of
from runner.plan.schedule import falling_words
from runner.plan.shards import shards_by_worker, subtrees_of, used_shards


def plan_tables(experiment: Experiment) -> RenderableType:
    """The plan's numbers and the equivalent per-worker batches."""
    table = plain_table(_title(experiment))
    table.add_column("what", style="bold")
    table.add_column("value", justify="right")
    table.add_column("derived from", style="dim")
    for row in _rows(experiment):
        table.add_row(*row)
    return Group(table, _equivalents(experiment))


def brief_tables(experiment: Experiment) -> RenderableType:
    """The plan and what the certificate says differs, in about ten lines."""
    left_out = ("replica batch", "order", "micro-batch", experiment.facts.unit)  # for the whole plan
    plan, differs = _grid(), _grid()
    for name, value, origin in _rows(experiment):
        if name not in left_out:
            plan.add_row(f"  {name}", Text(value, justify="right"), origin)
    for item in experiment.certificate.properties:
        if not item.equal:
            differs.add_row(f"  {item.name.replace('_', ' ')}", item.effect)
    level = f"Certificate: {experiment.certificate.level} to one fp32 worker{'; different:' * bool(differs.row_count)}"
    title = Text(_title(experiment), style="bold")
    return Group(title, Text(f"  {_subject(experiment)}"), plan, Text(level, style="bold"), differs)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    return grid


def absent_notes(experiment: Experiment) -> RenderableType | None:
    """Which data or weights are not on this machine; None if all are."""
    notes = [f"Not available on this machine: {sentence}." for sentence in experiment.inputs.absent]
    return Text("\n".join(notes), style="yellow") if notes else None


def plain_table(title: str) -> Table:
    """An empty table in the runner's style."""
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def _title(experiment: Experiment) -> str:
    return f"Plan · {experiment.config.recipe['name']} · {experiment.setup_name}"


def _subject(experiment: Experiment) -> str:
    """Model and data in one line."""
    facts = experiment.facts
    sizes = f"{facts.train_samples:,} {facts.unit} for training, {facts.eval_samples:,} for evaluation"
    model = experiment.model_name
    if model.startswith("recipes."):  # a class of ours: its name says enough
        model = model.rpartition(".")[2]
    return f"{model} on {facts.source} ({sizes})"


def _rows(experiment: Experiment) -> list[tuple[str, str, str]]:
    """The plan's numbers: name, value, and what it is derived from."""
    plan, config, facts = experiment.plan, experiment.config, experiment.facts
    sizes = f"micro-batch {plan.micro_batch} × accumulation {plan.accumulation_steps} × {plan.world_size} worker(s)"
    if plan.shards is not None:
        sizes = _shards(experiment)
    limited = f"; limited to the {plan.samples_per_epoch:,} training samples" if plan.cut_short else ""
    window = describe_sync_window(plan, config.sync, config.schedule)
    warm_up = f"warm-up over {plan.warmup_steps:,} of {plan.optimizer_steps:,} steps"
    schedule = ", ".join([warm_up, *falling_words(config.schedule)])
    optimizer = f"optimizer {config.optimizer.name.name}, seed {config.seed}"
    adapter = [("adapter", config.adapter.kind.name, words)] if (words := describe_adapter(config.adapter)) else []
    return [
        ("global batch", f"{plan.global_batch:,}", sizes + limited),
        ("replica batch", f"{plan.replica_batch:,}", "samples per optimizer step of one worker"),
        ("order", plan.order, f"of an epoch's {facts.unit}, from seed {config.seed}; global batches are cut from it"),
        ("micro-batch", f"{plan.micro_batch:,}", "samples per forward pass of one worker"),
        ("sync window", f"{plan.sync_window:,}", window),
        ("learning rate", f"{plan.lr:.4g}", _learning_rate(experiment)),
        *_follows_the_batch(experiment),
        ("schedule", config.schedule.name.name, schedule),
        ("optimizer steps", f"{plan.optimizer_steps:,}", _steps(experiment)),
        (facts.unit, f"{plan.total_samples:,}", _samples(experiment)),
        ("precision", config.precision.name.name, optimizer),
        *adapter,
    ]


def _shards(experiment: Experiment) -> str:
    """What `equivalence=identical` does with a global batch, and what it costs."""
    plan, threads = experiment.plan, experiment.config.equivalence.threads
    assert plan.shards is not None
    used, workers = used_shards(plan.global_batch, plan.shards), plan.world_size
    own = shards_by_worker(used, workers)
    least, most = min(map(len, own)), max(map(len, own))
    each = f"{least} to {most}" if least < most else f"{most}"
    words = [f"{used} shards of up to {plan.micro_batch}, {each} per worker"]
    if experiment.setup.device_type == "cpu":
        words.append(f"{threads} thread{'s' * (threads != 1)}")
    if workers > 1:
        sent = (max(len(subtrees_of(shards)) for shards in own) + 1) / 2
        words.append(f"{sent:g} × the bytes of an all-reduce")
    return ", ".join(words)


def _learning_rate(experiment: Experiment) -> str:
    plan = experiment.plan
    rule, batch = rule_of(experiment.config, plan)
    if rule is ScalingRule.none:
        return f"base {plan.base_lr:.4g}, not scaled"
    if batch == plan.reference_batch:
        return f"base, for the reference batch of {batch}"
    shown = lr_formula(rule, f"{batch} / reference {plan.reference_batch}")
    return f"base {plan.base_lr:.4g} × {plan.lr_factor:.4g} ({rule.name} rule: {shown})"


def _follows_the_batch(experiment: Experiment) -> list[tuple[str, str, str]]:
    """The optimizer's other settings that the scaling rule has changed."""
    plan, optimizer = experiment.plan, experiment.config.optimizer
    rule, _ = rule_of(experiment.config, plan)
    decay = f"scaling.weight_decay={ScalingWeightDecay.per_sample.name}"
    return [
        (
            name.replace("_", " "),
            settings_text(value),
            f"{settings_text(getattr(optimizer, name))} at the reference batch "
            f"({decay if name == 'weight_decay' else f'{rule.name} rule'})",
        )
        for name, value in plan.scaled_settings.items()
    ]


def _samples(experiment: Experiment) -> str:
    facts = experiment.facts
    each = f"{experiment.plan.samples_per_epoch:,} per epoch"
    return each if facts.train_groups is None else f"{each}, from {facts.train_groups:,} {facts.groups}"


def _steps(experiment: Experiment) -> str:
    plan, limit = experiment.plan, experiment.config.max_steps
    epochs, steps = plan.epochs, plan.steps_per_epoch
    whole = f"{epochs} epoch{'s' * (epochs != 1)} × {steps:,} step{'s' * (steps != 1)}"
    if limit is None or limit == plan.whole_steps:
        return whole
    return f"{whole}, {'limited by' if limit < plan.whole_steps else 'fewer than'} max_steps={limit}"


def _equivalents(experiment: Experiment) -> Table:
    plan = experiment.plan
    workers = (1, 2, 4, 8)
    table = plain_table("Samples per worker and step for the same global batch")
    table.add_column("global batch", justify="right")
    for n in workers:
        table.add_column(f"{n} worker{'s' if n > 1 else ''}", justify="right")
    for size in sorted({plan.global_batch, 256, 128, 64, 32}, reverse=True):
        cells = [str(cell) if cell is not None else "–" for cell in equivalent_micro_batches(size, workers).values()]
        table.add_row(str(size), *cells, style="bold" if size == plan.global_batch else "")
    return table


def certificate_table(
    certificate: Certificate, setup: str = "this run", baseline: str = "baseline", baseline_is: str = "one fp32 worker"
) -> RenderableType:
    """The properties that differ from the baseline, and a line with those that are equal."""
    title = f"Certificate: {certificate.level} to {baseline_is}"
    table = plain_table(title)
    table.add_column("differs", style="bold")
    table.add_column(setup, justify="right")
    table.add_column(baseline, justify="right")
    table.add_column("effect", style="dim", overflow="fold")
    for item in certificate.properties:
        if not item.equal:
            value = f"{_cell(item.value)}{f' ({item.change})' if item.change else ''}"
            table.add_row(item.name.replace("_", " "), value, _cell(item.baseline), item.effect)
    equal = ", ".join(item.name.replace("_", " ") for item in certificate.properties if item.equal)
    dropout_differs = any(item.name == "dropout" and not item.equal for item in certificate.properties)
    hint = " Set equivalence=exact in both runs to make dropout equal." if dropout_differs else ""
    line = Text(f"Equal: {equal}.{hint}", style="dim")
    return Group(table, line) if table.row_count else Group(Text(title, style="bold"), line)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
