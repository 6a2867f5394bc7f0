"""Generates serving/moa_v1_pb2.py and .pyi from moa_v1.proto. `make proto` runs this program.

# Writes into FOLDER. Default: the folder of moa_v1.proto.
python .ci/proto.py [FOLDER]
"""

import sys
from pathlib import Path

import grpc_tools.protoc

SOURCE = Path(__file__).parents[1] / "serving" / "moa_v1.proto"


def generate(folder: Path) -> list[Path]:
    """Write the Python module of the messages and its type stubs. Return the two files."""
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi")]
    if grpc_tools.protoc.main(["protoc", f"-I{SOURCE.parent}", *outputs, str(SOURCE)]):
        sys.exit(f"protoc cannot compile {SOURCE}; its output above says why.")
    return [folder / f"moa_v1_pb2{end}" for end in (".py", ".pyi")]


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE.parent):
        sys.stdout.write(f"{path}\n")
