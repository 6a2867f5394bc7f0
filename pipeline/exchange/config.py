"""Settings of `moa-data export` and `moa-data import`."""

from typing import Literal

from typing_extensions import override

from ...config import Config, Count, Natural

Format = Literal["speculators", "specforge", "eagle"]
ExportFormat = Literal["speculators", "specforge", "eagle", "index"]


class ExportConfig(Config):
    """Settings of `moa-data export`: the store to read, the layout to write and the output path."""

    store: str
    """Folder of the store."""
    format: ExportFormat
    """Layout to write: speculators, specforge (EAGLE-3), eagle (EAGLE v1) or index. The index is a
    single Parquet file of all sequences, without their activations."""
    out: str
    """Folder to write to; for index, the file. The same command, run again, continues where it
    stopped."""
    max_sequences: Count | None = None
    """Write only the first sequences of the store; default: all."""
    layers: tuple[int, ...] = ()
    """Decoder layers, counted from 0, whose outputs are written in addition to the last layer's.
    Default: the project's three."""
    kv: bool = False
    """Also write keys and values (speculators only): kv_last_local_k and _v of the target's last
    layer with a sliding window, and kv_last_global_k and _v of its last layer without one. A kind
    of layer that the target lacks is skipped."""

    rows_only: bool = False
    """Write only the rows of token ids and loss masks (speculators only). The trainer of
    speculators then reads the hidden states from the store."""

    @override
    def problems(self) -> list[str]:
        rows = ["rows_only is for the format speculators only"] * (
            self.rows_only and self.format != "speculators"
        )
        is_misplaced = self.kv and self.format != "speculators"
        kv = "kv is for the format speculators only, the others have no place for keys and values"
        return _layer_problems(self.format, self.layers) + [kv] * is_misplaced + rows


class ImportConfig(Config):
    """Settings of `moa-data import`: the other project's folder, its target, and the new store."""

    folder: str
    """Folder in the layout of the other project."""
    format: Format
    """Layout of the folder: speculators, specforge (EAGLE-3) or eagle (EAGLE v1)."""
    model: str
    """The target that the hidden states come from: a folder, a GGUF file or a hub id."""
    out: str
    """Folder of the store. The same command, run again, continues where it stopped."""
    max_sequences: Count | None = None
    """Read only the first sequences of the folder; default: all."""
    layers: tuple[int, ...] = ()
    """Decoder layers, counted from 0, whose outputs the files hold in addition to the last layer's.
    Default: the project's three."""
    target_layers: Natural = 0
    """Number of the target's decoder layers that the store keeps for Target Layer Inference."""
    part_tokens: Count = 65_536
    """Tokens per part. A part is the unit of work, of resuming and of data loss."""
    target_license: str | None = None
    """Licence of the target for the store's card, by its name on the Hub. Default: a blank to fill
    in."""
    dataset_license: str | None = None
    """Licence of the dataset for the store's card, by its name on the Hub. Default: a blank to fill
    in."""

    @override
    def problems(self) -> list[str]:
        return _layer_problems(self.format, self.layers)


def _layer_problems(name: str, layers: tuple[int, ...]) -> list[str]:
    problems = []
    if layers and name in ("eagle", "index"):
        holds = "the last hidden state alone" if name == "eagle" else "no hidden states"
        problems.append(f"layers has no meaning for the format {name}, which holds {holds}")
    if len(set(layers)) < len(layers):
        problems.append(f"layers repeats a layer: {','.join(map(str, layers))}")
    return problems
