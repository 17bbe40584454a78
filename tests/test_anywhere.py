"""Real runs from elsewhere: any folder, any script, other parameters, another number of workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ftrain
from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import environment, plain_process, running

ASCII = {"LC_ALL": "C", "LANG": "C"}
TRAINER = """
from tests.trainers import Paced

class Линия(Paced):
    def after_commit(self, step, metrics, state):
        if step == 3:
            print("печать ü 训练")
"""
CONFIG = """
trainer: тренер 1.py:Линия
run_dir: of no use
steps: 30
batch_size: 48
digest_every_steps: 10
cluster: {workers: 2}
checkpoint: {every_steps: 10}
init_from:
  path: ../модели/модель 1.safetensors
  map: {'^net/': ''}
"""


def test_any_path_and_locale_and_then_fewer_workers_without_the_source(tmp_path, monkeypatch):
    """Spaces and scripts of the world, relative paths, another folder, LC_ALL=C: all is right.

    The parameters are those of the file; the run then goes on, with one worker, without it.
    """
    for name in ("PYTHONUTF8", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)
    here, code, source = tmp_path / "hier", tmp_path / "мой код", tmp_path / "модели"
    for folder in (here, code, source):
        folder.mkdir()
    (code / "тренер 1.py").write_text(TRAINER, encoding="utf-8")
    (code / "наш файл.yaml").write_text(CONFIG, encoding="utf-8")
    save_file({"net.w": np.full(8, 125, np.float32)}, source / "модель 1.safetensors")
    monkeypatch.chdir(here)
    config, run_dir = Path("../мой код/наш файл.yaml"), Path("läufe/запуск 1/训练")
    Path("läufe/запуск 1").mkdir(parents=True)

    with running(config, run_dir, cwd=here, env=ASCII) as run:
        assert run.finish() == 0
        check_each_step_once(run, 30)
        check_replicas_agree(run)
        check_nothing_left(run)
        [loaded] = run.events("parameters_loaded")
        assert loaded["source"] == "../модели/модель 1.safetensors" and loaded["leaves"] == 1
        assert run.metrics()[0]["loss"] == pytest.approx((8 * 125) ** 2, rel=0.01)
        assert "[0] печать ü 训练" in run.output and f"in {run_dir}/logs" in run.output
        assert "печать ü 训练" in (run_dir / "logs/worker-0.log").read_text(encoding="utf-8")
        assert run.events("run_started")[0]["config"]["run_dir"] == str(run_dir)
    code = "import sys, json, ftrain\nprint(json.dumps(int(ftrain.load_state(sys.argv[1]).step)))"
    assert plain_process(code, run_dir.absolute()) == 30

    (source / "модель 1.safetensors").unlink()
    more = ["steps=40", "cluster.workers=1"]
    with running(config, run_dir, *more, cwd=here, env=ASCII) as run:
        assert run.finish() == 0
        check_each_step_once(run, 40)
        assert len(run.events("parameters_loaded")) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_goes_on_with_one_worker_and_then_with_three(tmp_path):
    """Four to step 20, one to 40, three to 60: the same bits as in one go on one worker."""
    sets = ["trainer_args.pause_s=0.0", "reduction=reproducible", "digest_every_steps=10"]
    run_dir = tmp_path / "run"
    for workers, steps in ((4, 20), (1, 40), (3, 60)):
        own = [f"cluster.workers={workers}", f"steps={steps}"]
        with running("tests/paced.yaml", run_dir, *sets, *own) as run:
            assert run.finish() == 0
            check_each_step_once(run, steps)
    code = """
import sys, json, jax, ftrain
state = ftrain.load_state(sys.argv[1])
print(json.dumps([len(jax.devices()), int(state.step), state.params["w"].tolist()]))
"""
    devices, step, w = plain_process(code, run_dir)
    assert (devices, step) == (1, 60)
    alone = ["cluster.workers=1", "steps=60"]
    with running("tests/paced.yaml", tmp_path / "one", *sets, *alone) as one:
        assert one.finish() == 0
    assert w == ftrain.load_params(str(one.run_dir))["w"].tolist()
    wanted = [[r.get(f) for f in ("step", "loss", "samples", "digest")] for r in one.metrics()]
    found = [[r.get(f) for f in ("step", "loss", "samples", "digest")] for r in run.metrics()]
    assert found == wanted


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_parameters_that_do_not_fit_end_the_run_before_it_trains(tmp_path):
    """Exit 2, every leaf once, no step; without the source not even a worker starts."""
    save_file({"v": np.zeros(3, np.float32), "w": np.zeros(7, "f4")}, tmp_path / "m.safetensors")
    sets = ["cluster.workers=2", "steps=20"]
    path = f"init_from={tmp_path}/m.safetensors"
    with running("tests/paced.yaml", tmp_path / "run", *sets, path) as run:
        assert run.finish() == 2
        assert run.output.count("w: the trainer has float32[8], the source has float32[7]") == 1
        assert run.output.count("v: the trainer has no such leaf, the source has float32[3]") == 1
        assert run.metrics() == []
        check_nothing_left(run)
    with running("tests/paced.yaml", tmp_path / "none", *sets, path + "s") as run:
        assert run.finish() == 2
        assert "is not there; give a run's folder" in run.output
        assert not run.run_dir.exists()


def test_a_name_that_this_locale_cannot_write_is_told_in_one_line(tmp_path):
    """Python's UTF-8 mode turned off in an ASCII locale: not a traceback."""
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    env = {**environment(), **ASCII, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "ftrain.cli", "run", "c.yaml"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "set LC_ALL=C.UTF-8" in done.stderr
