"""Choose the settings of a run that were not given.

The chosen values are a pure function of the given settings, the target's size, the data and the
number of devices. ``run.yaml`` records them, so a resumed run does not choose again.
"""

from typing import Any, NamedTuple

from .config import TrainConfig, known

CHOOSABLE = (
    "epochs", "max_steps", "optimizer", "learning_rate", "matrix_learning_rate", "peak_multiplier",
    "warmup_steps", "decay_steps", "batch_size", "validation_fraction", "validate_every",
    "log_every", "draft_vocabulary",
)  # fmt: skip
"""Names of the settings that are chosen if they are not given."""
CPU_MICRO_BATCH_TOKENS = 2048
"""Maximum number of tokens in a forward on a CPU.

With more tokens, a CPU is not faster per token, but needs more memory.
"""

# The settings published in the Mixture of Attentions paper (arXiv 2410.03804) are chosen only if
# the target's hidden size is at least _PAPER_WIDTH, and the run has at least _PAPER_TOKENS training
# tokens over all epochs. In shorter runs, Muon learns more from the same number of tokens.
_PAPER_WIDTH = 2048
_PAPER_TOKENS = 20_000_000
_PAPER_BATCH = 32
# Minimum number of training tokens over all epochs. With a smaller store, several epochs are
# chosen.
_TRAINED_TOKENS = 1_000_000
# Batch sizes of runs that do not use the published settings, as pairs (minimum number of sequences
# in the run, batch size). A sequence counts once for each epoch. The first pair is used that has a
# minimum of at most the run's number of sequences. For short runs, a small batch and about 400
# steps are better than a large batch and fewer steps. A batch size of 1 works only for toy models.
_BATCHES = ((50_000, 32), (20_000, 16), (3200, 8), (1600, 4), (0, 2))
# Batch size if the number of steps is given and the published settings are not used.
_BATCH_OF_GIVEN_STEPS = 8
_WARMUP_STEPS = 50
# A validation needs 50 sequences or 5,000 response tokens. But a hash selects the validation
# sequences, so there are sometimes fewer sequences than the validation fraction says. So the
# fraction is chosen for a higher number of sequences and of response tokens.
_VALIDATION_SEQUENCES = 70
_VALIDATION_POSITIONS = 7000
_FEW_STEPS = 30


class ChosenSetting(NamedTuple):
    """A setting that was chosen: its name, its value, and the reason for the value."""

    name: str
    value: Any
    why: str


class RunFacts(NamedTuple):
    """Facts about a run.

    These facts and the given settings determine the values of all other settings.
    """

    hidden_size: int
    n_sequences: int  # Number of sequences in the training split.
    n_tokens: int  # Number of tokens in the training split.
    n_devices: int = 1


def is_open(value: Any) -> bool:
    """Return whether a setting was not given, so that the trainer must choose its value."""
    return value is None or value == "auto"


