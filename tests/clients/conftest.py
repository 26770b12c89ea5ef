"""A server of the tiny model, and a virtual environment for each client."""

import os
import pathlib
import re
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CONTEXT = 2048


def pytest_collection_modifyitems(items):
    """Clients are installed and run on demand only."""
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.full)
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def server_url(tmp_path_factory):
    """Address of the server, which serves the model `tiny`."""
    log = tmp_path_factory.mktemp("server") / "stderr"
    command = [sys.executable, "-m", "serving.main", "--port", "0", "--served-model-name", "tiny"]
    command += ["--max-model-len", str(CONTEXT)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        for line in process.stdout:
            ready = re.match(r"ready: (\S+) serves", line)
            if ready:
                yield ready[1]
                break
        else:
            raise RuntimeError(log.read_text())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="session")
def environments(tmp_path_factory):
    """Where the clients' environments are kept; `DSV41_CLIENT_ENVIRONMENTS` keeps them longer."""
    kept = os.environ.get("DSV41_CLIENT_ENVIRONMENTS")
    return pathlib.Path(kept) if kept else tmp_path_factory.mktemp("environments")


@pytest.fixture(scope="session")
def install(environments):
    """Makes an environment with some packages, if it is not there; returns its commands' folder."""

    def install(name, *packages):
        folder = environments / name
        done = folder / "installed"
        if not done.exists():
            venv.create(folder, with_pip=True, clear=True)
            pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
            for package in packages:  # in order: the first ones choose the versions
                subprocess.run([*pip, package], check=True)
            done.write_text("\n".join(packages))
        return folder / "bin"

    return install


@pytest.fixture
def run(server_url, tmp_path):
    """Runs a command and returns what it printed; nothing is fetched from outside."""

    def run(*command, cwd=tmp_path):
        offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=os.environ | offline | {"OPENAI_API_KEY": "anything", "HF_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    return run
