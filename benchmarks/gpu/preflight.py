"""Reports why a part of `gpu.sh` cannot run on this machine, and lists the wheels to bring along.

# Exit status 1 and a line for each part that cannot run:
python -m benchmarks.gpu.preflight decode [train]
# NAME==VERSION of each package that is needed in addition to torch and transformers:
python -m benchmarks.gpu.preflight --wheels [PART]
"""

import argparse
import contextlib
import importlib
import importlib.metadata as metadata
import importlib.util
import re
import sys
from collections.abc import Iterable

_TESTS = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}
_DECODE = {"pydantic": "pydantic", "click": "click", "rich": "rich", **_TESTS}
_TRAIN = {
    "zarr": "zarr", "numcodecs": "numcodecs", "zstandard": "zstandard",
    "google_crc32c": "google-crc32c", "array_api_compat": "array-api-compat", "pyarrow": "pyarrow",
    "lightning": "lightning", "matplotlib": "matplotlib",
}  # fmt: skip
NEEDS: dict[str, dict[str, str]] = {"decode": _DECODE, "train": _DECODE | _TRAIN}
"""Maps each part of `gpu.sh` to the modules that it needs, and each module to its distribution.

torch, transformers and their requirements are left out.
"""
STEPS = {
    "decode": (
        "benchmarks.decoding.decode",
        "benchmarks.decoding.sampling",
        "moa_data.serving.engine.engine",
    ),
    "train": (
        "benchmarks.training.train_step",
        "benchmarks.store.extract",
        "benchmarks.codecs.codec_speed",
    ),
}


def problem(part: str) -> str | None:
    """Return the reason why a part cannot run, or None if it can."""
    missing = [
        name for module, name in NEEDS[part].items() if importlib.util.find_spec(module) is None
    ]
    if missing:
        return (
            f"needs {', '.join(missing)}, which is not installed; `python -m "
            f"benchmarks.gpu.preflight --wheels {part}` lists the packages to install"
        )
    try:
        for module in STEPS[part]:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  # Another version of a library can raise anything.
        versions = ", ".join(
            f"{name} {metadata.version(name)}" for name in ("torch", "transformers")
        )
        return (
            f"does not run under {versions} ({type(error).__name__}: {str(error).splitlines()[0]})"
        )
    return None


def requirements(name: str) -> list[str]:
    """List the requirements of an installed distribution.

    Extras are left out, and requirements that are not installed are included.
    """
    with contextlib.suppress(metadata.PackageNotFoundError):
        lines = [line for line in metadata.requires(name) or () if "extra ==" not in line]
        return [
            re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line, maxsplit=1)[0]).lower()
            for line in lines
        ]
    return []


def closure(names: Iterable[str]) -> dict[str, str]:
    """Map distributions and all their requirements to the installed versions."""
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        if (name := waiting.pop()) not in found:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
                waiting += requirements(name)
    return found


def wheels(parts: Iterable[str]) -> list[str]:
    """List the packages that parts need in addition to torch, transformers and their requirements.

    The versions are those that are installed here.
    """
    # The indirect requirements of transformers change between releases. So list them, although the
    # other machine may have them already.
    given = {*closure(["torch"]), "transformers", *requirements("transformers")}
    needed = closure(name for part in parts for name in NEEDS[part].values())
    return [f"{name}=={version}" for name, version in sorted(needed.items()) if name not in given]


def main() -> int:
    """Check parts, or list wheels."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=" or ".join(NEEDS))
    parser.add_argument(
        "--wheels",
        action="store_true",
        help="list the packages that the parts need besides torch, transformers and their "
        "requirements, and exit",
    )
    options = parser.parse_args()
    parts = options.parts or list(NEEDS)
    if unknown := set(parts) - set(NEEDS):
        parser.error(f"unknown part {', '.join(unknown)}; the parts are {' and '.join(NEEDS)}")
    if options.wheels:
        print("\n".join(wheels(parts)))
        return 0
    problems = {part: found for part in parts if (found := problem(part))}
    for part, found in problems.items():
        print(f"{part} {found}", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
