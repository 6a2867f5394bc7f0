"""Which engine reads which drafter, in which format and by which name of its own."""

FORMATS: dict[str, dict[str, tuple[str, str]]] = {
    "transformers": {"independent": ("llama", "assistant"), "dflash": ("hf-dflash", "dflash")},
    "vllm": {
        "eagle": ("vllm-eagle", "eagle"), "eagle3": ("eagle3", "eagle3"), "dflash": ("dflash", "dflash"),
        "dspark": ("vllm-dspark", "dspark"), "independent": ("llama", "draft_model"),
    },
    "speculators": {kind: (f"speculators-{kind}", kind) for kind in ("eagle3", "dflash", "dspark")},
}  # fmt: skip
"""Engine -> kind of drafter -> the format that it reads, and its method."""
WHOLE_BLOCKS = ("dflash",)  # methods with which an engine drafts all of a block
