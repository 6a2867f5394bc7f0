"""Client-server decoding: an engine that batches sequences, HTTP and gRPC servers, and a client.

The client makes drafts itself. It has a drafter and the frozen weights of a target (such as its LM
head), but never the whole target. This package prints nothing and reads no store.
"""
