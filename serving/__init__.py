"""Client-server decoding: an engine that batches sequences, HTTP and gRPC servers, and a client.

The client drafts. It holds a drafter and the frozen weights of a target, never the target itself.
This package prints nothing and reads no store.
"""
