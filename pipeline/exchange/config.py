"""Settings of `moa-data export` and `moa-data import`; each field becomes an option."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import OptionInvalid

FORMATS = ("speculators", "specforge", "eagle")


@dataclass(frozen=True)
class ExportConfig:
    """Which store to write in which layout, to where."""

    store: str
    """Folder of the store."""
    format: str
    """Layout to write: speculators, specforge (EAGLE-3) or eagle (EAGLE v1)."""
    out: str
    """Folder to write to; the same command run again goes on where it stopped."""
    max_sequences: int | None = None
    """Write only the first sequences of the store; default: all."""
    layers: tuple[int, ...] = ()
    """Decoder layers, from 0, whose outputs go in beside the last one; default: the three that the project takes."""
    compress: bool = False
    """Gzip each file (specforge only, .ckpt.gz)."""

    def check(self) -> None:
        """Refuse values that cannot be used.

        Raises:
            OptionInvalid: naming all of them.
        """
        found = _problems(self.format, self.layers, {"max_sequences": self.max_sequences})
        if self.compress and self.format != "specforge":
            found.append("compress is for the format specforge only")
        _refuse(found)


@dataclass(frozen=True)
class ImportConfig:
    """Which folder of another project becomes a store, and with which target."""

    folder: str
    """Folder in the layout of the other project."""
    format: str
    """Layout of the folder: speculators, specforge (EAGLE-3) or eagle (EAGLE v1)."""
    model: str
    """The target the hidden states come from: a folder or a hub id."""
    out: str
    """Folder of the store; the same command run again goes on where it stopped."""
    max_sequences: int | None = None
    """Read only the first sequences of the folder; default: all."""
    layers: tuple[int, ...] = ()
    """Decoder layers, from 0, whose outputs the files hold beside the last one; default: the project's three."""
    target_layers: int = 0
    """Decoder layers of the target kept in the store for Target Layer Inference."""
    part_tokens: int = 65_536
    """Tokens per part, the unit of work, resume and loss."""
    target_license: str | None = None
    """Licence of the target, as the Hub names licences, for the store's card; default: left to fill in."""
    dataset_license: str | None = None
    """Licence of the dataset, likewise."""

    def check(self) -> None:
        """Refuse values that cannot be used.

        Raises:
            OptionInvalid: naming all of them.
        """
        found = _problems(
            self.format, self.layers, {"max_sequences": self.max_sequences, "part_tokens": self.part_tokens}
        )
        if self.target_layers < 0:
            found.append(f"target_layers is {self.target_layers}, expected 0 or more")
        _refuse(found)


def _problems(name: str, layers: tuple[int, ...], counts: dict[str, int | None]) -> list[str]:
    found = [
        f"{key} is {value}, expected at least 1" for key, value in counts.items() if value is not None and value < 1
    ]
    if name not in FORMATS:
        found.append(f"format is {name!r}, expected one of {', '.join(FORMATS)}")
    if layers and name == "eagle":
        found.append("layers has no meaning for the format eagle, which holds the last hidden state alone")
    if len(set(layers)) < len(layers):
        found.append(f"layers repeats a layer: {','.join(map(str, layers))}")
    return found


def _refuse(found: list[str]) -> None:
    if found:
        raise OptionInvalid(f"{'; '.join(found)}. Mend the options.")
