"""Chooses how tokens come: by the server's own decoding, or by drafts of the client.

Times: R a round trip, Tv a call that verifies a chain, Td drafting one token. A chain of d drafts, each accepted with
probability alpha, gives tau = (1 - alpha^(d+1)) / (1 - alpha) tokens, and a token takes

    server    (Tv + drafting of the server) / tau   the server drafts, and streams; R is paid once
    sync      (R + Tv + d Td) / tau                 the client drafts and waits
    ahead     (R + Tv + d Td (1 - q)) / tau         it drafts on while it waits; q, how often that was of use, is
                                                    alpha^(d+1): all accepted, and the next token guessed

``server`` is where every answer starts, and costs nothing to measure: the server says how long its calls and drafts
took. It gives way to plain steps by itself where its drafts do not pay, so that the better of the API's two modes is
the server's own business, and the mode ``stream`` is for those who ask for it.

Drafts of the client are foretold from what is free of cost too: the round trip of pings, the server's calls, and chains
that the client drafts now and then while it streams, which are compared with what comes. They are tried only where they
are foretold to be clearly faster, measured by the clock, and given up where they are not. What was foretold wrongly is
corrected, and each failure doubles the time to the next trial, so that trials cost a share that vanishes.
"""

import math

from .events import Mode
from .session import ChainShape

_TRIED_BELOW, _KEPT_BELOW = 0.87, 0.95
"""The client drafts when a token is foretold to take less than the first share of the server's time, and as long as it
is measured to take less than the second. Text that becomes harder or easier makes a tenth of difference."""
_TRIAL_COMMITS = 12
"""Commits after which a mode is judged. A chain's length scatters by about its mean, so that twelve tell a quarter."""
_TRIAL_DEVIATIONS = 12
"""A trial lasts this many mean deviations of the round trip, so that jitter of its two ends is a tenth of it."""
_RETRY_COMMITS = 100
"""Commits after which chains that failed may be tried again, at first, and those that did not are compared again."""
_LEAST_COMPARED = 12
"""Drafts that must have been compared with the target's tokens before anything is foretold of chains; what is foretold
assumes half a standard error less than the share of them that was right."""
_COMPARED_FROM_S, _COMPARED_SHARE = 0.5, 0.02
"""After so many seconds of streams, chains are drafted only to see how good they are, for at most this share of the
time: whoever shares the client's processor waits for them, sometimes the stream itself."""
_SLOPE = 0.03
"""What each draft adds to a target call, as a share of it."""
_LONGEST = 24
"""Most drafts of a chain."""


class _Mean:
    """A ratio of two sums in which old terms fade; about 1 / (1 - memory) observations count."""

    def __init__(self, memory: float) -> None:
        self.above = self.below = 0.0
        self._memory = memory

    def add(self, above: float, below: float = 1.0) -> None:
        self.above = self._memory * self.above + above
        self.below = self._memory * self.below + below

    @property
    def value(self) -> float | None:
        """The ratio; None before there is one."""
        return self.above / self.below if self.below > 0 else None


