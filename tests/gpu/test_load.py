"""A state moves between GPU and CPU through its checkpoints, and is read beside a run on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import ftrain
from tests.checks import check_each_step_once, check_nothing_left
from tests.gpu.test_faults import pytestmark as pytestmark
from tests.gpu.test_faults import two_gpus as two_gpus
from tests.runs import running
from tests.test_anywhere import plain_process

READ = """
import json, sys, ftrain
w = ftrain.load_params(sys.argv[1])["w"]
from jax._src import xla_bridge
print(json.dumps([w.tolist(), xla_bridge.backends_are_initialized()]))
"""


@pytest.mark.timeout(400)
def test_a_run_goes_from_gpu_to_cpu_and_back(tmp_path):
    """20 steps on each: no step twice, the same losses as on the CPU alone up to rounding."""
    losses = {}
    for name, platforms in (("moved", ("gpu", "cpu", "gpu")), ("cpu", ("cpu",) * 3)):
        for i, platform in enumerate(platforms, 1):
            sets = [f"cluster.platform={platform}", "cluster.workers=2", f"steps={20 * i}"]
            with running("tests/paced.yaml", tmp_path / name, *sets) as run:
                assert run.finish() == 0
                check_each_step_once(run, 20 * i)
                check_nothing_left(run)
        losses[name] = [row["loss"] for row in run.metrics()]
    assert np.allclose(losses["moved"], losses["cpu"], rtol=1e-3)


@pytest.mark.timeout(400)
def test_reading_beside_a_run_on_a_gpu_leaves_the_gpu_alone(tmp_path):
    """A plain process, JAX_PLATFORMS unset: the parameters, and no backend."""
    sets = ["cluster.platform=gpu", "cluster.workers=2", "checkpoint.every_steps=20", "steps=400"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_event("checkpoint_saved")
        w, opened = plain_process(READ, run.run_dir)
        assert len(w) == 8 and not opened
        assert run.finish() == 0
    assert len(ftrain.load_params(str(run.run_dir))["w"]) == 8
