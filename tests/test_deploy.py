"""The files that run the server as a service: commands parse, probes exist, a stop gets the time that it may take."""

import configparser
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from jfi.cli import options

FOLDER = Path(__file__).parents[1] / "examples/deploy"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
DEPLOYMENT, SERVICE = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(FOLDER / "jfi.service")
    return parser["Service"]


def from_dockerfile() -> list[str]:
    return json.loads(re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])


COMMANDS = {
    "Dockerfile": (from_dockerfile(), None),
    "jfi.service": (shlex.split(unit()["ExecStart"]), unit()["TimeoutStopSec"]),
    "kubernetes.yaml": (CONTAINER["command"], POD["terminationGracePeriodSeconds"]),
}


def test_every_file_is_checked():
    assert {path.name for path in FOLDER.iterdir()} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_are_known_and_get_the_time_that_a_stop_may_take(name):
    (program, command, *arguments), seconds = COMMANDS[name]
    assert (Path(program).name, command) == ("jfi", "serve")
    found = options.serve().parse_args(arguments)
    assert found.drain_seconds > 5  # the period of the readiness probe
    if seconds is not None:
        assert int(seconds) > found.drain_seconds + found.body_seconds + found.deadline_ms / 1e3


def test_the_probes_are_paths_of_the_server():
    server, live = map(pytest.importorskip, ("jfi.serving.server.app", "jfi.serving.server.live"))
    known = {
        resource.canonical for resource in server.make_app(SimpleNamespace(state=None), max_batch=1).router.resources()
    }
    (port,) = (one["containerPort"] for one in CONTAINER["ports"])
    assert port == SERVICE["spec"]["ports"][0]["targetPort"] == options.serve().get_default("port")
    probes = {name: CONTAINER[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startup": "/health/live",
        "liveness": "/health/live",
        "readiness": "/health/ready",
    }
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {port}
    assert {"/health/live", "/health/ready"} <= known and f"http://127.0.0.1:{port}/health/live" in DOCKERFILE
    assert probes["readiness"]["timeoutSeconds"] > live.PROBE_SECONDS


def test_the_image_has_the_torch_that_is_tested_and_copies_what_it_installs():
    makefile = (FOLDER.parents[1] / "Makefile").read_text()
    assert re.search(r"torch==[\d.]+", DOCKERFILE)[0] in makefile
    copied = re.findall(r"^COPY (.*) /", DOCKERFILE, re.MULTILINE)
    files = {name for line in copied for name in line.split()}
    assert all((FOLDER.parents[1] / name).exists() for name in files) and files >= {"jfi", "configs", "pyproject.toml"}
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"]
