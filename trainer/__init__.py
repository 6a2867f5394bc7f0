"""Training of drafters with Lightning from a store alone."""
