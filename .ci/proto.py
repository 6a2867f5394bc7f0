"""Makes serving/protocol/moa_v1_pb2*.py from moa_v1.proto: `make proto`.

python .ci/proto.py [FOLDER]         writes into FOLDER, by default beside the .proto
"""

import sys
from pathlib import Path

import grpc_tools.protoc

SOURCE = Path(__file__).parents[1] / "serving" / "protocol" / "moa_v1.proto"


def generate(folder: Path) -> list[Path]:
    """Write messages, their types and the service's stubs; returns the files."""
    include, out = f"-I{SOURCE.parent}", str(folder)
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if grpc_tools.protoc.main(["protoc", include, *outputs, str(SOURCE)]):
        sys.exit(f"protoc refused {SOURCE}")
    messages, types, stubs = (folder / f"moa_v1_pb2{end}" for end in (".py", ".pyi", "_grpc.py"))
    # protoc takes the generated module for a top-level one.
    text = stubs.read_text()
    mended = text.replace("\nimport moa_v1_pb2 as", "\nfrom . import moa_v1_pb2 as")
    if mended == text:
        sys.exit(f"{stubs.name} no longer imports moa_v1_pb2 as expected; mend .ci/proto.py")
    stubs.write_text(mended)
    return [messages, types, stubs]


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE.parent):
        sys.stdout.write(f"{path}\n")
