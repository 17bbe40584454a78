"""`ftrain check`: all that a start does, without starting. Its own process: it needs jax."""

from __future__ import annotations

import os
import sys
from typing import Any

# Shapes need no accelerator, and a check must not take one from a run.
os.environ["JAX_PLATFORMS"] = "cpu"

from ftrain.config import Config
from ftrain.errors import EXIT_OK, EXIT_REFUSED, FtrainError
from ftrain.user_code import load_trainer, user_traceback


def check(config: Config, base: str) -> str:
    """What `ftrain check` prints: the resolved config, and what it makes of the trainer."""
    trainer = load_trainer(config.trainer, base, config.trainer_args, config)
    from ftrain.preparing import check_at_once, open_data, trace
    from ftrain.state import host_bytes
    from ftrain.target import target_of

    source, eval_source = open_data(trainer)
    spec, programs, evaluation = trace(
        trainer, config, source, eval_source, lambda lowered: lowered.compile()
    )
    programs.lower()
    check_at_once(config, programs)
    target = target_of(config, source.length)
    last = target.batch((target.steps - 1) * config.batch_size)
    params, _, _ = spec.split(spec.leaves)
    most = -(-config.batch_shards // config.cluster.workers)
    least = config.batch_shards // config.cluster.workers
    rows = [
        ("training samples", f"{source.length:,}"),
        ("held-out samples", f"{eval_source.length:,}" if eval_source else "none"),
        ("sample", ", ".join(f"{s.dtype}{list(s.shape)}" for s in source.samples)),
        ("parameters", f"{sum(p.size for p in params):,}"),
        ("state", f"{host_bytes(spec):,} bytes in {len(spec.leaves)} leaves"),
        ("metrics", ", ".join(["loss", *programs.metric_names])),
        ("evaluation", ", ".join(evaluation.names) if evaluation else "none"),
        ("shards a worker", str(most) if most == least else f"{least} to {most}"),
        ("shards at once", str(programs.at_once)),
        ("samples a shard", str(config.batch_size // config.batch_shards)),
        ("steps an epoch", f"{source.length / config.batch_size:.1f}"),
        ("steps", f"{target.steps:,}"),
        ("last step", f"{last:,} samples" if last < config.batch_size else "a whole batch"),
    ]
    if config.init_from.path:
        from ftrain.init_from import Plan

        rows.append(("begins with", _plan_text(Plan(config.init_from, spec).facts)))
    text = "\n".join(f"{name + ':':18}{value}" for name, value in rows)
    return f"{config.to_yaml()}\n{text}\n"


def _plan_text(facts: dict[str, Any]) -> str:
    text = f"{facts['leaves']} leaves of {facts['source']}"
    for what in ("fresh", "unused"):
        text += "".join(f"\n{'':18}{what}: {name}" for name in facts[what])
    return text


def main() -> int:
    """`python -m ftrain.check CONFIG_JSON BASE PLATFORM`."""
    try:
        sys.stdout.write(check(Config.from_json(sys.argv[1]), sys.argv[2]))
    except FtrainError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_REFUSED
    except Exception as error:  # noqa: BLE001  the user's code: its own traceback
        sys.stderr.write(user_traceback(error) + "\n")
        return EXIT_REFUSED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
