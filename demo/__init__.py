"""The embedded default: a whole run, from a generated corpus to a measured drafter, without network or accelerator."""

from .config import DemoConfig
from .errors import DemoError

__all__ = ["DemoConfig", "DemoError"]
