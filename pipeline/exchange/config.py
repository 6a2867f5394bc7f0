"""Settings of `moa-data export` and `moa-data import`."""

from typing import Literal

from typing_extensions import override

from ...config import Config, Count, Natural

Format = Literal["speculators", "specforge", "eagle"]
ExportFormat = Literal["speculators", "specforge", "eagle", "index"]


class ExportConfig(Config):
    """Settings of `moa-data export`: the store to read, the layout to write and the output path."""

    store: str
    """The store to export: a folder, or the URL of a store in a bucket."""
    format: ExportFormat
    """Format to write. speculators, specforge (EAGLE-3) and eagle (EAGLE v1): files that these
    projects train from. index: one Parquet file that lists all sequences, without their
    activations."""
    out: str
    """Folder to write, or with --format index the file to write. If the folder is incomplete, the
    same command continues it."""
    max_sequences: Count | None = None
    """Maximum number of sequences to write, from the start of the store. Default: all."""
    layers: tuple[int, ...] = ()
    """Decoder layers whose outputs are written in addition to the last layer's, counted from 0 and
    separated by commas; only with --format speculators or specforge. Default for a target of L
    layers: 1, L / 2 - 1 and L - 4, which EAGLE-3 reads."""
    kv: bool = False
    """Also write the keys and values of two layers; only with --format speculators. The arrays
    kv_last_local_k and kv_last_local_v are from the target's last layer with a sliding window,
    kv_last_global_k and kv_last_global_v from its last layer without one. If the target lacks one
    of these layers, the layer's two arrays are left out."""

    rows_only: bool = False
    """Write only token ids and loss masks, no hidden states; only with --format speculators. The
    trainer of speculators then reads the hidden states from the store, with a command that
    docs/interop.md shows."""

    @override
    def problems(self) -> list[str]:
        problems = _layer_problems(self.format, self.layers)
        if self.kv and self.format != "speculators":
            problems.append(
                "--kv is supported only with --format speculators, because other formats lack keys "
                "and values; leave it out"
            )
        if self.rows_only and self.format != "speculators":
            problems.append("--rows-only is supported only with --format speculators; leave it out")
        return problems


class ImportConfig(Config):
    """Settings of `moa-data import`: the other project's folder, its target, and the new store."""

    folder: str
    """The folder to import, with files in the format of another project."""
    format: Format
    """Format of the folder: speculators, specforge (EAGLE-3) or eagle (EAGLE v1)."""
    model: str
    """The target that the hidden states were computed with: a folder, a GGUF file, or a Hugging
    Face Hub id (OWNER/NAME)."""
    out: str
    """Folder of the new store. If it is incomplete, the same command continues it."""
    max_sequences: Count | None = None
    """Maximum number of sequences to read, from the start of the folder. Default: all."""
    layers: tuple[int, ...] = ()
    """Decoder layers whose outputs the files contain in addition to the last layer's, counted from
    0 and separated by commas; only with --format speculators or specforge. Default for a target of
    L layers: 1, L / 2 - 1 and L - 4, which EAGLE-3 reads."""
    target_layers: Natural = 0
    """Number of the target's last decoder layers whose weights are kept in the store. Only drafters
    with Target Layer Inference need these layers: they run their drafts through them."""
    part_tokens: Count = 65_536
    """Number of tokens in a part. A store is written part by part, so an interruption loses at most
    the part that is being written. Smaller parts lose less, but make more files."""
    target_license: str | None = None
    """Licence of the target, as the Hugging Face Hub names it, for example apache-2.0. It is
    written to the store's card (README.md). Default: a blank to fill in."""
    dataset_license: str | None = None
    """Licence of the dataset, as the Hugging Face Hub names it, for example apache-2.0. It is
    written to the store's card (README.md). Default: a blank to fill in."""

    @override
    def problems(self) -> list[str]:
        return _layer_problems(self.format, self.layers)


def _layer_problems(name: str, layers: tuple[int, ...]) -> list[str]:
    problems = []
    if layers and name in ("eagle", "index"):
        problems.append(
            f"--layers has no meaning with --format {name}, which holds no outputs of chosen "
            "layers; leave it out"
        )
    if len(set(layers)) < len(layers):
        problems.append(
            f"--layers names a layer more than once: {','.join(map(str, layers))}; leave out the "
            "repetition"
        )
    return problems
