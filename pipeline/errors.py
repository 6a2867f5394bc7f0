"""Errors of extraction; every message says what was wrong and what to do next."""

from ..errors import MoaDataError


class PipelineError(MoaDataError):
    """Something the user can mend kept the extraction from running."""


class DatasetError(PipelineError, ValueError):
    """The dataset cannot be read, or holds nothing that can be used."""


class TooManyRejected(DatasetError):
    """More rows were rejected than `max_rejected_fraction` allows."""


class TemplateError(PipelineError, ValueError):
    """The tokenizer has no chat template, or one that cannot be used."""


class PromptUnusable(TemplateError):
    """A prompt holds control tokens of the target, or text that cannot be encoded."""


class SequenceTooLong(PipelineError, ValueError):
    """A sequence has more tokens than the target has positions."""


class NonFiniteActivation(PipelineError, ValueError):
    """The target produced NaN or infinity."""


class TargetDiffers(PipelineError, ValueError):
    """A store was made from another target than the one given."""


class NotEnoughDisk(PipelineError, OSError):
    """The disk cannot hold what the plan would write."""


class NotEnoughMemory(PipelineError, MemoryError):
    """Host or device memory cannot hold the target and its batches."""


class AdditionRefused(PipelineError, ValueError):
    """The store takes no additions, or not these activations."""


class AdditionWanted(PipelineError, ValueError):
    """A store lacks fields or layers that an extraction asks for; the command `add` adds them."""


class RepairRefused(PipelineError):
    """The damaged parts of a store cannot be extracted again."""


class EngineRefused(PipelineError, RuntimeError):
    """Another engine than transformers cannot run the target, or fails."""


class WorkersLost(PipelineError, RuntimeError):
    """All processes that extracted have ended, and there is work left."""
