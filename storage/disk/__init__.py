"""Files as such: bounded reading, durable writing, locks, what cannot be looked at, byte ranges near and far.

Nothing here knows what the files of a store mean.
"""
