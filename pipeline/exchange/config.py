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
    """Format to write. speculators, specforge (EAGLE-3) and eagle (EAGLE v1) write files that these
    projects can train from. index writes one Parquet file that lists all sequences, without their
    activations."""
    out: str
    """Folder to write, or with `format=index` the file to write. If the folder is incomplete, the
    same command continues it."""
    max_sequences: Count | None = None
    """Maximum number of sequences to write, from the start of the store. Default: all."""
    layers: tuple[int, ...] = ()
    """Decoder layers whose outputs are written, in addition to the output of the last layer. The
    numbers count from 0 and are separated by commas. Only with `format=speculators` or specforge.
    Change them if your drafter reads other layers. The store must contain the outputs of these
    layers. Default for a target of L layers: 1, L / 2 - 1 and L - 4, which EAGLE-3 reads."""
    kv: bool = False
    """Also write the keys and values of two layers of the target. The arrays kv_last_local_k and
    kv_last_local_v are from its last layer with a sliding window, and the arrays kv_last_global_k
    and kv_last_global_v are from its last layer without one. If the target does not have one of
    these layers, the arrays of this layer are left out. Only with `format=speculators`."""

    rows_only: bool = False
    """Write only token ids and loss masks, without hidden states, so that the export takes little
    disk space. The trainer of speculators then reads the hidden states from the store. The command
    for this is in docs/interop.md. Only with `format=speculators`."""

    @override
    def problems(self) -> list[str]:
        problems = _layer_problems(self.format, self.layers)
        if self.kv and self.format != "speculators":
            problems.append(
                "`kv` is supported only with `format=speculators`, because the other formats do "
                "not contain keys and values; leave it out"
            )
        if self.rows_only and self.format != "speculators":
            problems.append("`rows_only` is supported only with `format=speculators`; leave it out")
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
    """Decoder layers whose outputs the files contain, in addition to the output of the last layer.
    The numbers count from 0 and are separated by commas. Only with `format=speculators` or
    specforge. Default for a target of L layers: 1, L / 2 - 1 and L - 4, which EAGLE-3 reads."""
    target_layers: Natural = 0
    """Number of the target's last decoder layers whose weights are copied into the store, which
    makes it larger. Only drafters with Target Layer Inference need these layers, because they run
    their own output through them."""
    part_tokens: Count = 65_536
    """Number of tokens in a part of the store. An interruption loses at most the part that is being
    written. With smaller parts, less is lost, but the store has more files."""
    target_license: str | None = None
    """Licence of the target, as the Hugging Face Hub names it, for example apache-2.0. It is
    written to the store's card (README.md). Without it, the card has a blank to fill in."""
    dataset_license: str | None = None
    """Licence of the dataset, as the Hugging Face Hub names it, for example apache-2.0. It is
    written to the store's card (README.md). Without it, the card has a blank to fill in."""

    @override
    def problems(self) -> list[str]:
        return _layer_problems(self.format, self.layers)


def _layer_problems(name: str, layers: tuple[int, ...]) -> list[str]:
    problems = []
    if layers and name in ("eagle", "index"):
        problems.append(
            f"`layers` has no effect with `format={name}`, whose files do not contain the outputs "
            "of chosen layers; leave it out"
        )
    if len(set(layers)) < len(layers):
        problems.append(
            f"`layers` is {','.join(map(str, layers))}, but each layer may be listed only once; "
            "leave out the repetition"
        )
    return problems
