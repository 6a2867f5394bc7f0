"""Measures training from a store in a bucket against the same store on a disk.

The figures are the time spent waiting, the requests, and their price. The store is copied to
SeaweedFS on this machine, or to the server in AWS_ENDPOINT_URL. The client adds latency and limits
the bandwidth: each request first waits for the latency, and all answers share one link. Each case
trains the same drafter for one epoch with the same seed, and the losses must be equal, bit for bit.
"Waiting" is the share of the steps' time in which training waited for data. Prices are list prices
of S3 Standard (us-east-1), not amounts that anybody paid: 0.0004 USD for 1,000 reads, and 0.005 USD
for 1,000 writes or lists.

    python -m benchmarks.store.object_store --store STORE [--latency-ms 20] [--gb-s 1.0]
        [--steps N] [--drafter eagle]
"""

import argparse
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.harness import run
from moa_data.storage.object_store import ObjectStore
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.object_stores import Seaweed, copy_up, empty_prefix, use
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit import train

USD_PER_READ, USD_PER_WRITE = 0.0004 / 1000, 0.005 / 1000


class Link:
    """A network with latency and limited bandwidth between this process and the server.

    It counts the requests and bytes that cross it.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.requests, self.n_bytes = Counter[str](), 0
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def take(self) -> tuple[dict[str, int], int]:
        """Return the requests and bytes since the last call."""
        with self._lock:
            found = dict(self.requests), self.n_bytes
            self.requests, self.n_bytes = Counter(), 0
        return found

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Send every request of this process over the link."""
        real = ObjectStore._asked

        def asked(bucket: ObjectStore, name: str, request: Callable[[], Any]) -> Any:
            time.sleep(self.latency_s)
            answer = real(bucket, name, request)
            n_bytes = len(answer) if isinstance(answer, bytes | memoryview) else 0
            with self._lock:
                self.requests[_kind(request)] += 1
                self.n_bytes += n_bytes
                self._free_at_s = (
                    max(time.monotonic(), self._free_at_s) + n_bytes / self.bytes_per_s
                )
                free_at_s = self._free_at_s
            time.sleep(max(0.0, free_at_s - time.monotonic()))
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ObjectStore, "_asked", asked)
            yield


def _kind(request: Callable[[], Any]) -> str:
    return "list" if "all_pages" in getattr(request, "__qualname__", "") else "read"


def trained(
    options: argparse.Namespace, store: str, out: Path, cache: Path | None
) -> dict[str, Any]:
    """Train for an epoch, and return figures from the report of the run."""
    report = train(
        TrainConfig.of(
            store=store, out=str(out), drafter=options.drafter, epochs=None if options.steps else 1,
            max_steps=options.steps, validation_fraction=0.0, seed=1,
            cache_dir=None if cache is None else str(cache), cache_gb=options.cache_gb,
            batch_size=options.batch_size,
        )
    )  # fmt: skip
    return {
        "steps": report.n_steps,
        "tokens_per_s": report.tokens_per_s,
        "wait_share": report.data_wait_share,
        "loss": report.metrics.get("train/loss"),
        "store_bytes": report.n_bytes_read,
    }


@contextmanager
def _used(server: Seaweed) -> Iterator[str]:
    with use(server.endpoint):
        yield server.endpoint


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases."""
    link = Link(options.latency_ms / 1e3, options.gb_s * 1e9)
    cases: dict[str, Any] = {}
    with ExitStack() as stack, ActivationStore(options.store) as local:
        n_bytes = sum(commit.stored_bytes for commit in local.commits.values())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="object-store-")))
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        if endpoint is None:
            server = Seaweed(folder / "server")
            server.start()
            stack.callback(server.kill)
            endpoint = stack.enter_context(_used(server))
        url = f"{empty_prefix(endpoint)}/store"
        copy_up(options.store, url)
        stack.enter_context(link.in_use())
        locations = {
            "disk": (str(options.store), None),
            "bucket": (url, None),
            "bucket, first epoch into the cache": (url, folder / "cache"),
            "bucket, second epoch from the cache": (url, folder / "cache"),
        }
        for name, (location, cache) in locations.items():
            link.take()
            found = trained(options, location, folder / f"run-{len(cases)}", cache)
            requests, fetched = link.take()
            usd = requests.get("read", 0) * USD_PER_READ + requests.get("list", 0) * USD_PER_WRITE
            n_gb = found["store_bytes"] / 1e9
            cases[name] = found | {
                "requests": requests,
                "fetched_bytes": fetched,
                "requests_per_gb": sum(requests.values()) / n_gb if n_gb else None,
                "usd_per_tb": usd / n_gb * 1e3 if n_gb else None,
            }
    losses = {case["loss"] for case in cases.values()}
    if len(losses) > 1 and not all(math.isnan(loss) for loss in losses):
        raise SystemExit(
            f"The losses of the same training differ between the locations of the store: {losses}."
        )
    return {"store_bytes": n_bytes, "cases": cases}


if __name__ == "__main__":
    run(
        "object-store", measure, store={"type": Path, "required": True}, drafter="eagle", steps=int,
        batch_size=8, latency_ms=20.0, gb_s=1.0, cache_gb=50.0,
    )  # fmt: skip
