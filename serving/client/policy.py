"""Chooses how tokens come: by the server's own decoding, or by drafts of the client.

Times: R a round trip, T1 a plain step of the target, Tv a call that verifies a chain, Td drafting one token. A chain of
d drafts, each accepted with probability alpha, gives tau = (1 - alpha^(d+1)) / (1 - alpha) tokens, and a token takes

    stream    T1                                 the server decodes plainly and streams; R is paid once
    server    (Tv + drafts of the server) / tau  it drafts itself, and streams
    sync      (R + Tv + d Td) / tau              the client drafts and waits
    ahead     (R + Tv + d Td (1 - q)) / tau      it drafts on while it waits; q, how often that was of use, is
                                                 alpha^(d+1): all accepted, and the next token guessed

What the first two take depends on the server and is measured; the last two are foretold from what costs nothing: the
round trip of pings, the server's own times, and chains that the client drafts now and then while it streams, which are
compared with what comes. A mode that is foretold to be faster is tried, and what was foretold wrongly is corrected by
what was measured.

Trials are paid from a credit in seconds: a share of all time goes in, and whatever a trial takes longer than the best
mode that is known would have. Where it is spent, that mode is used until there is credit again, so that no network,
target or drafter makes it slower than streaming by more than that share.
"""

from dataclasses import dataclass, field

from .events import Mode
from .session import ChainShape

_RUNS: tuple[Mode, ...] = ("server", "stream")
_TRIAL_COMMITS = 6
"""Commits of a trial, at least. A chain's length scatters by about its mean, so that six tell 40 % from nothing."""
_TRIAL_DEVIATIONS = 12
"""A trial lasts this many mean deviations of the round trip, so that jitter of its two ends is a tenth of it."""
_BETTER = 0.95
"""Another mode is chosen when a token takes less than this share of the time; more would cost more than 5 %."""
_CHAIN_BETTER = 0.87
"""Drafts of the client are when a token takes less than this share: text that becomes easier or harder between two
measurements makes a tenth of difference."""
_NEAR = 1.25
"""A mode that took up to this many times as long may be measured again."""
_SHARE = 0.015
"""Share of all time that trials may lose."""
_FIRST_CREDIT, _MOST_CREDIT = 6.0, 40.0
"""Credit at first and at most, in plain steps: what one or four trials lose where they lose much."""
_RETRY_COMMITS = 100
"""Commits after which a mode that was slower may be tried again."""
_SLOPE = 0.03
"""What each draft adds to a target call, as a share of a plain step."""
_CHEAPEST_STEP = 2.5
"""How many times less than foretold a plain step may take: where calls are bound by arithmetic, as on a CPU."""
_SERVER_DRAFTS = 10
"""Drafts of a server's chain."""
_MEMORY = 0.98
"""Weight of all earlier observations against a new one: about 50 count."""
_REMEMBERED = 0.2
"""Weight of what was measured of a mode long ago."""
_LONGEST = 24
"""Most drafts of a chain."""


class _Mean:
    """A ratio of two sums in which old terms fade."""

    def __init__(self, memory: float = _MEMORY) -> None:
        self.above = self.below = 0.0
        self._memory = memory

    def add(self, above: float, below: float) -> None:
        self.above = self._memory * self.above + above
        self.below = self._memory * self.below + below

    def fade(self, weight: float) -> None:
        """Let all observations so far count less."""
        self.above, self.below = weight * self.above, weight * self.below

    @property
    def value(self) -> float | None:
        """The ratio; None before there is one."""
        return self.above / self.below if self.below > 0 else None


@dataclass
class _Measured:
    """What a mode took when it was last in use."""

    token_s: _Mean = field(default_factory=_Mean)
    """Seconds a token, by the clock."""
    call_s: _Mean = field(default_factory=_Mean)
    """Seconds of a target call and of waiting for it, as the server says."""
    n_commits: int = 0
    """Commits that were timed, in all."""
    n_since: int = 0
    """Commits of other modes since it was in use."""


