"""Records in a demo's folder its settings and the phases that are finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import OptionInvalid
from ..storage.disk.durable import PARTIAL_SUFFIX, write_atomic
from .config import DemoConfig

STATE_FILE = "demo.json"
REPORT_FILE = "report.md"
FIGURES = "figures"
PHASES = ("corpus", "target", "extract", "train", "eval", "serve", "report")


class DemoState:
    """The finished phases of one demo folder, written to `demo.json` after each of them."""

    def __init__(self, folder: Path, settings: dict[str, Any], phases: dict[str, dict[str, Any]]) -> None:
        """Hold the settings and, for each finished phase, `seconds` and what the phase gave."""
        self.folder = folder
        self.settings = settings
        self.phases = phases

    @staticmethod
    def open(config: DemoConfig) -> DemoState:
        """Open or begin a demo folder.

        Raises:
            OptionInvalid: If the folder holds something else, or a demo with other settings; nothing is touched.
        """
        folder = Path(config.out)
        settings = json.loads(json.dumps({name: value for name, value in config.named().items() if name != "out"}))
        file = folder / STATE_FILE
        if not file.is_file():
            if folder.exists() and not folder.is_dir():
                raise OptionInvalid(f"{folder} is a file, expected a folder or nothing; choose another --out")
            if folder.is_dir() and any(entry.name != STATE_FILE + PARTIAL_SUFFIX for entry in folder.iterdir()):
                raise OptionInvalid(
                    f"{folder} is not empty and holds no demo ({STATE_FILE} is missing); choose another --out"
                )
            folder.mkdir(parents=True, exist_ok=True)
            state = DemoState(folder, settings, {})
            state.save()
            return state
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            before, phases = dict(stored["settings"]), dict(stored["phases"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise OptionInvalid(f"{file} cannot be read ({error}); delete {folder} or choose another --out") from error
        changed = [
            f"{name} is {settings.get(name)!r}, was {before.get(name)!r}"
            for name in sorted({*settings, *before})
            if settings.get(name) != before.get(name)
        ]
        if changed:
            raise OptionInvalid(
                f"{folder} holds a demo with other settings: {'; '.join(changed)}. Choose another --out"
            )
        return DemoState(folder, settings, phases)

    def is_done(self, phase: str) -> bool:
        """Say whether a phase is finished."""
        return phase in self.phases

    def finish(self, phase: str, seconds: float, facts: dict[str, Any]) -> None:
        """Record a finished phase, how long it took, and its figures (JSON-ready)."""
        self.phases[phase] = {"seconds": seconds, **facts}
        self.save()

    def facts(self, phase: str) -> dict[str, Any]:
        """Return what `finish` recorded."""
        return self.phases[phase]

    def save(self) -> None:
        """Write `demo.json` atomically."""
        text = json.dumps({"settings": self.settings, "phases": self.phases}, indent=1) + "\n"
        write_atomic(self.folder / STATE_FILE, text.encode())
