"""The checked-in code of the protocol is what protoc makes of the .proto."""

import re
import subprocess
import sys
from pathlib import Path

from moa_data.serving.protocol import moa_v1_pb2

ROOT = Path(__file__).parents[3]
# What depends on the release of grpcio-tools alone.
BANNERS = re.compile(r"^(# Protobuf Python Version: .*|    \d+,)$", re.MULTILINE)


def test_generated_code_is_current(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / ".ci" / "proto.py"), str(tmp_path)]
    subprocess.run(script, check=True, capture_output=True)
    made = sorted(tmp_path.iterdir())
    assert [path.name for path in made] == ["moa_v1_pb2.py", "moa_v1_pb2.pyi"]
    for path in made:
        checked_in = (ROOT / "serving" / "protocol" / path.name).read_text()
        assert BANNERS.sub("", checked_in) == BANNERS.sub("", path.read_text()), f"{path.name} is old: run `make proto`"


def test_messages_are_read_as_they_were_written() -> None:
    message = moa_v1_pb2.ClientMessage(sequence=3, verify=moa_v1_pb2.Verify(start=5, tokens=[7, 8], parents=[-1, 0]))
    again = moa_v1_pb2.ClientMessage.FromString(message.SerializeToString())
    assert again == message
    assert again.WhichOneof("body") == "verify"
    assert message.DESCRIPTOR.full_name == "moa.v1.ClientMessage"
