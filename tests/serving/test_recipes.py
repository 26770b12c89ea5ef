"""Recipes: every command parses, every file loads, and the fits quoted are those of the plan."""

import json
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

from serving.config import parse_options
from sharding.plan import main as plan

RECIPES = pathlib.Path(__file__).parents[2] / "serving" / "recipes"
README = (RECIPES / "README.md").read_text()
MANIFEST = RECIPES / "kubernetes-leaderworkerset.yaml"
SERVER = "python -m serving.main"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    """Command lines of the README; a backslash continues one."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line]


def options(line):
    """What follows the module, as a shell would cut it."""
    return shlex.split(line.split(SERVER, 1)[1])


def devices(parsed):
    """Devices that a server's partition uses."""
    partition = parsed.engine.partition
    return len(partition.pipeline_stages or (0,)) * partition.tensor_parallel_size


def entrypoint():
    line = re.search(r"^ENTRYPOINT (.*)$", (RECIPES / "Dockerfile").read_text(), re.MULTILINE)
    return json.loads(line[1])


def containers():
    """Containers of the manifest, the leader's first."""
    group, _ = yaml.safe_load_all(MANIFEST.read_text())
    templates = group["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        yield templates[name]["spec"]["containers"][0], templates


def test_commands_of_servers_parse():
    lines = [line for line in commands() if SERVER in line]
    found = [parse_options(options(line)) for line in lines]
    assert len(found) == 4
    assert [o.processes.index for o in found if o.processes] == [0, 1]
    assert all("XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in line for line in lines)
    assert all(o.model.name == "DeepSeek-V4.1-Flash" for o in found)


def test_the_container_serves_what_docker_run_asks_for():
    [run] = [line for line in commands() if line.startswith("docker run")]
    assert entrypoint()[:3] == SERVER.split()
    asked = run.split(" dsv41-jax ", 1)[1]
    parsed = parse_options([*entrypoint()[3:], *shlex.split(asked)])
    assert parsed.server.host == "0.0.0.0"
    stop = int(re.search(r"--stop-timeout (\d+)", run)[1])
    assert stop >= parsed.server.shutdown_timeout + 10


def test_the_manifest_asks_for_one_server_of_two_hosts():
    server, other = containers()
    for container, templates in (server, other):
        parsed = parse_options([*entrypoint()[3:], *container["args"]])
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert parsed.processes is not None
        assert templates["size"] * gpus == devices(parsed)
        grace = templates["workerTemplate"]["spec"]["terminationGracePeriodSeconds"]
        assert grace >= parsed.server.shutdown_timeout + 10
    assert server[0]["args"] == other[0]["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[0][probe]["httpGet"]["path"] == "/health"
    assert {mount["mountPath"] for mount in server[0]["volumeMounts"]} >= {"/dev/shm", "/cache"}


def test_the_slurm_script_is_a_script_and_its_server_parses():
    script = RECIPES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    [line] = [line for line in text.splitlines() if SERVER in line]
    parsed = parse_options(options(line))
    nodes, gpus = (
        int(re.search(rf"--{name}=(\d+)", text)[1]) for name in ("nodes", "gpus-per-node")
    )
    assert nodes * gpus == devices(parsed)
    assert parsed.processes is not None and parsed.server.shutdown_timeout < 30


@pytest.mark.parametrize("line", [c for c in commands() if "sharding.plan" in c])
def test_the_plan_says_what_is_quoted(line, capsys):
    assert plan(shlex.split(line)[3:]) == 0
    printed = capsys.readouterr().out.splitlines()
    kind = re.search(r"--devices \d+x(\S+)", line)[1]
    verdict = next(text for text in printed if text.startswith("Devices: "))
    assert verdict.endswith("fits") and f" {kind} " in verdict
    quoted = [text.splitlines() for text in blocks("text")]
    near = [pytest.approx(total, rel=0.05) for total in totals(printed)]
    assert any(verdict in lines and totals(lines) == near for lines in quoted), (verdict, near)


def totals(lines):
    """GiB by stage; estimates among them may change a little."""
    [line] = [line for line in lines if line.startswith("  total")]
    return [float(number) for number in line.split()[1:]]


def test_no_recipe_names_a_registry():
    for path in RECIPES.iterdir():
        images = re.findall(r"(?:^FROM|image:)\s+(\S+)", path.read_text(), re.MULTILINE)
        assert not [image for image in images if "/" in image], path
