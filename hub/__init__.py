"""Stores and drafters to and from the Hugging Face Hub: in parts, resumable, with checked bytes.

Needs the Hub's client but no torch; what a store or a drafter means is known elsewhere.
"""
