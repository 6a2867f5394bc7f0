"""The command serve."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import Interrupted
from ..serving.server.config import ServeConfig
from .console import out, tell
from .options import StageCommand, config_options

if TYPE_CHECKING:
    from ..moa.drafters.base import Drafter
    from ..moa.targets.live import Target
    from ..serving.server.run import Drafting, Ended, Listening
    from ..serving.server.service import Service


@click.command(cls=StageCommand)
@config_options(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve a target over OpenAI's API, and to clients that draft for themselves.

    Texts of all clients share target calls, as many as come. With --drafter each answer is drafted while that pays;
    it is the same text, token for token, as without. Programs that speak OpenAI's API need another base URL only:
    http://HOST:PORT/v1. There are /v1/chat/completions, /v1/completions and /v1/models; /health and /metrics
    (Prometheus). A request chooses a drafter with "drafter": "NAME", or "none". Clients that hold the drafter come
    over gRPC instead (moa.v1 in serving/protocol).

    Each request is one JSON line on standard error. Ctrl-C and SIGTERM let answers that have begun end first
    (--set grace_s=S), a second one does not.

    \b
    Examples:
      moa-data serve --model ./llama3-8b --drafter runs/moa
      moa-data serve --model ./llama3-8b --host 0.0.0.0 --token-file tokens.txt \\
        --tls-cert cert.pem --tls-key key.pem --kv-tokens 65536
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "llama3-8b", "messages": [{"role": "user", "content": "Hi"}], "stream": true}'
    """
    import asyncio

    from ..serving.server.run import ServerRun, check_tls, raise_file_limit

    listening = _listening(config)
    if listening.tls is not None:
        check_tls(*listening.tls)  # before a model is loaded
    service = _service(config)
    drafting = None if config.grpc_port is None else _drafting(config, config.grpc_port, service)
    _log_json_lines()
    raise_file_limit()

    def on_ready(http: str, grpc: str | None) -> None:
        drafters = ", ".join(service.engine.drafters) or "none"
        other = f" and gRPC {grpc}" if grpc else ""
        out.print(f"serving {service.model_name} on {http}/v1{other} (drafters: {drafters})", highlight=False)
        sys.stdout.flush()

    async def run() -> "Ended":
        return await ServerRun(service, listening, on_ready, drafting).serve()

    ended = asyncio.run(run())
    rest = f"{ended.n_broken_off} answers were broken off" if ended.n_broken_off else "all answers had ended"
    if ended.signum is not None:
        raise Interrupted(f"stopped; {rest}.", ended.signum)
    tell(f"stopped; {rest}.")


def _listening(config: ServeConfig) -> "Listening":
    from ..serving.server.run import Listening

    tls = None
    if config.tls_cert and config.tls_key:
        tls = Path(config.tls_cert).expanduser(), Path(config.tls_key).expanduser()
    connections = config.limits.build_connections()
    return Listening(config.host, config.port, tls, config.grace_s, connections, config.allowed_host)


def _service(config: ServeConfig) -> "Service":
    """Load target and drafters, and make what answers requests."""
    import torch

    from ..moa.targets.chat_tokens import check_template
    from ..moa.targets.live import Target
    from ..moa.targets.template import choose_template_arguments
    from ..serving.engine.engine import Engine
    from ..serving.server.access import BearerTokens
    from ..serving.server.service import Service

    tokens = BearerTokens.load(config.token_file) if config.token_file else BearerTokens()
    target = Target.load(config.model, getattr(torch, config.dtype), config.device, config.revision)
    drafters = _drafters(config, target)
    recorded = {name: drafter.config.target for name, drafter in drafters.items()}
    arguments = choose_template_arguments(config.template_kwargs, recorded)
    check_template(target.tokenizer, config.model, arguments)
    engine = Engine(target, drafters, config.engine)
    return Service(
        engine, target, config.name or Path(config.model).name, next(iter(drafters), None),
        f"fp_{target.identity.get('weights_sha256', '')[:12]}", tokens, config.limits.build(),
    )  # fmt: skip


def _drafting(config: ServeConfig, port: int, service: "Service") -> "Drafting":
    """Hash what clients compare, and make the settings of the gRPC server."""
    from ..serving.protocol.wire import drafter_identity, target_identity, tokenizer_identity
    from ..serving.server.handshake import Identities
    from ..serving.server.run import Drafting

    target, drafters = service.target, service.engine.drafters
    identities = Identities(
        target_identity(target.identity),
        tokenizer_identity(target.tokenizer),
        {name: drafter_identity(drafter) for name, drafter in drafters.items()},
    )
    return Drafting(identities, config.drafting.build(port))


def _drafters(config: ServeConfig, target: "Target") -> "dict[str, Drafter]":
    from ..evaluation.drafters import load_drafters

    loaded = load_drafters(config.drafter, target, target.model.dtype)
    return {name: one.drafter for name, one in loaded.items()}


def _log_json_lines() -> None:
    """Write the server's log to standard error, one JSON object a line."""
    from ..serving.server.request_log import JsonLines

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("moa_data").setLevel(logging.INFO)
