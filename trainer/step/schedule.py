"""Learning-rate schedule: step -> factor of the final learning rate."""


def zero_peak_constant(step: int, warmup_steps: int, peak_multiplier: float, decay_end_step: int) -> float:
    """Rise from 0 to the peak in the warm-up, fall linearly to 1 at ``decay_end_step``, then stay at 1.

    As in the official ``trainer.py``, lines 102-123.

    Args:
        step: optimizer step, 0-based; step 0 has factor 0 when there is a warm-up.
        peak_multiplier: factor at the end of the warm-up.
    """
    if step < warmup_steps:
        return peak_multiplier * step / warmup_steps
    if step >= decay_end_step or decay_end_step <= warmup_steps:
        return 1.0
    done = (step - warmup_steps) / (decay_end_step - warmup_steps)
    return peak_multiplier + (1.0 - peak_multiplier) * done
