"""The target's forward passes over parts, the captured activations, and the codec's calibration.

``pipeline/plan.py`` plans the parts, and ``storage/write`` commits them.
"""
