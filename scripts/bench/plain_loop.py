"""The same training as a config's, in a plain loop without ftrain: what its steps are held against.

    python scripts/bench/plain_loop.py configs/chars-100m.yaml --steps 60 --platform gpu

One fused jitted step on each worker's part of the batch, its gradients summed over the workers in
float32, in as many processes. Prints the median of a step that is waited for, and of steps that
run ahead, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPOSITORY))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--platform", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--worker", type=int, help="which process this is; left out, all start")
    parser.add_argument("--address")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
    else:
        start(arguments)


def start(arguments: argparse.Namespace) -> None:
    from ftrain.config import load_config

    workers = load_config(arguments.config, arguments.set).cluster.workers
    processes = launch(__file__, workers, arguments.platform, sys.argv[1:])
    sys.exit(max(process.wait() for process in processes))


def launch(
    script: str, workers: int, platform: str, argv: list[str], **options: Any
) -> list[subprocess.Popen[str]]:
    """The processes of a script without ftrain, each told `--worker` and `--address`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = []
    for worker in range(workers):
        env = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        env["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(platform, platform)
        if platform == "gpu":
            env["CUDA_VISIBLE_DEVICES"] = str(worker)
        mine = ["--worker", str(worker), "--address", address]
        processes.append(
            subprocess.Popen([sys.executable, script, *argv, *mine], env=env, **options)
        )
    return processes


def work(arguments: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from ftrain.config import load_config
    from ftrain.data import Source
    from ftrain.initial import as_init
    from ftrain.user_code import load_trainer

    config = load_config(arguments.config, arguments.set)
    workers = config.cluster.workers
    if arguments.platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    trainer = load_trainer(config.trainer, str(REPOSITORY), config.trainer_args, config)
    source = Source(trainer.dataset(), "dataset()")
    trainer.tx = trainer.optimizer()
    jax.distributed.initialize(arguments.address, workers, arguments.worker)
    mesh = Mesh(np.array(jax.devices()), ("worker",))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("worker"))

    def loss(params, model_state, batch, key):
        # Rebuilt in this trace: flax.nnx refuses variables of an outer one.
        model_state = jax.tree.map(lambda leaf: leaf, model_state)
        args = (params, batch, key) if model_state is None else (params, batch, key, model_state)
        out = trainer.loss(*args)
        return getattr(out, "value", out), getattr(out, "model_state", None)

    def mean(tree):
        leaves, treedef = jax.tree.flatten(tree)
        floats = {i: x for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)}
        if arguments.platform == "cpu":  # one buffer: XLA does not combine all-reduces there
            flat, unravel = ravel_pytree(floats)
            floats = unravel(jax.lax.pmean(flat, "worker"))
        else:
            floats = jax.lax.pmean(floats, "worker")
        return treedef.unflatten([floats.get(i, x) for i, x in enumerate(leaves)])

    def local(params, opt_state, model_state, batch, key):
        (value, model_state), grads = jax.value_and_grad(loss, has_aux=True)(
            params, model_state, batch, key
        )
        value, grads, model_state = mean((value, grads, model_state))
        updates, opt_state = trainer.tx.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        return params, opt_state, model_state, value

    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P(), P(), P("worker"), P()),
            out_specs=P(),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )
    init = jax.jit(
        lambda: as_init(trainer.init_params(jax.random.key(0))), out_shardings=replicated
    )
    params, model_state = init()
    opt_state = jax.jit(trainer.tx.init, out_shardings=replicated)(params)
    size = config.batch_size // workers

    def batch(number: int):
        first = number * config.batch_size + arguments.worker * size
        leaves = source.batch(np.arange(first, first + size) % source.length)
        leaves = [jax.make_array_from_process_local_data(split, leaf) for leaf in leaves]
        return jax.tree.unflatten(source.treedef, leaves)

    times = {}
    for way in ("waited", "ahead"):
        seconds, value = [], None
        for number in range(arguments.steps + 5):
            began = time.perf_counter()
            key, before = jax.random.fold_in(jax.random.key(1), number), value
            params, opt_state, model_state, value = step(
                params, opt_state, model_state, batch(number), key
            )
            jax.block_until_ready(value if way == "waited" else before)
            if way == "waited":
                jax.block_until_ready(params)
            seconds.append(time.perf_counter() - began)
        times[f"{way}_ms"] = 1000 * statistics.median(seconds[5:])
    if arguments.worker == 0:
        print(json.dumps({**times, "loss": float(value)}))


if __name__ == "__main__":
    main()
