"""Checks the emulated networks: measured round trips, losses and throughput beside what was asked for. Needs root.

Throughput is that of one TCP connection with this machine's congestion control, payload only: loss and jitter bring it
below the rate of the line.

    python benchmarks/emulation.py [--conditions wired,5g,4g,satellite] [--packets 5000] [--mb 20] [--out FOLDER]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from network_conditions import CONDITIONS, Condition
from network_tunnel import Tunnel
from records import add_out_option, settings_of, write_record

PROBES = str(Path(__file__).with_name("probes.py"))
PORT = 7000


def measure(condition: Condition, n_packets: int, n_bytes: int, seed: int) -> dict[str, Any]:
    """Figures of one network as programs at its ends see them."""
    with Tunnel(condition, seed) as tunnel:
        at = (tunnel.server_address, str(PORT))
        server = tunnel.start([sys.executable, PROBES, "serve", *at], "server", stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        server.stdout.readline()
        # Far enough apart for the jitter not to hold packets back: what is wanted is the delay of each.
        spacing = max(2e-3, 2e-3 * (condition.up.jitter_ms + condition.down.jitter_ms))
        arguments = [sys.executable, PROBES, "client", *at, str(n_packets), str(spacing), str(n_bytes)]
        start = time.perf_counter()
        client = tunnel.start(arguments, "client", stdout=subprocess.PIPE, text=True)
        found = json.loads(client.communicate()[0])
        seconds, counts = time.perf_counter() - start, tunnel.counts()
    times = [1e3 * value for value in found["round_trips_s"]]
    down = found["n_seen"]
    return {
        "asked": {
            "round_trip_ms": condition.round_trip_ms, "jitter_ms": condition.up.jitter_ms,
            "loss_percent": 100 * condition.up.loss, "mbit_s": (condition.down.rate_bits_s or 0) / 1e6,
        },
        "round_trip_ms": {
            "mean": round(statistics.mean(times), 2), "sd": round(statistics.stdev(times), 2),
            "median": round(statistics.median(times), 2), "p95": round(statistics.quantiles(times, n=20)[-1], 2),
        },
        "loss_up_percent": round(100 * (1 - down / n_packets), 3),
        "loss_down_percent": round(100 * (1 - len(times) / down), 3),
        "tcp_mbit_s": None if found["bits_per_s"] is None else round(found["bits_per_s"] / 1e6, 2),
        "packets_per_s": round(sum(way.packets for way in counts.values()) / seconds),
    }  # fmt: skip


def main() -> None:
    """Measure each network, print and write a record."""
    parser = argparse.ArgumentParser(description="Check the emulated networks.")
    parser.add_argument("--conditions", default="none,wired,5g,4g,satellite")
    parser.add_argument("--packets", type=int, default=5000, help="whose round trips and losses count")
    parser.add_argument("--mb", type=float, default=20, help="MB that one TCP connection fetches")
    parser.add_argument("--seed", type=int, default=0)
    add_out_option(parser)
    options = parser.parse_args()
    figures = {}
    for name in options.conditions.split(","):
        figures[name] = measure(CONDITIONS[name], options.packets, int(options.mb * 1e6), options.seed)
        print(name, json.dumps(figures[name]))
    print(write_record(options.out, "emulation", {"figures": figures, "settings": settings_of(options)}))


if __name__ == "__main__":
    main()
