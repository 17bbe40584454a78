#!/usr/bin/env python3
"""Writes the Kubernetes manifest of a run: a JobSet, and a ConfigMap with its resolved config.

    scripts/k8s/render.py configs/digits.yaml --image registry.example/digits:1 --nodes 4 \
        --claim runs | kubectl apply -f -

The image has ftrain on its PATH and the trainer in its working directory; the claim is a
ReadWriteMany volume, mounted at /runs. Needs the Python that ftrain is installed in.
"""

from __future__ import annotations

import argparse
import math
import re
import string
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from ftrain.config import Config, load_config
from ftrain.errors import ConfigError

TEMPLATE = Path(__file__).with_name("jobset.yaml")
MOUNT = "/runs"
NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"
LONGEST = 63  # of a name in DNS
MARGIN_S = 10  # after grace_s, for the container itself to end


def main(argv: list[str] | None = None) -> int:
    """Prints the manifest; 2 if it cannot be made."""
    arguments = _parser().parse_args(argv)
    try:
        sys.stdout.write(render(arguments))
        return 0
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--image", required=True, help="with ftrain and the trainer in it")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="pods")
    parser.add_argument("--claim", required=True, help="PersistentVolumeClaim, ReadWriteMany")
    parser.add_argument("--name", help="of the JobSet; default: that of the config's file")
    parser.add_argument("--set", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--run-dir", metavar="DIR", help=f"default: {MOUNT}/NAME; below {MOUNT}")
    parser.add_argument("--cpu", help="a pod's; default: one a worker and one more")
    parser.add_argument("--memory", default="8Gi", help="a pod's; default: 8Gi")
    parser.add_argument("--shared-memory", default="2Gi", help="of that memory; default: 2Gi")
    return parser


def render(arguments: argparse.Namespace) -> str:
    """The manifest as YAML.

    Raises:
      ConfigError: the config or an argument cannot be used.
    """
    name = arguments.name or Path(arguments.config).stem.lower().replace("_", "-")
    nodes = arguments.nodes
    run_dir = arguments.run_dir or f"{MOUNT}/{name}"
    config = load_config(arguments.config, arguments.set, run_dir)
    _check(name, nodes, run_dir, arguments.image, config)
    here = math.ceil(config.cluster.workers / nodes)
    gpus = f', nvidia.com/gpu: "{here}"' if config.cluster.platform == "gpu" else ""
    return string.Template(TEMPLATE.read_text()).substitute(
        name=name,
        nodes=nodes,
        config=textwrap.indent(config.to_yaml().rstrip(), 4 * " "),
        grace_s=math.ceil(config.grace_s) + MARGIN_S,
        image=arguments.image,
        cpu=arguments.cpu or here + 1,
        memory=arguments.memory,
        gpus=gpus,
        mount=MOUNT,
        claim=arguments.claim,
        shared_memory=arguments.shared_memory,
    )


def _check(name: str, nodes: int, run_dir: str, image: str, config: Config) -> None:
    last_pod = f"{name}-worker-0-{nodes - 1}"
    if not re.fullmatch(NAME, name) or len(last_pod) > LONGEST:
        raise ConfigError(
            f"name {name}: pods are called {last_pod}, and a name in DNS has lower-case letters, "
            f"digits and dashes, {LONGEST} at most; give another with --name"
        )
    if not 1 <= nodes <= config.cluster.workers:
        raise ConfigError(
            f"--nodes {nodes} with cluster.workers={config.cluster.workers}, which counts all pods "
            "together: each pod has one worker or more; change one of them"
        )
    if not run_dir.startswith(f"{MOUNT}/"):
        raise ConfigError(
            f"run_dir {run_dir} is not below {MOUNT}, where the claim is mounted, and would go "
            f"with its pod; give --run-dir {MOUNT}/NAME"
        )
    if config.cluster.platform == "auto":
        raise ConfigError(
            "cluster.platform: auto, and a manifest says whether a pod has GPUs; give --set "
            "cluster.platform=gpu or cpu"
        )
    if set(image) & set('"\\\n '):
        raise ConfigError(f"--image {image!r} is no image's name; give REGISTRY/NAME:TAG")


if __name__ == "__main__":
    sys.exit(main())
