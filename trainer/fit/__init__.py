"""A whole run: Lightning's trainer, callbacks, interruption, curves.

The only folder of the trainer that starts and ends anything.
"""
