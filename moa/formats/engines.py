"""The kinds of drafters that each inference engine supports, and how the engine names them."""

FORMATS: dict[str, dict[str, tuple[str, str]]] = {
    "transformers": {"independent": ("llama", "assistant"), "dflash": ("hf-dflash", "dflash")},
    "vllm": {
        "eagle": ("vllm-eagle", "eagle"), "eagle3": ("eagle3", "eagle3"),
        "dflash": ("dflash", "dflash"), "dspark": ("vllm-dspark", "dspark"),
        "independent": ("llama", "draft_model"),
    },
    "speculators": {kind: (f"speculators-{kind}", kind) for kind in ("eagle3", "dflash", "dspark")},
}  # fmt: skip
"""Engine -> kind of drafter -> (format that the engine reads, name of the method in the engine)."""

# Names of methods that always draft a whole block. With such a method, an engine ignores the number
# of drafts in its settings.
WHOLE_BLOCKS = ("dflash",)