class ModePolicy:
    """Measures and chooses; one for all answers of a client.

    Args:
        can_draft: whether the client has a drafter that serves.
        is_drawn: whether tokens are sampled: chains then have a fixed length.

    Attributes:
        mode: the one in use.
        credit_s: seconds that trials may lose.
    """

    def __init__(self, can_draft: bool = True, is_drawn: bool = False) -> None:
        self.mode: Mode = "server"
        self.reason = "the first measurement"
        self.credit_s: float | None = None
        self._modes: tuple[Mode, ...] = (*_RUNS, "sync", "ahead") if can_draft else _RUNS
        self._measured: dict[Mode, _Measured] = {mode: _Measured() for mode in self._modes}
        self._error: dict[Mode, float] = {"sync": 1.0, "ahead": 1.0}  # measured over foretold
        self._is_drawn = is_drawn
        self._most_drafts = _LONGEST
        self._round_trip_s: float | None = None
        self._deviation_s = 0.0
        self._level_s = _Mean()
        self._accepted = _Mean(0.98)
        self._last_s: float | None = None
        self._settles_s = 0.0
        self._switched: tuple[float, int] | None = None  # when, and tokens that came since, until all settled
        self._in_trial = True
        self._n_timed, self._timed_s = 0, 0.0  # commits and seconds since the mode was chosen

    # Measurements

    @property
    def round_trip_s(self) -> float | None:
        """R, smoothed."""
        return self._round_trip_s

    @property
    def verify_s(self) -> float | None:
        """Tv, or the best guess of it."""
        for mode in ("ahead", "sync", "server"):
            if mode in self._measured and (found := self._measured[mode].call_s.value) is not None:
                return found
        plain = self._measured["stream"].call_s.value
        return None if plain is None else plain * (1 + 5 * _SLOPE)

    @property
    def draft_s(self) -> float | None:
        """Td, of one token."""
        return self._level_s.value

    @property
    def acceptance(self) -> float | None:
        """alpha, the share of drafts that are accepted among those whose predecessors are."""
        return self._accepted.value

    def limit_drafts(self, most_drafts: int) -> None:
        """Take the most drafts that the server verifies in a call."""
        self._most_drafts = min(_LONGEST, max(1, most_drafts))

    def observe_round_trip(self, seconds: float) -> None:
        """Take the time from a ping to its answer."""
        if self._round_trip_s is None:
            self._round_trip_s, self._deviation_s = seconds, seconds / 16
        else:
            self._deviation_s += (abs(seconds - self._round_trip_s) - self._deviation_s) / 4
            self._round_trip_s += (seconds - self._round_trip_s) / 8

    def observe_draft(self, seconds: float) -> None:
        """Take the time of drafting one token."""
        self._level_s.add(seconds, 1)

    def observe_chain(self, n_drafts: int, n_agreed: int) -> None:
        """Take how many drafts of a chain, from the first on, the target agreed with."""
        if n_drafts:
            self._accepted.add(n_agreed, n_agreed + (n_agreed < n_drafts))

    def begin(self, now_s: float) -> None:
        """Start to time: a new answer, or the network is there again."""
        self._last_s, self._settles_s, self._switched = None, now_s, None

    def observe_commit(self, now_s: float, n_tokens: int, call_s: float | None) -> None:
        """Take a commit.

        Args:
            now_s: when it arrived.
            n_tokens: that it brought.
            call_s: of the target call, and of waiting for it; None of one that read more than the root and drafts.
        """
        if self._switched is not None:
            self._switched = (self._switched[0], self._switched[1] + n_tokens)
        if now_s < self._settles_s:  # what was decoded in the mode before still arrives
            return
        own = self._measured[self.mode]
        if call_s is not None:
            own.call_s.add(call_s, 1)
        if self._last_s is not None:
            seconds = now_s - self._last_s
            own.token_s.add(seconds, n_tokens)
            own.n_commits += 1
            own.n_since = 0
            self._n_timed += 1
            self._timed_s += seconds
            self._spend(seconds, n_tokens)
        elif self._switched is not None:
            self._spend(now_s - self._switched[0], self._switched[1])
            self._switched = None
        self._last_s = now_s
        for mode, other in self._measured.items():
            other.n_since += mode != self.mode

    def _spend(self, seconds: float, n_tokens: int) -> None:
        """Pay into the credit, and take from it what the mode in use takes more than the best other one."""
        call_s = self.verify_s
        if call_s is None:
            return
        if self.credit_s is None:
            self.credit_s = _FIRST_CREDIT * call_s
        self.credit_s += _SHARE * seconds
        if (self._in_trial or _is_chain(self.mode)) and (best := self._reference_s()) is not None:
            self.credit_s += n_tokens * best - seconds
        self.credit_s = min(self.credit_s, _MOST_CREDIT * call_s)

    # The choice

    def shape(self) -> ChainShape:
        """The chains that pay: another level is drafted while it promises tokens faster than the mode gives them."""
        depth = 5 if self._is_drawn else 10
        level_s, verify_s, round_trip_s = self.draft_s, self.verify_s, self._round_trip_s
        alpha = self.acceptance
        if level_s is None or verify_s is None or round_trip_s is None or alpha is None:
            return ChainShape(min(depth, self._most_drafts), 0.0 if self._is_drawn else 0.2)
        level_s += _SLOPE * verify_s
        fixed_s = round_trip_s + verify_s

        def rate(depth: int) -> float:
            return _tau(alpha, depth) / (fixed_s + depth * level_s)

        best = max(range(1, self._most_drafts + 1), key=rate)
        if self._is_drawn:
            return ChainShape(best)
        # A chain that the drafter is sure of may be longer than the best of fixed length.
        return ChainShape(min(2 * best, self._most_drafts), min(0.5, max(0.02, level_s * rate(best))))

    def token_s(self, mode: Mode) -> float | None:
        """Seconds a token in a mode, measured or foretold; None where nothing is known."""
        # Drafts of the client depend on a network that has changed since; what else was wrong is in the error.
        if self._measured[mode].n_commits >= 3 and (mode == self.mode or not _is_chain(mode)):
            return self._measured[mode].token_s.value
        foretold = self._foretold_s(mode)
        return None if foretold is None else foretold * self._error.get(mode, 1.0)

    def choose(self, now_s: float, can_draft: bool = True) -> Mode:
        """Decide how tokens come from now on; :attr:`reason` says why.

        Args:
            can_draft: whether the drafter has what it needs just now; else no mode in which it drafts is begun.
        """
        credit_s = self.credit_s or 0.0
        modes = [mode for mode in self._modes if can_draft or mode in (*_RUNS, self.mode)]
        known = {mode: found for mode in modes if (found := self.token_s(mode)) is not None}
        measured = {mode: known[mode] for mode in known if self._measured[mode].n_commits and mode != self.mode}
        if credit_s < 0 and measured and (self._in_trial or _is_chain(self.mode)):
            best = min(measured, key=lambda mode: measured[mode])
            if self.mode not in known or known[best] < known[self.mode]:
                self._learn()
                return self._enter(best, now_s, f"{self.mode} is slower than {best}")
        if self._in_trial:
            is_short = self._timed_s < _TRIAL_DEVIATIONS * self._deviation_s and self._n_timed < 8 * _TRIAL_COMMITS
            if self._n_timed < _TRIAL_COMMITS or is_short:
                return self.mode
            self._in_trial = False
        self._learn()
        if (current := known.get(self.mode)) is None:
            return self.mode
        for mode in sorted(known, key=lambda mode: known[mode]):
            own, gain = self._measured[mode], known[mode] / current
            if mode == self.mode:
                continue
            threshold = _CHAIN_BETTER if _is_chain(mode) and not _is_chain(self.mode) else _BETTER
            if own.n_commits and gain < threshold:
                return self._enter(mode, now_s, self._compare(mode, known, "was measured"))
            if self._risk_s(mode, known[mode], current) >= credit_s:
                continue
            if not own.n_commits and gain < threshold:
                return self._enter(mode, now_s, self._compare(mode, known, "is foretold"))
            if own.n_commits and own.n_since >= _RETRY_COMMITS and gain < _NEAR:
                return self._enter(mode, now_s, f"{mode} is measured again")
            if mode == "stream" and not own.n_commits and known[mode] / _CHEAPEST_STEP < current * _BETTER:
                return self._enter(mode, now_s, "a plain step is measured")
        return self.mode

    def _risk_s(self, mode: Mode, token_s: float, current: float) -> float:
        """Seconds that a trial is likely to lose: on the way there and back, and in it, were it a fifth slower."""
        round_trip_s = self._round_trip_s or 0.0
        n_tokens = 1.0 if mode == "stream" else 3.0
        in_trial_s = max(_TRIAL_COMMITS * n_tokens * token_s, _TRIAL_DEVIATIONS * self._deviation_s)
        slower = max(1.2 - current / token_s, 0.2) if token_s > current else 0.2
        if _is_chain(mode) != _is_chain(self.mode):
            return 2 * round_trip_s + slower * in_trial_s
        if mode == "stream" and not self._measured[mode].n_commits and self.verify_s is not None:
            slower = max(0.0, 1 - current / self.verify_s)  # a plain step takes less than a call with drafts
        return slower * (2 * round_trip_s + in_trial_s)

    def _enter(self, mode: Mode, now_s: float, reason: str) -> Mode:
        self.mode, self.reason, self._in_trial = mode, reason, True
        self._n_timed, self._timed_s = 0, 0.0
        own = self._measured[mode]
        if own.n_since >= _RETRY_COMMITS:
            own.token_s.fade(_REMEMBERED)
            own.call_s.fade(_REMEMBERED)
        self._last_s, self._switched = None, (now_s, 0)
        # A run that goes on in another mode still brings what was decoded before, for a round trip.
        self._settles_s = now_s if _is_chain(mode) else now_s + 1.5 * (self._round_trip_s or 0.0)
        return mode

    def _learn(self) -> None:
        """Correct what is foretold of the mode in use."""
        if _is_chain(self.mode):
            measured, foretold = self._measured[self.mode].token_s.value, self._foretold_s(self.mode)
            if measured and foretold and self._n_timed >= _TRIAL_COMMITS:
                self._error["sync"] = self._error["ahead"] = min(2.0, max(0.5, measured / foretold))

    def _foretold_s(self, mode: Mode) -> float | None:
        """Seconds a token in a mode that has not been measured."""
        alpha, level_s, verify_s, round_trip_s = self.acceptance, self.draft_s, self.verify_s, self._round_trip_s
        if verify_s is None:
            return None
        if not _is_chain(mode):
            return verify_s / (1 + _SLOPE * _SERVER_DRAFTS) if mode == "stream" else verify_s
        if alpha is None or level_s is None or round_trip_s is None:
            return None
        depth = self.shape().depth if self._is_drawn else max(1, self.shape().depth // 2)
        chain_s = depth * level_s
        if mode == "ahead":
            # A level that is being drafted when the answer comes delays it by half of its time.
            chain_s = chain_s * (1 - alpha ** (depth + 1)) + level_s / 2
        return (round_trip_s + verify_s * (1 + _SLOPE * depth) + chain_s) / _tau(alpha, depth)

    def _reference_s(self) -> float | None:
        """Seconds a token of the best of the server's modes that was measured."""
        found = [self.token_s(mode) for mode in _RUNS if self._measured[mode].n_commits]
        return min((each for each in found if each is not None), default=None)

    def _compare(self, mode: Mode, known: dict[Mode, float], told: str) -> str:
        return f"{mode} {told} at {1 / known[mode]:.0f} tokens/s, {self.mode} gives {1 / known[self.mode]:.0f}"


def _is_chain(mode: Mode) -> bool:
    """Whether the client drafts."""
    return mode in ("sync", "ahead")


def _tau(alpha: float, depth: int) -> float:
    """Tokens that a chain of d drafts gives on average, the target's own behind them included."""
    alpha = min(alpha, 0.999)
    return float((1 - alpha ** (depth + 1)) / (1 - alpha))
