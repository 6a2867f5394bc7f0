"""Emulated networks: rate, delay, jitter, loss and cuts between two programs of this machine.

Real packets through TUN devices where namespaces can be made, else a TCP proxy. Knows nothing of what crosses it.
"""
