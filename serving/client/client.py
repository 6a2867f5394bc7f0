"""The Python client: answers chats with a drafter here and a target on a server.

::

    with DraftingClient("127.0.0.1:8001", "runs/moa", "store/target") as client:
        answer = client.chat([{"role": "user", "content": "Why is the sky blue?"}])
    print(answer.text)
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ...errors import RequestInvalid
from ...moa.decoding.sampling import GREEDY, SamplingConfig, check_seed
from ...moa.targets.chat_tokens import prompt_tokens
from ..detokenizer import Detokenizer
from ..protocol import moa_v1_pb2 as pb
from ..protocol.codecs import check_codec
from ..protocol.identity import drafter_identity, target_identity, tokenizer_identity
from .drafting import DraftingModel, TextDrafter
from .events import Event, Mode, Stats
from .exchange import Exchange, Patience
from .link import Link
from .policy import ModePolicy
from .saved import SavedAnswer
from .session import AnswerSettings, Session

ChosenMode = Literal["auto", "stream", "server", "sync", "ahead"]
"""A mode for all tokens, or ``auto``: the one that measurements say is the fastest."""
MODES: tuple[str, ...] = get_args(ChosenMode)
_SAVE_EVERY_S = 0.2

OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        tokens: of the answer, the end-of-sequence token included where there is one.
        finish: ``stop``, ``length`` or ``deadline``.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    stats: Stats


class DraftingClient:
    """Answers, one at a time; what it has measured of network and server serves the next answer.

    Holds a drafter and the frozen pieces of its target, never the target. Every answer is the one that the target gives
    alone, token for token, whatever the network does meanwhile.

    Args:
        server: ``HOST:PORT`` of the server's gRPC port, or ``https://HOST:PORT`` for TLS.
        drafter: a run of ``moa-data train``, a folder with a drafter, or a loaded one, which clients may share.
        bundle: a store or its folder target/; None for the store that the run was trained from.
        token: the server's bearer token; empty for none.
        ca: file of a certificate authority, for TLS; None for the system's.
        codec: of the drafter's contexts on the wire: bf16, int8 or int4. Changes what is accepted, never the text.
        most_alone: most tokens that are shown without a server.
        alone_below: without a server the client stops where what it drafted is less likely than this to be right.
        session_file: kept up to date with the present answer, for :meth:`resume`; None for none.

    Raises:
        RequestInvalid: an argument cannot be used.
        DrafterError: the drafter cannot be loaded, or drafts beside its target alone.
        TargetError: the bundle cannot be used.
    """

    def __init__(
        self,
        server: str,
        drafter: str | Path | DraftingModel,
        bundle: str | Path | None = None,
        *,
        token: str = "",
        ca: str | Path | None = None,
        mode: ChosenMode = "auto",
        codec: str = "int8",
        most_alone: int = 64,
        alone_below: float = 0.01,
        patience: Patience | None = None,
        session_file: str | Path | None = None,
    ) -> None:
        if mode not in MODES:
            raise RequestInvalid(f"there is no mode {mode!r}; expected one of {', '.join(MODES)}.")
        if most_alone < 0 or not 0 <= alone_below < 1:
            raise RequestInvalid(f"most_alone is {most_alone} and alone_below {alone_below}; give 0 or more, below 1.")
        check_codec(codec)
        self.mode, self.session_file = mode, session_file
        self.model = drafter if isinstance(drafter, DraftingModel) else DraftingModel.load(drafter, bundle)
        self._codec, self._most_alone, self._alone_below = codec, most_alone, alone_below
        self._patience = patience or Patience()
        self._drafter = TextDrafter(self.model)
        self._policies: dict[bool, ModePolicy] = {}  # by whether tokens are sampled
        self._identities = pb.Identities(
            target=target_identity(self.model.drafter.config.target),
            tokenizer=tokenizer_identity(self.model.tokenizer),
            drafter=drafter_identity(self.model.drafter),
        )
        self.link = Link(server, token, ca)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingConfig = GREEDY,
        seed: int = 0,
        on_event: OnEvent | None = None,
    ) -> Answer:
        """Answer a chat.

        Args:
            messages: with ``role`` and ``content``, the last one usually the user's.
            max_new_tokens: most tokens of the answer.
            seed: with the position it decides each sampled token.
            on_event: called with each event, in this thread.

        Raises:
            ServingError: the server refuses it, or cannot be reached.
            TemplateError: the chat template refuses the messages.
            PromptUnusable: a text holds control tokens, or is no text.
        """
        chat: list[Any] = [dict(message) for message in messages]
        tokens = tuple(prompt_tokens(self.model.tokenizer, chat))
        saved = SavedAnswer("", tokens, len(tokens), max_new_tokens, sampling, seed, "", tuple(chat))
        return self._answer(saved, on_event)

    def complete(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingConfig = GREEDY,
        seed: int = 0,
        on_event: OnEvent | None = None,
    ) -> Answer:
        """Go on with a text of token ids, see :meth:`chat`."""
        saved = SavedAnswer("", tuple(tokens), len(tokens), max_new_tokens, sampling, seed)
        return self._answer(saved, on_event)

    def resume(self, saved: SavedAnswer, on_event: OnEvent | None = None) -> Answer:
        """Take up an answer again that another process began; events begin with what it has so far."""
        return self._answer(saved, on_event)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Decode tokens of an answer, without special ones."""
        return self._decode(tokens)

    def cut(self) -> None:
        """Close the connection and make none, as if the network were gone; may be called from any thread."""
        self.link.cut()

    def mend(self) -> None:
        """Connect again; may be called from any thread."""
        self.link.mend()

    def close(self) -> None:
        """End the connection."""
        self.link.close()

    def _answer(self, saved: SavedAnswer, on_event: OnEvent | None) -> Answer:
        if not saved.tokens or saved.max_new_tokens < 1:
            raise RequestInvalid("an answer needs a prompt of at least one token, and room for one; give both.")
        check_seed(saved.seed)
        settings = AnswerSettings(
            saved.max_new_tokens, saved.sampling, saved.seed, self._codec if self._drafter.width else "",
            most_alone=self._most_alone, alone_below=self._alone_below, eos_token_ids=self.model.eos_token_ids,
        )  # fmt: skip
        policy = self._policy(saved.sampling.temperature > 0)
        session = Session(
            saved.tokens, saved.n_prompt, settings, Detokenizer(self._decode), self._identities, saved.session,
            self._drafter.begin(saved.tokens, saved.sampling, saved.seed), policy.mode, policy.shape(),
        )  # fmt: skip
        saver = _Saver(self.session_file, saved)
        exchange = Exchange(
            session, self._drafter, self.link, policy, self._patience, self.mode == "auto", on_event or _ignore,
            saver.note,
        )  # fmt: skip
        try:
            exchange.run()
        finally:
            saver.save(session)
        answer = tuple(session.tokens[session.n_prompt :])
        return Answer(self._decode(answer), answer, session.finish, exchange.stats())

    def _policy(self, is_drawn: bool) -> ModePolicy:
        if is_drawn not in self._policies:
            self._policies[is_drawn] = ModePolicy(is_drawn=is_drawn)
        policy = self._policies[is_drawn]
        if self.mode != "auto":
            fixed: Mode = self.mode
            policy.mode = fixed
        return policy

    def _decode(self, tokens: Sequence[int]) -> str:
        if self.model.tokenizer is None:
            return ""
        return str(self.model.tokenizer.decode(list(tokens), skip_special_tokens=True))


class _Saver:
    """Keeps the file of the present answer up to date, a few times a second."""

    def __init__(self, path: str | Path | None, saved: SavedAnswer) -> None:
        self._path, self._saved, self._last_s = path, saved, 0.0

    def note(self, session: Session) -> None:
        """Save, unless that was done just now."""
        if self._path is not None and time.monotonic() - self._last_s > _SAVE_EVERY_S:
            self.save(session)

    def save(self, session: Session) -> None:
        """Save what is committed."""
        if self._path is not None:
            self._last_s = time.monotonic()
            self._saved.advanced(session.session, session.tokens, session.finish).save(self._path)


def _ignore(event: Event) -> None:
    """Do nothing with an event."""