class ModePolicy:
    """Measures and chooses; one for all answers of a client.

    Args:
        can_draft: whether the client has a drafter that serves.
        is_drawn: whether tokens are sampled: chains then have a fixed length.

    Attributes:
        mode: the one in use.
        reason: why it was chosen.
    """

    def __init__(self, can_draft: bool = True, is_drawn: bool = False) -> None:
        self.mode: Mode = "server"
        self.reason = "every answer starts so"
        self._can_draft, self._is_drawn = can_draft, is_drawn
        self._most_drafts = _LONGEST
        self._round_trip_s: float | None = None
        self._deviation_s = 0.0
        self._call_s, self._level_s, self._accepted = _Mean(0.9), _Mean(0.98), _Mean(0.98)
        self._server_drafting_s, self._server_tokens = _Mean(0.95), _Mean(0.95)  # of a round
        self._streamed_s = self._compared_s = 0.0  # of all streams, and what comparisons took of it
        self._chain_token_s = _Mean(0.95)  # of the present trial, by the clock
        self._error = 1.0  # measured over foretold
        self._last_s: float | None = None
        self._n_commits, self._timed_s = 0, 0.0  # since the mode was chosen
        self._wait = self._retry_after = _TRIAL_COMMITS

    # Measurements

    @property
    def round_trip_s(self) -> float | None:
        """R, smoothed."""
        return self._round_trip_s

    @property
    def verify_s(self) -> float | None:
        """Tv, and what a call waits for others."""
        return self._call_s.value

    @property
    def draft_s(self) -> float | None:
        """Td, of one token."""
        return self._level_s.value

    @property
    def acceptance(self) -> float | None:
        """alpha, the share of drafts that are accepted among those whose predecessors are."""
        return self._accepted.value

    @property
    def wants_comparison(self) -> bool:
        """Whether a chain should be drafted that is only compared with what the server streams."""
        is_early = self._streamed_s < _COMPARED_FROM_S
        return not is_early and self._compared_s <= _COMPARED_SHARE * self._streamed_s

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

    def observe_draft(self, seconds: float, is_compared: bool = False) -> None:
        """Take the time of drafting one token; ``is_compared`` if it is only compared with what the server streams."""
        self._level_s.add(seconds)
        if is_compared:
            self._compared_s += seconds

    def observe_drafts(self, n_drafts: int, n_agreed: int) -> None:
        """Take how many drafts of a chain, from the first on, the target agreed with."""
        if n_drafts:
            self._accepted.add(n_agreed, n_agreed + (n_agreed < n_drafts))

    def begin(self) -> None:
        """Start to time: a new answer, or the network is there again."""
        self._last_s = None

    def observe_streamed(self, n_tokens: int, call_s: float, drafting_s: float) -> None:
        """Take a commit of the server's own decoding.

        Args:
            n_tokens: that it brought.
            call_s: of the target call, and of waiting for it.
            drafting_s: of the server's drafting for it.
        """
        self._call_s.add(call_s)
        self._server_drafting_s.add(drafting_s)
        self._server_tokens.add(n_tokens)
        self._streamed_s += call_s + drafting_s
        if not _is_chain(self.mode):
            self._n_commits += 1

    def observe_chain(self, now_s: float, n_tokens: int, call_s: float) -> None:
        """Take a commit that answers a chain of the client, as :meth:`observe_streamed`; ``now_s`` is its arrival."""
        if call_s > 0:  # the end of a run brings what was decoded before
            self._call_s.add(call_s)
        if _is_chain(self.mode):
            if self._last_s is not None:
                self._chain_token_s.add(now_s - self._last_s, n_tokens)
                self._timed_s += now_s - self._last_s
                self._n_commits += 1
            self._last_s = now_s

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

    def server_token_s(self) -> float | None:
        """Seconds a token of the server's own decoding; None before it was measured."""
        call_s, drafting_s, n_tokens = self._call_s.value, self._server_drafting_s.value, self._server_tokens.value
        if call_s is None or drafting_s is None or not n_tokens:
            return None
        return (call_s + drafting_s) / n_tokens

    def foretold_s(self, mode: Mode) -> float | None:
        """Seconds a token of chains of the client, by the arithmetic above; None while too little is known."""
        alpha, level_s, verify_s, round_trip_s = self.acceptance, self.draft_s, self.verify_s, self._round_trip_s
        n_compared = self._accepted.below
        if alpha is None or level_s is None or verify_s is None or round_trip_s is None or n_compared < _LEAST_COMPARED:
            return None
        alpha = (alpha * n_compared + 1) / (n_compared + 2)  # of a few drafts all may have been right
        alpha -= math.sqrt(alpha * (1 - alpha) / n_compared) / 2
        depth = self.shape().depth if self._is_drawn else max(1, self.shape().depth // 2)
        chain_s = depth * level_s
        if mode == "ahead":
            # A level that is being drafted when the answer comes delays it by half of its time.
            chain_s = chain_s * (1 - alpha ** (depth + 1)) + level_s / 2
        return (round_trip_s + verify_s * (1 + _SLOPE * depth) + chain_s) / _tau(alpha, depth)

    def choose(self, can_draft: bool = True) -> Mode:
        """Decide how tokens come from now on; :attr:`reason` says why.

        Args:
            can_draft: whether the drafter has what it needs just now; else chains are not begun.
        """
        server_s = self.server_token_s()
        if server_s is None:
            return self.mode
        if _is_chain(self.mode):
            return self._judge_chains(server_s)
        if self._n_commits < self._wait or not (can_draft and self._can_draft):
            return self.mode
        found: list[tuple[float, Mode]] = []
        for mode in ("sync", "ahead"):
            if (foretold_s := self.foretold_s(mode)) is not None:
                found.append((foretold_s * self._error, mode))
        if not found or min(found)[0] > _TRIED_BELOW * server_s:
            return self.mode
        best_s, best = min(found)
        reason = f"{best} is foretold at {1 / best_s:.0f} tokens/s, the server gives {1 / server_s:.0f}"
        return self._enter(best, reason)

    def _judge_chains(self, server_s: float) -> Mode:
        """Stay with chains, or go back to the server's own decoding."""
        is_short = self._timed_s < _TRIAL_DEVIATIONS * self._deviation_s and self._n_commits < 8 * _TRIAL_COMMITS
        measured_s, foretold_s = self._chain_token_s.value, self.foretold_s(self.mode)
        if self._n_commits < _TRIAL_COMMITS or is_short or measured_s is None:
            return self.mode
        if foretold_s:
            self._error = min(2.0, max(0.5, measured_s / foretold_s))
        if measured_s > _KEPT_BELOW * server_s:
            if measured_s > server_s:  # else the trial cost nothing, and the next one may be soon
                self._retry_after = max(_RETRY_COMMITS, 2 * self._retry_after)
            self._wait = max(_RETRY_COMMITS, self._retry_after)
            compared = f"{self.mode} gives {1 / measured_s:.0f} tokens/s, the server {1 / server_s:.0f}"
            return self._enter("server", compared)
        if self._n_commits >= _RETRY_COMMITS:
            self._wait = self._retry_after = _TRIAL_COMMITS
            return self._enter("server", "it is measured again")
        return self.mode

    def _enter(self, mode: Mode, reason: str) -> Mode:
        self.mode, self.reason = mode, reason
        self._n_commits, self._timed_s, self._last_s = 0, 0.0, None
        self._chain_token_s = _Mean(0.95)
        return mode


def _is_chain(mode: Mode) -> bool:
    """Whether the client drafts."""
    return mode in ("sync", "ahead")


def _tau(alpha: float, depth: int) -> float:
    """Tokens that a chain of d drafts gives on average, the target's own behind them included."""
    alpha = min(alpha, 0.999)
    return float((1 - alpha ** (depth + 1)) / (1 - alpha))
