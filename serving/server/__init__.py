"""The HTTP server, which speaks OpenAI's API, and the gRPC server of ``moa.v1``, both on one engine.

Knows no client; nothing here computes.
"""
