"""The recipes for clusters parse, use existing fields, and pass only options that `extract` has."""

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from moa_data.cli import main

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "deploy").glob("*.sbatch"))
JOB = ROOT / "deploy" / "kuberay.yaml"


def check_options(command: str) -> None:
    """Check that a command line has options, and that ``extract`` has all of them."""
    known = main.get_command(click.Context(main), "extract")
    assert known is not None
    given = {word.split("=")[0] for word in shlex.split(command) if word.startswith("--")}
    assert given
    assert given <= {name for parameter in known.params for name in parameter.opts}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_of_slurm_parse_and_extract_knows_their_options(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = re.sub(r"\\\n", " ", script.read_text(encoding="utf-8"))
    (command,) = re.findall(r'moa-data extract "\$@" (.*?)(?: &)?\n', text)
    check_options(command)
    for line in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE):
        assert re.fullmatch(r"--[a-z-]+(=\S+)?", line)
    # SLURM stops reading options at the first command.
    assert "#SBATCH" not in re.sub(r"\A(#.*\n|\n)*", "", text)


def test_the_pods_of_kuberay_fit_together() -> None:
    job = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


def test_the_job_of_kuberay_runs_extract_on_the_ray_that_is_tested() -> None:
    spec = yaml.safe_load(JOB.read_text(encoding="utf-8"))["spec"]
    pinned = re.search(
        r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert pinned is not None
    assert spec["rayClusterSpec"]["rayVersion"] == pinned[1]
    assert spec["entrypoint"].startswith("moa-data extract ")
    check_options(spec["entrypoint"])
    most = int(re.findall(r"--workers (\d+)", spec["entrypoint"])[0])
    # Each pod has one GPU, and each worker uses one GPU.
    assert most == spec["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"]
