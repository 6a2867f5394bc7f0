"""Client-server decoding: an engine that batches sessions, its HTTP and gRPC servers, and a client that drafts.

The client holds a drafter and the frozen weights of a target, never the target. Nothing here prints or reads a store.
"""
