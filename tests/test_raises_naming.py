"""``raises_naming`` of the kit fails if the class, a fact or the sentence of an error is missing."""

from pathlib import Path

import pytest

from moa_data.errors import DatasetError, OptionInvalid, StoreError, StoreLocked
from moa_data.tests.kit.errors import raises_naming

MESSAGE = "n_steps is 15 in /tmp/run.yaml, but the shape [3, 5] allows 2.5"


@pytest.mark.parametrize("fact", ["n_steps", 15, Path("/tmp/run.yaml"), "run.yaml", [3, 5], 2.5])
def test_a_fact_of_the_message_is_accepted(fact: object) -> None:
    with raises_naming(StoreError, fact):
        raise StoreLocked(MESSAGE)


@pytest.mark.parametrize("fact", ["steps", 1, 2, "mp/run.yaml", [3, 4], "n_step"])
def test_a_fact_that_is_only_a_part_of_a_word_is_missed(fact: object) -> None:
    with pytest.raises(AssertionError), raises_naming(StoreError, "n_steps", fact):
        raise StoreError(MESSAGE)


def test_another_class_is_not_accepted() -> None:
    with pytest.raises(DatasetError), raises_naming((StoreError, OptionInvalid), "n_steps"):
        raise DatasetError(MESSAGE)


def test_a_block_without_an_error_is_not_accepted() -> None:
    with pytest.raises(pytest.fail.Exception), raises_naming(StoreError):
        pass


def test_a_message_must_be_a_sentence() -> None:
    with pytest.raises(AssertionError), raises_naming(StoreError, "n_steps"):
        raise StoreError("n_steps: 15")
