"""The files of examples/cluster are accepted by the tools that read them; the Slurm script runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from engines.process.tcp_ports import reserve_port

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"
# KubeRay's CRDs v1, of its commit feeaf72f, without descriptions and without the fields of Pods.
SCHEMAS = Path(__file__).parent / "kuberay"


def strict(schema: Any) -> Any:
    """The same schema, which refuses unknown fields: Kubernetes drops them in silence."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(part) for name, part in schema.items()}
    if isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def documents() -> dict[str, dict[str, Any]]:
    return {path.name: yaml.safe_load(path.read_text()) for path in CLUSTER.glob("*.yaml")}


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]
    cluster: dict[str, Any] = spec.get("rayClusterSpec", spec)
    return cluster


@pytest.mark.parametrize("name", ["ray_cluster.yaml", "ray_job.yaml"])
def test_a_manifest_fits_the_schema_of_kuberay(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = documents()[name]
    schema = strict(json.loads((SCHEMAS / f"{document['kind']}.json").read_text()))
    errors = jsonschema.Draft7Validator(schema).iter_errors(document)
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_the_schema_finds_a_field_that_kuberay_does_not_know() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = documents()["ray_cluster.yaml"]
    document["spec"]["workerGroupSpecs"][0]["replica"] = 2
    schema = strict(json.loads((SCHEMAS / "RayCluster.json").read_text()))
    assert not jsonschema.Draft7Validator(schema).is_valid(document)


@pytest.mark.parametrize("name", ["ray_cluster.yaml", "ray_job.yaml"])
def test_a_cluster_has_a_token_a_known_ray_and_shared_memory_where_engines_run(name: str) -> None:
    cluster = cluster_of(documents()[name])
    assert cluster["authOptions"] == {"mode": "token"}
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    with_engines = cluster.get("workerGroupSpecs") or [cluster["headGroupSpec"]]
    for group in with_engines:
        pod = group["template"]["spec"]
        in_memory = {v["name"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium")}
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"] in in_memory


@pytest.mark.parametrize("tool", ["hadolint", "shellcheck"])
def test_the_tools_for_dockerfiles_and_scripts_find_nothing(tool: str) -> None:
    beside = Path(sys.executable).with_name(tool)
    found = str(beside) if beside.exists() else shutil.which(tool)
    assert found, f"{tool} is in the dev extra"
    paths = CLUSTER.glob("Dockerfile*" if tool == "hadolint" else "*.sh")
    done = subprocess.run([found, *map(str, sorted(paths))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A machine of one node, on which srun runs the command at once.

    Ray's own folder is another one, where no other test finds this cluster: its path is short,
    because sockets are in it.
    """
    (tmp_path / "srun").write_text(
        '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do\n'
        '  case $1 in --overlap) shift;; *) shift 2;; esac\ndone\nexec "$@"\n'
    )
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    with reserve_port("127.0.0.1") as reservation:
        port = reservation.port
    search = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield {
            **os.environ,
            "PATH": search,
            "RAY_TMPDIR": folder,
            "SLURM_JOB_NODELIST": "node",
            "RAY_PORT": str(port),
            "RAY_START_SECONDS": "60",
        }


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("status", [7, pytest.param(0, marks=pytest.mark.chaos)])
def test_the_slurm_script_starts_ray_runs_the_command_and_ends_all(
    slurm: dict[str, str], status: int
) -> None:
    code = f"ray.init(log_to_driver=False); print('nodes', len(ray.nodes())); sys.exit({status})"
    command = [sys.executable, "-c", f"import ray, sys; {code}"]
    done = subprocess.run(
        [CLUSTER / "ray_on_slurm.sh", *command],
        env=slurm,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "nodes 1" in done.stdout
    mine = [
        p
        for p in psutil.process_iter(["cmdline"])
        if slurm["RAY_PORT"] in " ".join(p.info["cmdline"] or [])
    ]
    assert mine == []


@pytest.fixture
def queue(slurm: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """A job of Slurm whose Ray is a process that waits, and whose commands to Slurm are written."""
    programs = {
        "ray": "exec sleep 60",
        "python3": "echo 1",
        "scontrol": f"""case $1 in
  show) [ -z "$SIGNAL_BEFORE" ] || kill -USR1 $PPID; echo node;;
  *) echo "$@" >> {tmp_path}/commands;;
esac""",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return slurm | {"SLURM_JOB_ID": "7", "SIGNAL_BEFORE": "", "COMMAND_END_SECONDS": "2"}


TRAINS = "trap 'echo saved; exit {}' TERM; echo begun; while :; do sleep 0.1; done"


@pytest.mark.parametrize(
    ("command", "is_requeued", "output"),
    [
        pytest.param(TRAINS.format(143), True, ["begun", "saved"], id="ends by the signal"),
        pytest.param(TRAINS.format(0), False, ["begun", "saved"], id="has ended its training"),
        pytest.param(
            "trap '' TERM; echo begun; exec sleep 50",
            True,
            ["begun"],
            id="does not hear the signal",
        ),
    ],
)
def test_the_slurm_script_is_queued_again_before_its_time_ends(
    queue: dict[str, str], tmp_path: Path, command: str, *, is_requeued: bool, output: list[str]
) -> None:
    script: list[str | Path] = [CLUSTER / "ray_on_slurm.sh", "sh", "-c", command]
    with subprocess.Popen(script, env=queue, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline().strip()]
        running.send_signal(signal.SIGUSR1)
        lines += running.stdout.read().split()
        assert running.wait(30) == 0
    assert lines == output
    commands = tmp_path / "commands"
    assert commands.exists() is is_requeued
    assert not is_requeued or commands.read_text() == "requeue 7\n"


def test_a_job_whose_time_ends_before_the_command_begins_is_queued_again(
    queue: dict[str, str], tmp_path: Path
) -> None:
    script: list[str | Path] = [CLUSTER / "ray_on_slurm.sh", "touch", str(tmp_path / "begun")]
    subprocess.run(script, env=queue | {"SIGNAL_BEFORE": "1"}, timeout=30, check=True)
    assert (tmp_path / "commands").read_text() == "requeue 7\n"
    assert not (tmp_path / "begun").exists()


def test_a_command_that_fails_in_time_is_not_queued_again(
    queue: dict[str, str], tmp_path: Path
) -> None:
    script: list[str | Path] = [CLUSTER / "ray_on_slurm.sh", "sh", "-c", "exit 7"]
    assert subprocess.run(script, env=queue, timeout=30).returncode == 7
    assert not (tmp_path / "commands").exists()


def test_the_slurm_script_wants_its_signal_in_the_shell_and_may_be_queued_again() -> None:
    text = (CLUSTER / "ray_on_slurm.sh").read_text()
    options = re.findall(r"^#SBATCH (--\S+)", text, re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@120"} <= set(options)


def test_the_slurm_script_without_a_command_explains_itself() -> None:
    done = subprocess.run([CLUSTER / "ray_on_slurm.sh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr
