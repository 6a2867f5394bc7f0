"""Hooks and fixtures of all tests.

They make random numbers reproducible, and provide a folder with a model, chats and a store.
"""

import gc
import importlib.util
import os
import random
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
# Tiny matrices are slower on several threads, and results must not depend on the number of threads.
# This must be set before the first import of torch. Nothing at the top of this file imports torch,
# and pytest-xdist reads the file in a process that runs no test.
os.environ["OMP_NUM_THREADS"] = "1"


def fsync_nothing(fd: int) -> None:
    """Stand in for os.fsync.

    No test cuts the power, and waiting for the disk takes a third of the time of a small store.
    Tests that count calls or make them fail wrap this function. A closed descriptor is still an
    error.
    """
    os.fstat(fd)


os.fsync = fsync_nothing  # type: ignore[assignment]  # os.fsync also takes objects with a fileno


def seed_generators(config: pytest.Config, name: str) -> None:
    """Seed the global generators of Python, NumPy and PyTorch from the run's seed and a name.

    The run's seed is 0, unless `make test-shuffled` sets another one.
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
    """Make a fixture draw the same numbers, whichever test or fixture runs before it."""
    seed_generators(request.config, f"{request.node.nodeid} {fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Make a test draw the same numbers in any order of the tests."""
    seed_generators(item.config, item.nodeid)


def process_state() -> dict[str, Any]:
    """Return state of the process that later tests could depend on."""
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
    """Fail a test that changes the state of the process."""
    before = process_state()
    yield
    after = process_state()
    changes = {name: (before[name], after[name]) for name in before if after[name] != before[name]}
    assert not changes


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep cached hashes of files in a temporary folder instead of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make clients of HTTP trust a single authority.

    No test reaches the Internet, and a client takes 50 ms to read the certificates of all
    authorities.
    """
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("certifi"):
            import certifi

            end = "-----END CERTIFICATE-----\n"
            first = certifi.contents().partition(end)[0] + end
            file = tmp_path_factory.mktemp("authority") / "authority.pem"
            file.write_text(first)
            patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Hide what collection leaves from the garbage collector.

    These are imported modules and the tests themselves, a million objects that stay until the end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests an hour instead of the five minutes of pyproject.toml."""
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(3600))


def blank_picture(figure: Any, file: Any, **options: Any) -> None:
    """Write the start of a PNG instead of drawing.

    Drawing takes most of the time of a tiny training.
    """
    if hasattr(file, "write"):
        file.write(b"\x89PNG")
    else:
        Path(file).write_bytes(b"\x89PNG")


@pytest.fixture(autouse=True)
def pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only draw pictures in tests that are marked with ``draws``."""
    with pytest.MonkeyPatch.context() as patch:
        # matplotlib may be missing on machines with a GPU.
        if request.node.get_closest_marker("draws") is None and importlib.util.find_spec(
            "matplotlib"
        ):
            patch.setattr("matplotlib.figure.Figure.savefig", blank_picture)
        yield


@pytest.fixture(scope="session", autouse=True)
def devices_of_autograd() -> None:
    """Register the simulated device before any test.

    autograd counts the devices only once, in the first backward pass of a process.
    """
    if "torch" in sys.modules:
        from moa_data.tests.kit.device import register

        register()


@pytest.fixture
def heeded_signals() -> Iterator[None]:
    """Make this process and its children handle SIGINT and SIGHUP.

    Shells and ``nohup`` may have set these signals to be ignored.
    """
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in ignored:
        # Use a handler and not SIG_DFL, because a real hangup must not end the tests. Child
        # processes get the default action.
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None
        )
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def device() -> Iterator[Any]:
    """Yield the counts of a simulated CUDA device, which exists during the test."""
    from moa_data.tests.kit.device import simulated_device

    with simulated_device() as counts:
        yield counts


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """Yield the endpoint of an in-memory S3 server."""
    from moa_data.tests.kit.object_stores import moto

    with moto() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the endpoint of an S3 server that keeps its data on disk. It is slow to start."""
    from moa_data.tests.kit.object_stores import Seaweed

    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    server.start()
    yield server.endpoint
    server.kill()


@pytest.fixture
def s3(moto_server: str) -> Iterator[str]:
    """Yield the URL of an empty prefix of a bucket."""
    from moa_data.tests.kit.object_stores import empty_prefix, use

    with use(moto_server):
        yield empty_prefix(moto_server)


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with model/, drafter/, chats.jsonl and a store/ of several parts.

    Tests only change copies of it.
    """
    from moa_data.tests.kit.chats import chat
    from moa_data.tests.kit.command import build_room

    chats = [chat(f"What is {n} plus {n}?", f"It is {2 * n}.") for n in range(12)]
    return build_room(tmp_path_factory.mktemp("room"), chats)
