"""What all tests share: property tests draw the same examples in every run, and a model with chats and a store."""

import importlib.util
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
# Tiny matrices are slower on several threads, and the bytes must not depend on how many there are.
# Set before the first import of torch, which nothing at the top of this file does: pytest-xdist
# reads it in a process that runs no test.
os.environ["OMP_NUM_THREADS"] = "1"


def fsync_nothing(fd: int) -> None:
    """Stand in for os.fsync: no test takes the power away, and waiting for the disk is a third of a small store's time.

    What counts or refuses the calls wraps this one, and a closed descriptor is still an error.
    """
    os.fstat(fd)


os.fsync = fsync_nothing  # type: ignore[assignment]  # it takes any object with a fileno


def seed_generators(config: pytest.Config, name: str) -> None:
    """Seed the global generators of Python, NumPy and PyTorch from the seed of the run and a name.

    The seed of the run is 0, or the one that `make test-shuffled` was given.
    """
    seed = zlib.crc32(f"{config.getoption('randomly_seed', 0)} {name}".encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> None:
    """Let a fixture draw the same numbers whichever test or fixture ran before it."""
    seed_generators(request.config, f"{request.node.nodeid} {fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Let a test draw the same numbers in any order of the tests."""
    seed_generators(item.config, item.nodeid)


def process_state() -> dict[str, Any]:
    """Return settings of the process that later tests would depend on."""
    state: dict[str, Any] = {
        name.name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    state["current folder"] = os.getcwd()
    state["umask"] = os.umask(0o022)
    os.umask(state["umask"])
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        state["threads of torch"] = torch.get_num_threads()
        state["gradients"] = torch.is_grad_enabled()
        state["default dtype"] = torch.get_default_dtype()
        state["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    return state


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """Fail a test that leaves the process in another state."""
    before = process_state()
    yield
    after = process_state()
    changes = {name: (before[name], after[name]) for name in before if after[name] != before[name]}
    assert not changes


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep hashes of files in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests an hour instead of the five minutes of pyproject.toml."""
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(3600))


def blank_picture(figure: Any, file: Any, **options: Any) -> None:
    """Write the beginning of a PNG instead of drawing, which is most of the time that a tiny training takes."""
    if hasattr(file, "write"):
        file.write(b"\x89PNG")
    else:
        Path(file).write_bytes(b"\x89PNG")


@pytest.fixture(autouse=True)
def pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw no pictures but in tests marked as ``draws``."""
    with pytest.MonkeyPatch.context() as patch:
        # Where a GPU is, there may be no package for pictures.
        if request.node.get_closest_marker("draws") is None and importlib.util.find_spec(
            "matplotlib"
        ):
            patch.setattr("matplotlib.figure.Figure.savefig", blank_picture)
        yield


@pytest.fixture(scope="session", autouse=True)
def devices_of_autograd() -> None:
    """Register the simulated device before any test: autograd counts devices once, in a process's first backward."""
    if "torch" in sys.modules:
        from moa_data.tests.kit.device import register

        register()


@pytest.fixture
def heeded_signals() -> Iterator[None]:
    """Let this process and those that it starts heed SIGINT and SIGHUP, which shells and ``nohup`` ignore for it."""
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in ignored:
        # A handler, not SIG_DFL: a real hangup must not end the tests. Started processes have the
        # default action.
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None
        )
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def device() -> Iterator[Any]:
    """A simulated CUDA device in place of none; what it was asked for."""
    from moa_data.tests.kit.device import simulated_device

    with simulated_device() as counts:
        yield counts


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """The endpoint of an S3 server in memory."""
    from moa_data.tests.kit.object_stores import moto

    with moto() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an S3 server that keeps its data on disk; slow to start."""
    from moa_data.tests.kit.object_stores import Seaweed

    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    server.start()
    yield server.endpoint
    server.kill()


@pytest.fixture
def s3(moto_server: str) -> Iterator[str]:
    """The URL of a prefix of a bucket that holds nothing."""
    from moa_data.tests.kit.object_stores import empty_place, use

    with use(moto_server):
        yield empty_place(moto_server)


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, drafter/, chats.jsonl and store/ of several parts; tests change copies of them."""
    from moa_data.tests.kit.chats import chat
    from moa_data.tests.kit.command import build_room

    chats = [chat(f"What is {n} plus {n}?", f"It is {2 * n}.") for n in range(12)]
    return build_room(tmp_path_factory.mktemp("room"), chats)
