"""What crosses the wire between a drafting client and the server: messages of ``moa.v1`` and codecs of contexts.

Knows neither the engine nor the client.
"""