def choose_settings(
    config: TrainConfig, facts: RunFacts
) -> tuple[TrainConfig, list[ChosenSetting]]:
    """Choose all settings that were not given, except ``validation_fraction``.

    Returns:
        The complete settings, and the list of the chosen settings.
    """
    values = config.named()
    chosen: list[ChosenSetting] = []

    def choose(name: str, value: Any, why: str) -> Any:
        """Set a setting and record the reason, unless the setting was given. Return its value."""
        if is_open(values[name]):
            values[name] = value
            chosen.append(ChosenSetting(name, value, why))
        return values[name]

    n_given = values["max_steps"]
    is_wide = facts.hidden_size >= _PAPER_WIDTH
    if n_given is None:
        epochs = min(10, max(1, round(_TRAINED_TOKENS / max(1, facts.n_tokens))))
        epochs = choose(
            "epochs",
            epochs,
            f"to train on at least {_TRAINED_TOKENS:,} tokens, but in at most 10 epochs",
        )
        n_sequences = epochs * facts.n_sequences
    else:
        usual = _PAPER_BATCH if is_wide else _BATCH_OF_GIVEN_STEPS
        n_sequences = n_given * (values["batch_size"] or usual)
    is_paper = is_wide and n_sequences * facts.n_tokens >= _PAPER_TOKENS * facts.n_sequences
    if is_paper:
        size = _PAPER_BATCH
    elif n_given is not None:
        size = _BATCH_OF_GIVEN_STEPS
    else:
        size = next(size for least, size in _BATCHES if n_sequences >= least)
    size = max(1, min(size, facts.n_sequences))
    size += -size % facts.n_devices
    size = choose(
        "batch_size",
        size,
        f"for a run of {n_sequences:,.0f} sequences, including repeats in later epochs",
    )
    _choose_rates(choose, is_paper)
    steps_per_epoch = facts.n_sequences // size
    n_steps = n_given or max(1, round(values["epochs"] * steps_per_epoch))
    choose(
        "warmup_steps",
        min(_WARMUP_STEPS, n_steps // 10),
        f"a tenth of {n_steps:,} steps, at most {_WARMUP_STEPS}",
    )
    if is_paper and steps_per_epoch >= 20 * _WARMUP_STEPS:
        choose("decay_steps", steps_per_epoch, "one epoch, as published")
    choose("decay_steps", -1, "until the end of the run")
    choose(
        "validate_every",
        max(1, min(1000, n_steps // 10)),
        "validates at least ten times in the run",
    )
    choose("log_every", max(1, min(10, n_steps // 20)), "logs at least twenty times in the run")
    return config.of(**values), chosen


def _choose_rates(choose: Any, is_paper: bool) -> None:
    """Choose the optimizer and its learning rates."""
    long = "as published, for long runs of large targets"
    short = "learns more than adamw in runs of this length"
    optimizer = choose("optimizer", "adamw" if is_paper else "muon", long if is_paper else short)
    if optimizer == "adamw" and is_paper:
        choose("learning_rate", 3e-5, long)
        choose("peak_multiplier", 20.0, long)
    choose("learning_rate", 1e-4, "for runs of this length")
    if optimizer == "muon":
        choose("matrix_learning_rate", 2e-3, "suits weights of every width")
    choose("peak_multiplier", 10.0, "ratio of the peak learning rate to the final one")


def choose_validation_fraction(n_sequences: int, n_positions: int) -> ChosenSetting:
    """Choose the fraction of a store's sequences that is held out for validation.

    Args:
        n_sequences: number of sequences in the store.
        n_positions: number of response tokens in these sequences.
    """
    share = min(
        _VALIDATION_SEQUENCES / max(1, n_sequences), _VALIDATION_POSITIONS / max(1, n_positions)
    )
    share = round(min(0.2, max(0.02, share)), 3)
    return ChosenSetting(
        "validation_fraction",
        share,
        "enough for 50 sequences or 5,000 response tokens, but at most a fifth of the sequences",
    )


def schedule_warnings(config: TrainConfig, steps_per_epoch: int) -> list[str]:
    """Return warnings about a run that is too short, or a schedule that does not fit its length."""
    schedule = config.schedule
    n_steps = schedule.n_steps(steps_per_epoch)
    warmup = known(schedule.warmup_steps)
    decay_end = schedule.decay_end_step(steps_per_epoch)
    decays = schedule.peak_multiplier != 1
    messages = []
    if n_steps < _FEW_STEPS:
        messages.append(
            f"{n_steps} steps are too few to train a drafter well. Give more `epochs`, or a "
            "smaller `batch_size`"
        )
    if 2 * warmup > n_steps:
        messages.append(
            f"the warm-up takes {min(warmup, n_steps)} of {n_steps} steps. Give fewer "
            "`warmup_steps`"
        )
    if decays and decay_end <= warmup < n_steps:
        messages.append(
            f"the decay of the learning rate would end at step {decay_end}, before the warm-up "
            f"does, so the learning rate drops to its final value after step {warmup}. Give "
            "`decay_steps=-1`, which decays until the end of the run"
        )
    if decays and decay_end > n_steps:
        messages.append(
            f"the run ends at step {n_steps}, before the learning rate reaches its final value at "
            f"step {decay_end}. Give `decay_steps=-1`, which decays until the end of the run"
        )
    return messages
