"""A tiny target; everything random and in memory."""

import pytest

from moa_data.moa.targets.live import Target
from moa_data.tests.kit.models import build_model


@pytest.fixture
def target() -> Target:
    return Target(build_model())
