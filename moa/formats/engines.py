"""The kinds of drafters that each inference engine reads, with their format and method name."""

FORMATS: dict[str, dict[str, tuple[str, str]]] = {
    "transformers": {"independent": ("llama", "assistant"), "dflash": ("hf-dflash", "dflash")},
    "vllm": {
        "eagle": ("vllm-eagle", "eagle"), "eagle3": ("eagle3", "eagle3"),
        "dflash": ("dflash", "dflash"), "dspark": ("vllm-dspark", "dspark"),
        "independent": ("llama", "draft_model"),
    },
    "speculators": {kind: (f"speculators-{kind}", kind) for kind in ("eagle3", "dflash", "dspark")},
}  # fmt: skip
"""Engine -> kind of drafter -> (format that the engine reads, the engine's name of the method)."""
WHOLE_BLOCKS = ("dflash",)  # Methods with which an engine always drafts the whole block.
