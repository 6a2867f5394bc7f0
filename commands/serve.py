"""The command ``serve``."""

import logging
import sys
import threading

from ..machine import keep_freed_memory, resident_memory, use_huge_pages
from ..serving.config import ServeConfig
from ..text import counted, format_bytes
from .console import StageFailure, out, tell
from .options import stage_command

_LOG = logging.getLogger(__name__)


@stage_command(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve a target over OpenAI's API, and over gRPC to clients that draft themselves.

    The requests of all clients are processed together in the same target calls (continuous
    batching). With --drafter, the server drafts as long as this makes answers faster. The text of
    the answers stays the same, token for token. Programs that use OpenAI's API need only another
    base URL, http://HOST:PORT/v1. The routes are /v1/chat/completions, /v1/completions, /v1/models,
    /health, and /metrics for Prometheus. A request can select a drafter with "drafter": "NAME", or
    no drafter with "drafter": "none". Clients that run the drafter themselves connect over gRPC
    (moa.v1 in serving/moa_v1.proto), as `moa-data chat` does.

    Each request is logged as one JSON line on standard error. After Ctrl-C or SIGTERM, running
    answers have 30 seconds to finish (--grace-s). A second signal ends them at once.

    \b
    Examples:
      moa-data serve --model ./llama3-8b --drafter runs/moa
      moa-data serve --model ./llama3-8b --host 0.0.0.0 --token-file tokens.txt \\
        --tls-cert cert.pem --tls-key key.pem --kv-tokens 65536
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "llama3-8b", "messages": [{"role": "user", "content": "Hi"}], "stream": true}'
    """
    import asyncio

    from ..moa.formats.checkpoint import load_target_and_drafters
    from ..serving.access import BearerTokens, read_tokens
    from ..serving.engine.engine import Engine
    from ..serving.grpc import Identities
    from ..serving.http import Service
    from ..serving.metrics import JsonLines, bound_repeats
    from ..serving.run import ServerRun, check_tls, raise_file_limit
    from ..serving.wire import drafter_identity, target_identity, tokenizer_identity

    if config.tls is not None:
        # Loading a model can take minutes. So report an unusable certificate before that.
        check_tls(*config.tls)
    tokens = BearerTokens(read_tokens(config.token_file) if config.token_file else ())
    identities = None
    target, drafters = load_target_and_drafters(config, config.drafter)
    engine = Engine(target, drafters, config.engine)
    service = Service(engine, config, tokens)
    if config.grpc_port is not None:
        identities = Identities(
            target_identity(target.identity),
            tokenizer_identity(target.tokenizer),
            {name: drafter_identity(drafter) for name, drafter in drafters.items()},
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(bound_repeats())
    handler.setFormatter(JsonLines())
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("moa_data").setLevel(logging.INFO)
    raise_file_limit()
    keep_freed_memory()

    def settle_memory() -> None:
        use_huge_pages()
        sizes = [resident_memory() - engine.kv_bytes, engine.kv_bytes, engine.working_bytes]
        texts = map(format_bytes, [sum(sizes), *sizes])
        _LOG.info(
            "memory: up to %s will be used. %s are in use after loading, %s are for keys and values, "
            "and up to %s are for target calls and requests.",
            *texts,
        )

    if target.device.type == "cpu":
        # Move the memory of the process to huge pages. This takes seconds, so a background thread
        # does it while requests are already served.
        threading.Thread(target=settle_memory, daemon=True).start()

    def on_ready(http: str, grpc: str | None) -> None:
        names = ", ".join(drafters) or "none"
        other = f" and gRPC {grpc}" if grpc else ""
        out.print(f"serving {service.model_name} on {http}/v1{other} (drafters: {names})")
        sys.stdout.flush()

    run = ServerRun(service, on_ready, identities)
    asyncio.run(run.serve())
    n_broken_off = service.metrics.n_broken_off
    cut = f"It cut off {counted(n_broken_off, 'answer')} before the end."
    tell(f"The server has stopped. {cut if n_broken_off else 'All answers were complete.'}")
    if run.signum is not None:
        raise StageFailure("", 128 + run.signum)
