"""Settings of `moa-data export` and `moa-data import`."""

from typing import Literal

from typing_extensions import override

from ...config import Config, Count, Natural

Format = Literal["speculators", "specforge", "eagle"]
ExportFormat = Literal["speculators", "specforge", "eagle", "index"]


class ExportConfig(Config):
    """Settings of `moa-data export`: which store to write in which layout, and where to."""

    store: str
    """Folder of the store."""
    format: ExportFormat
    """Layout to write: speculators, specforge (EAGLE-3), eagle (EAGLE v1), or index, one Parquet file of all sequences
    without their activations."""
    out: str
    """Folder to write to, of index the file; the same command run again continues where it stopped."""
    max_sequences: Count | None = None
    """Write only the first sequences of the store; default: all."""
    layers: tuple[int, ...] = ()
    """Decoder layers, from 0, whose outputs go in beside the last one; default: the three that the project takes."""
    kv: bool = False
    """Write keys and values too (speculators only): of the target's last layer with a sliding window, kv_last_local_k
    and _v, and of its last one without, kv_last_global_k and _v, of those that it has."""

    rows_only: bool = False
    """Write the rows of ids and masks alone (speculators only); its trainer reads the states from the store."""

    @override
    def problems(self) -> list[str]:
        rows = ["rows_only is for the format speculators only"] * (
            self.rows_only and self.format != "speculators"
        )
        is_misplaced = self.kv and self.format != "speculators"
        kv = "kv is for the format speculators only, the others have no place for keys and values"
        return _layer_problems(self.format, self.layers) + [kv] * is_misplaced + rows


class ImportConfig(Config):
    """Settings of `moa-data import`: which folder of another project becomes a store, and with which target."""

    folder: str
    """Folder in the layout of the other project."""
    format: Format
    """Layout of the folder: speculators, specforge (EAGLE-3) or eagle (EAGLE v1)."""
    model: str
    """The target the hidden states come from: a folder, a GGUF file, or a hub id."""
    out: str
    """Folder of the store; the same command run again continues where it stopped."""
    max_sequences: Count | None = None
    """Read only the first sequences of the folder; default: all."""
    layers: tuple[int, ...] = ()
    """Decoder layers, from 0, whose outputs the files hold beside the last one; default: the project's three."""
    target_layers: Natural = 0
    """Decoder layers of the target kept in the store for Target Layer Inference."""
    part_tokens: Count = 65_536
    """Tokens per part, the unit of work, resume and loss."""
    target_license: str | None = None
    """Licence of the target, as the Hub names licences, for the store's card; default: left to fill in."""
    dataset_license: str | None = None
    """Licence of the dataset, for the card too; default: left to fill in."""

    @override
    def problems(self) -> list[str]:
        return _layer_problems(self.format, self.layers)


def _layer_problems(name: str, layers: tuple[int, ...]) -> list[str]:
    found = []
    if layers and name in ("eagle", "index"):
        holds = "the last hidden state alone" if name == "eagle" else "no hidden states"
        found.append(f"layers has no meaning for the format {name}, which holds {holds}")
    if len(set(layers)) < len(layers):
        found.append(f"layers repeats a layer: {','.join(map(str, layers))}")
    return found
