"""The target: its frozen weights, its live model, its chat template and its KV cache.

Training uses the frozen weights. Extraction and decoding use the live model. Nothing in this
package depends on drafters.
"""
