"""The public names of the package: all there, imported on first use, and light where they can be."""

import subprocess
import sys
from importlib import import_module

import pytest

import moa_data

_WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "lightning", "datasets"}:
            raise ImportError(f"{name} is not needed to read a store")
sys.meta_path.insert(0, Refuse())
import moa_data
moa_data.ActivationStore, moa_data.MoaDataError, moa_data.ExtractConfig, moa_data.TrainConfig, moa_data.EvalConfig
"""


@pytest.mark.parametrize("name", sorted(set(moa_data.__all__) - {"__version__"}))
def test_each_name_is_the_one_of_its_module(name: str) -> None:
    found = getattr(moa_data, name)
    assert found is getattr(import_module(found.__module__), name)


def test_all_and_dir_agree_with_what_there_is() -> None:
    assert set(moa_data.__all__) == {*moa_data._HOMES, "__version__"}
    assert dir(moa_data) == sorted(moa_data.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'extrakt'"):
        _ = moa_data.extrakt


def test_reading_a_store_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=True)
