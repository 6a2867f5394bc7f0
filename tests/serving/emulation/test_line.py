"""An emulated line keeps to its rate, delay, jitter and loss, by the clock that it is given."""

import statistics

import pytest

from moa_data.serving.emulation.conditions import CONDITIONS, Direction
from moa_data.serving.emulation.line import Line


def spread_arrivals(direction: Direction, n: int = 4000) -> list[float]:
    """Seconds that each of n packets takes that are sent too far apart to meet."""
    line = Line(direction, seed=3)
    return [line.arrival(float(at), 100) - at for at in range(n)]


def test_delays_have_the_mean_and_the_deviation_asked_for() -> None:
    delays = spread_arrivals(Direction(delay_ms=100, jitter_ms=20))
    assert statistics.mean(delays) == pytest.approx(0.1, rel=0.02)
    assert statistics.stdev(delays) == pytest.approx(0.02, rel=0.05)


def test_delays_are_never_negative() -> None:
    assert min(spread_arrivals(CONDITIONS["5g"].up)) >= 0


def test_packets_keep_their_order() -> None:
    line = Line(Direction(delay_ms=20, jitter_ms=20), seed=1)
    arrivals = [line.arrival(n * 1e-4, 100) for n in range(500)]
    assert arrivals == sorted(arrivals)


def test_the_rate_spaces_packets() -> None:
    line = Line(Direction(rate_bits_s=8e6), seed=0)
    assert [line.arrival(0.0, 1000) for _ in range(3)] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert line.waiting(0.0) == pytest.approx(3e-3)
    assert line.waiting(1.0) == 0


def test_as_many_packets_are_lost_as_asked_for() -> None:
    line = Line(Direction(loss=0.05), seed=2)
    n_lost = sum(line.is_lost() for _ in range(10_000))
    assert 430 < n_lost < 570


def test_a_seed_repeats_delays_and_losses() -> None:
    direction = CONDITIONS["4g"].down
    assert spread_arrivals(direction, 50) == spread_arrivals(direction, 50)


def test_networks_are_those_of_the_paper() -> None:
    assert CONDITIONS["wired"].round_trip_ms == 9
    assert (CONDITIONS["5g"].up.delay_ms, CONDITIONS["5g"].up.jitter_ms, CONDITIONS["5g"].up.loss) == (10, 10, 0.001)
    assert CONDITIONS["4g"].down == Direction(20e6, 21, 19, 0.001)
    assert CONDITIONS["satellite"].round_trip_ms == 100
    assert CONDITIONS["none"].up == Direction()
