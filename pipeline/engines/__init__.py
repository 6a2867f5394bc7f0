"""Other engines than transformers that run the target over sequences and give its activations.

Each gives what ``forwards.capture`` gives; what is stored, and how, is known there and above.
"""
