"""The config contract: what is refused and how it is told, what is taken, what a rerun may change.

Scenario A33: typos, duplicates and the spelling of numbers are told with file, key and line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ftrain.config import Config, changed_keys, continue_problems, load_config, read_resolved
from ftrain.errors import ConfigError

BASE = "trainer: a.py:T\nrun_dir: runs/x\nsteps: 400\nbatch_size: 240\n"  # lines 1 to 4
ODD_TEXTS = ["1e-4", "on", "010", "08", "1_0", "0x1f", ".inf", "~", "<<", "a: b", " x", "a\n\nb"]
ODD_TEXTS += ["", "\x85a", "# no", "null", "0o7", "12:30", "2024-01-01", "it's", '"', "é\u2028"]
INT32 = "an integer from 1 to 2147483647"
TWO_READINGS = "has a leading zero or an underscore, which YAML 1.1 and 1.2 read differently"


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text: str, *sets: str, run_dir: str | None = None) -> Config:
    Path("c.yaml").write_bytes(text.encode())
    return load_config("c.yaml", sets, run_dir)


def refused(text: str, *sets: str, run_dir: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *sets, run_dir=run_dir)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return str(caught.value)


KEYS = {
    "chekpoint: {keep: 2}": "chekpoint: unknown key; did you mean checkpoint?",
    "eval: {every_step: 2}": "eval.every_step: unknown key; did you mean every_steps?",
    "workers: 4": "workers: unknown key; did you mean cluster.workers?",
    "every_steps: 4": "every_steps: unknown key; "
    "did you mean eval.every_steps or checkpoint.every_steps?",
    "eval: {zzz: 1}": "eval.zzz: unknown key; known are every_steps",
    "steps: 3": "steps: given twice, first at c.yaml:3; keep one",
    "eval: {every_steps: 1, every_steps: 2}": "eval.every_steps: given twice, "
    "first at c.yaml:5; keep one",
    "eval: {1: 2}": "eval.1: a key is a word; a number or the like needs quotes",
    "eval: {<<: {every_steps: 1}}": "eval.<<: a merge key is not taken; write its keys out",
    "? [a]\n: 1": "?: a key is a word; a number or the like needs quotes",
}
TYPES = {
    "metrics_port: 0": "metrics_port: 0 is not a port from 1 to 65535",
    "tensorboard: 3": "tensorboard: 3 is not true, false or a folder's path",
    "sinks: a.py:S": "sinks: 'a.py:S' is not a list of path.py:Class or package.module:Class",
    "sinks: [a.py:S, a.py]": "sinks: 'a.py' is not a list of path.py:Class or package.module:Class",
    "profile: {step: -1}": "profile.step: -1 is not an integer >= 0",
    "profile: {step: 1, steps: 0}": "profile.steps: 0 is not an integer >= 1",
    "profile: {step: 398, steps: 4}": "profile.step: step=398 and the 4 from there are not all "
    "within the run's steps=400; profile earlier steps",
    'cluster: {workers: "4"}': "cluster.workers: '4' is not an integer >= 1; leave out the quotes",
    "cluster: {workers: 0}": "cluster.workers: 0 is not an integer >= 1",
    "cluster: {workers: -1}": "cluster.workers: -1 is not an integer >= 1",
    "cluster: {workers: true}": "cluster.workers: true is not an integer >= 1",
    "cluster: {workers: 4.0}": "cluster.workers: 4.0 is not an integer >= 1",
    "cluster: {workers: no}": "cluster.workers: 'no' is not an integer >= 1",
    "cluster: {workers:}": "cluster.workers: null is not an integer >= 1",
    "cluster: {workers: [4]}": "cluster.workers: a list is not an integer >= 1",
    "cluster:": "cluster: null is not a section; write its keys below it, or leave it out",
    "cluster: 4": "cluster: 4 is not a section; write its keys below it, or leave it out",
    "cluster: {platform: tpu}": "cluster.platform: 'tpu' is not auto, cpu or gpu",
    "cluster: {heartbeat_timeout_s: 1}": "cluster.heartbeat_timeout_s: 1 is not a number >= 2",
    "cluster: {hang_timeout_s: .nan}": "cluster.hang_timeout_s: nan is not a number > 0",
    "cluster: {hang_timeout_s: '60'}": "cluster.hang_timeout_s: '60' is not a number > 0; "
    "leave out the quotes",
    "grace_s: true": "grace_s: true is not a number > 0",
    "grace_s: 0": "grace_s: 0 is not a number > 0",
    "restart: {backoff_s: -1}": "restart.backoff_s: -1 is not a number >= 0",
    "data: {shuffle: on}": "data.shuffle: 'on' is not true or false",
    "data: {shuffle: 1}": "data.shuffle: 1 is not true or false",
    "seed: 1e3": "seed: 1000.0 is not an integer from 0 to 4294967295",
    "seed: 4294967296": "seed: 4294967296 is not an integer from 0 to 4294967295",
    "reduce_dtype: bfloat16": "reduce_dtype: 'bfloat16' is not float32 or param",
    "compile_cache: false": "compile_cache: false is not auto, off or a folder's path",
    "trainer_args: [1]": "trainer_args: a list is not a mapping of names to values",
    "batch_shards: ~": "batch_shards: null is not an integer >= 1",
}
YAML = {
    "seed: 010": f"seed: 010 {TWO_READINGS}; write 10, or '010' for text",
    "seed: 1_0": f"seed: 1_0 {TWO_READINGS}; write 10, or '1_0' for text",
    "grace_s: 1e999": "grace_s: 1e999 is too large for a float; write .inf if that is meant",
    "seed: &a 3": "seed: &a is an anchor; leave it out",
    "seed: *a": "seed: *a is an alias; write the value out",
    "seed: !!int 3": "seed: !!int is a tag; write a plain value",
    "trainer_args: {x: !!python/name:os.system }": "trainer_args.x: "
    "!!python/name:os.system is a tag; write a plain value",
    "---\nsteps: 3": "a second document starts here; keep one",
    "\tseed: 3": "a tab is not taken here; use spaces",
    "seed:\t3": "a tab is not taken here; use spaces",
    "seed: 1: 2": "cannot be read as YAML: mapping values are not allowed here",
    "seed 3\ngrace_s: 1": "cannot be read as YAML: could not find expected ':'",
    "seed: \a": "the character U+0007 is not text; remove it",
    "trainer_args: {x: " + "[" * 2000 + "]" * 2000 + "}": "cannot be read as YAML: "
    "nested more than 32 deep",
    "trainer_args: {x: " + "9" * 5000 + "}": "trainer_args.x: "
    "a number of more than 1000 digits; write a smaller one",
}


@pytest.mark.parametrize(("text", "message"), [*KEYS.items(), *TYPES.items(), *YAML.items()])
def test_bad_line_is_told_with_file_line_key_value_and_rule(text, message):
    assert refused(BASE + text + "\n") == f"c.yaml:5: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml:1: the file is empty; write key: value lines"),
        ("# nothing\n", "c.yaml:1: the file is empty; write key: value lines"),
        ("- a\n- b\n", "c.yaml:1: the top level is a list; write key: value lines"),
        ("hello\n", "c.yaml:1: the top level is 'hello'; write key: value lines"),
    ],
)
def test_file_that_is_no_mapping_is_refused_without_listing_missing_keys(text, message):
    assert refused(text) == message


def test_missing_keys_are_told_with_their_rules():
    assert refused("seed: 1\n").splitlines() == [
        "c.yaml: trainer: is required; write path.py:Class or package.module:Class",
        "c.yaml: run_dir: is required; write a folder's path",
        f"c.yaml: batch_size: is required; write {INT32}",
        "c.yaml: steps or epochs is required; write one of them",
    ]


@pytest.mark.parametrize(
    "trainer", ["a.py", "a.py:", ":T", "a-b:T", "a.py:T.U", "a.py:1", "a.b.:T"]
)
def test_trainer_that_names_no_class_is_refused(trainer):
    rule = "path.py:Class or package.module:Class"
    text = BASE.replace("a.py:T", f"'{trainer}'")
    assert refused(text) == f"c.yaml:1: trainer: '{trainer}' is not {rule}"


@pytest.mark.parametrize(
    "trainer", ["a.py:T", "./r-1/a b.py:_T", "/abs/a.py:T", "pkg.mod:T", "m:T"]
)
def test_both_forms_of_trainer_are_taken(trainer):
    assert load(BASE.replace("a.py:T", trainer)).trainer == trainer


def test_every_problem_of_a_file_and_the_sets_is_told_at_once_in_order():
    text = (
        "steps: 0\nsteps: 4\nbatch_size: 240\ntrainer: x\ncluster:\n  min_worker: 1\n"
        "  min_workers: 9\n  workers: 4\n  heartbeat_timeout_s: 1\nbatch_shards: 3\nseed: &a 1\n"
    )
    assert refused(text, "data.thread=2", "keep=1").splitlines() == [
        "c.yaml: run_dir: is required; write a folder's path",
        "c.yaml:2: steps: given twice, first at c.yaml:1; keep one",
        "c.yaml:4: trainer: 'x' is not path.py:Class or package.module:Class",
        "c.yaml:6: cluster.min_worker: unknown key; did you mean min_workers?",
        "c.yaml:8: cluster.workers: min_workers=9 is more than workers=4; "
        "lower min_workers or raise workers",
        "c.yaml:9: cluster.heartbeat_timeout_s: 1 is not a number >= 2",
        "c.yaml:10: batch_shards: batch_shards=3 is less than cluster.workers=4; "
        "use one of 4, 5, 6, 8, 10, 12, 15, 16, or fewer workers",
        "c.yaml:11: seed: &a is an anchor; leave it out",
        "--set data.thread=2: unknown key; did you mean threads?",
        "--set keep=1: unknown key; did you mean checkpoint.keep?",
    ]


def test_every_line_indented_by_a_tab_is_told():
    message = "a tab is not taken here; use spaces"
    text = BASE + "cluster:\n\tworkers: 4\n  \tmin_workers: 2\n"
    assert refused(text) == f"c.yaml:6: {message}\nc.yaml:7: {message}"


@pytest.mark.parametrize(
    ("text", "sets", "message"),
    [
        (
            "cluster:\n  workers: 2\n  min_workers: 3\n",
            [],
            "c.yaml:7: cluster.min_workers: min_workers=3 is more than workers=2; "
            "lower min_workers or raise workers",
        ),
        (
            "cluster:\n  min_workers: 3\n  workers: 2\n",
            [],
            "c.yaml:7: cluster.workers: min_workers=3 is more than workers=2; "
            "lower min_workers or raise workers",
        ),
        (
            "cluster: {min_workers: 3}\n",
            [],
            "c.yaml:5: cluster.min_workers: min_workers=3 is more than workers=1; "
            "lower min_workers or raise workers",
        ),
        (
            "cluster: {min_workers: 3, workers: 3}\n",
            ["cluster.workers=2"],
            "--set cluster.workers=2: min_workers=3 is more than workers=2; "
            "lower min_workers or raise workers",
        ),
        (
            "batch_shards: 7\n",
            [],
            "c.yaml:5: batch_shards: batch_shards=7 does not divide batch_size=240; "
            "use one of 2, 3, 4, 5, 6, 8, 10, 12",
        ),
        (
            "cluster: {workers: 16}\n",
            [],
            "c.yaml:5: cluster.workers: batch_shards=12 is less than cluster.workers=16; "
            "use one of 16, 20, 24, 30, 40, 48, 60, 80, or fewer workers",
        ),
        (
            "cluster: {workers: 300}\n",
            [],
            "c.yaml:5: cluster.workers: batch_shards=12 is less than cluster.workers=300; "
            "batch_size allows up to 240, or fewer workers",
        ),
    ],
)
def test_rule_over_two_keys_names_the_later_one(text, sets, message):
    assert refused(BASE + text, *sets) == message


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("cluster.workers=x", "'x' is not an integer >= 1"),
        ('cluster.workers="2"', "'2' is not an integer >= 1; leave out the quotes"),
        ("cluster.worker=2", "unknown key; did you mean workers?"),
        ("clusters.workers=2", "clusters: unknown key; did you mean cluster?"),
        ("cluster={worker: 2}", "cluster.worker: unknown key; did you mean workers?"),
        ("steps=1e-4", f"0.0001 is not {INT32}"),
        ("steps=", "steps or epochs is required; write one of them"),
        ("epochs=0", f"0 is not {INT32}"),
        ("steps", "write it as --set key.path=value"),
        ("=3", "write it as --set key.path=value"),
        ("a..b=3", "write it as --set key.path=value"),
        ("steps.x=3", "steps: 400 has no keys below it"),
        ("seed=&a 3", "&a is an anchor; leave it out"),
        ("seed=010", f"010 {TWO_READINGS}; write 10, or '010' for text"),
        ("seed=[1", "cannot be read as YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_bad_set_is_told_as_it_was_given(item, message):
    assert refused(BASE, item) == f"--set {item}: {message}"


def test_key_set_twice_is_refused():
    assert refused(BASE, "steps=3", "steps=4") == (
        "--set steps=4: given twice, also by --set steps=3; keep one"
    )
    assert refused(BASE, "run_dir=a", run_dir="b") == (
        "--run-dir b: given twice, also by --set run_dir=a; keep one"
    )


def test_sets_replace_and_add_values_in_order():
    sets = ["cluster={workers: 3}", "cluster.min_workers=2", " steps = 9 ", "trainer_args.b.c=1e-4"]
    config = load(BASE + "cluster: {hang_timeout_s: 5}\ntrainer_args: {a: on}\n", *sets)
    assert (config.cluster.workers, config.cluster.min_workers, config.steps) == (3, 2, 9)
    assert config.cluster.hang_timeout_s == 60  # a section that is set is set as a whole
    assert config.trainer_args == {"a": "on", "b": {"c": 1e-4}}


def test_steps_and_epochs_are_one_choice():
    """Two lines of a file, or two `--set`s, are two answers; a null is none."""
    both = "steps=400 and epochs=2 each say how long to train; keep one"
    assert refused(BASE + "epochs: 2\n") == f"c.yaml:5: epochs: {both}"
    assert refused("epochs: 2\n" + BASE) == f"c.yaml:4: steps: {both}"
    assert refused(BASE, "epochs=2", "steps=400") == f"--set steps=400: {both}"
    assert refused(BASE.replace("steps: 400", "epochs: null")) == (
        "c.yaml:3: epochs: steps or epochs is required; write one of them"
    )
    assert load(BASE + "epochs: null\n") == load(BASE)
    with pytest.raises(ValueError, match="steps or epochs is required"):
        Config(trainer="a.py:T", run_dir="r", batch_size=8)


@pytest.mark.parametrize(("file", "item"), [("steps: x", "epochs=2"), ("epochs: 0", "steps=2")])
def test_set_of_steps_or_epochs_takes_the_place_of_the_file_s_other_one(file, item):
    """Whoever asks for two epochs on the command line does not ask for the file's steps."""
    config = load(BASE.replace("steps: 400", file), item)
    wanted = {"steps": None, "epochs": None, item[:-2]: 2}
    assert {key: getattr(config, key) for key in wanted} == wanted
    Path("config.yaml").write_text(config.to_yaml())
    assert read_resolved("config.yaml") == config == Config.from_json(config.to_json())


def test_a_bad_length_is_told_once():
    """Not also as a missing one."""
    assert refused(BASE.replace("400", "x")) == f"c.yaml:3: steps: 'x' is not {INT32}"


def test_run_dir_flag_is_text_and_takes_the_place_of_the_key():
    assert load(BASE, run_dir="010").run_dir == "010"
    assert load(BASE.replace("run_dir: runs/x\n", ""), run_dir="a b").run_dir == "a b"
    assert refused(BASE, run_dir="") == "--run-dir : '' is not a folder's path"


def test_set_replaces_a_bad_value_but_not_bad_yaml():
    assert load(BASE + "seed: x\n", "seed=3").seed == 3
    assert refused(BASE + "seed: 010\n", "seed=3").startswith("c.yaml:5: seed: 010 has")


def test_unreadable_file_is_told_in_one_line():
    for path, why in {"no.yaml": "No such file or directory", ".": "Is a directory"}.items():
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == f"{path}: {why}; give the path of a config file"


def test_file_that_is_not_utf8_is_told_with_its_line():
    Path("c.yaml").write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError) as caught:
        load_config("c.yaml")
    assert str(caught.value) == "c.yaml:2: the byte 0xff is not UTF-8; save the file as UTF-8"


def test_numbers_and_booleans_are_those_of_yaml_1_2():
    text = "{a: 1e-4, b: on, c: yes, d: no, e: off, f: 0o17, g: 0x1F, h: 12:30, i: 2024-01-01, "
    text += "j: True, k: ~, l: -.inf, m: .5, n: '010', o: +7, p: 3., q: n}"
    args = load(BASE + f"trainer_args: {text}\n").trainer_args
    assert list(args.values()) == [
        *(1e-4, "on", "yes", "no", "off", 15, 31, "12:30", "2024-01-01"),
        *(True, None, -float("inf"), 0.5, "010", 7, 3.0, "n"),
    ]
    assert type(args["a"]) is float


def test_integer_is_taken_where_a_number_is_wanted():
    config = load(BASE + "cluster: {hang_timeout_s: 60, heartbeat_timeout_s: 2}\ngrace_s: 1e2\n")
    values = [config.cluster.hang_timeout_s, config.cluster.heartbeat_timeout_s, config.grace_s]
    assert repr(values) == "[60.0, 2.0, 100.0]"


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_bom_and_crlf_are_taken_and_keep_the_lines_right(start, end):
    assert load((start + BASE).replace("\n", end)) == load(BASE)
    text = (start + BASE + "seed: x\n").replace("\n", end)
    assert refused(text).startswith("c.yaml:5: seed: 'x' is not")


@pytest.mark.parametrize("word", ["off", "auto", "cache/here"])
def test_compile_cache_is_a_word(word):
    assert load(BASE + f"compile_cache: {word}\n").compile_cache == word


@pytest.mark.parametrize(
    ("batch_size", "shards"), [(240, 12), (12, 12), (64, 16), (26, 13), (17, 1), (1, 1), (20, 10)]
)
def test_default_of_batch_shards_depends_on_batch_size_alone(batch_size, shards):
    text = BASE.replace("240", str(batch_size))
    assert load(text).batch_shards == shards
    if shards > 1:
        assert load(text, "cluster.workers=2").batch_shards == shards


def test_defaults_are_those_of_the_design():
    assert load(BASE).to_yaml() == (
        "trainer: a.py:T\ntrainer_args: {}\nrun_dir: runs/x\nsteps: 400\nepochs: null\nseed: 0\n"
        "batch_size: 240\nbatch_shards: 12\nshards_at_once: null\nreduction: fast\n"
        "reduce_dtype: float32\non_nonfinite: stop\ncommit: ahead\nsteps_per_commit: 1\n"
        "init_from:\n  path: null\n  map: {}\n  allow_missing: []\n  allow_extra: []\n"
        "  model_state: false\n  cast: false\n"
        "data:\n  shuffle: true\n  prefetch_steps: 1\n  threads: 1\neval:\n  every_steps: 0\n"
        "cluster:\n  workers: 1\n  min_workers: 1\n  platform: auto\n  start_timeout_s: 120.0\n"
        "  heartbeat_timeout_s: 10.0\n  hang_timeout_s: 60.0\n  below_min_timeout_s: 600.0\n"
        "restart:\n  max_failures: 10\n  renew_after_steps: 10\n  backoff_s: 0.5\n"
        "  backoff_max_s: 30.0\ncheckpoint:\n  every_steps: 100\n  every_s: null\n  keep: 3\n"
        "  keep_every: null\n  keep_best: null\n  memory_every_s: 5.0\n  memory_folder: auto\n"
        "  on_save_error: continue\n"
        "grace_s: 25.0\ndigest_every_steps: 100\ncompile_cache: auto\n"
        "metrics_port: null\nmetrics_host: 127.0.0.1\ntensorboard: false\nsinks: []\n"
        "profile:\n  step: 0\n  steps: 5\n"
    )


def test_init_from_is_a_path_or_a_section():
    """The short form is resolved, so that a run's config.yaml has one form."""
    short = load(BASE + "init_from: runs/a@200\n")
    assert short == load(BASE + "init_from:\n  path: runs/a@200\n")
    assert short == load(BASE, "init_from=runs/a@200") == load(BASE, "init_from.path=runs/a@200")
    assert short.init_from.path == "runs/a@200" and short.init_from.map == {}
    assert load(BASE + "init_from: null\n") == load(BASE)
    long = load(BASE + "init_from: {path: m, map: {'^a/': b/}, allow_missing: [^head/]}\n")
    assert Config.from_json(long.to_json()) == long
    Path("config.yaml").write_text(long.to_yaml(), encoding="utf-8")
    assert read_resolved("config.yaml") == long


INIT_FROM = {
    "init_from: 5": "init_from: 5 is not a path, or a section with path",
    "init_from: ''": "init_from.path: '' is not the path of a source",
    "init_from: {map: {a: b}}": "init_from.map: needs init_from.path; write it",
    "init_from: {path: m, map: {a: 5}}": "init_from.map.a: 5 is not a mapping of regular "
    "expressions to their replacements",
    "init_from: {path: m, map: {'(': b}}": "init_from.map: '(' is no regular expression that "
    "works: missing ), unterminated subpattern at position 0",
    "init_from: {path: m, map: {a: '\\1'}}": "init_from.map: 'a' is no regular expression that "
    "works: invalid group reference 1 at position 1",
    "init_from: {path: m, allow_extra: ['*']}": "init_from.allow_extra: '*' is no regular "
    "expression that works: nothing to repeat at position 0",
    "init_from: {path: m, cast: 1}": "init_from.cast: 1 is not true or false",
    "compile_cache: gs://b/c": "compile_cache: 'gs://b/c' is a URL, not a folder; mount the store, "
    "or copy to it",
}


@pytest.mark.parametrize("text", INIT_FROM)
def test_an_init_from_that_cannot_work_is_refused_with_its_line(text):
    """Before anything starts, all of it that needs no file."""
    assert refused(BASE + text + "\n") == f"c.yaml:5: {INIT_FROM[text]}"


def test_a_run_dir_that_is_a_url_is_refused():
    """A folder called `s3:` would be made; ftrain's lock, records and renames need a disk."""
    why = "'s3://bucket/run' is a URL, not a folder; mount the store, or copy to it"
    assert refused(BASE, run_dir="s3://bucket/run") == f"--run-dir s3://bucket/run: {why}"


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_resolved_config_reads_back_equal_whatever_text_it_holds(text):
    """PyYAML alone writes `1e-4`, `08` and the like without the quotes that 1.2 needs."""
    args = {"a": text, "b": [text, {"c": text}], "d": [1, 1.0, True, None, 1e-7, 1e22]}
    config = Config(trainer="a.py:T", trainer_args=args, run_dir="r", steps=1, batch_size=8)
    Path("config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    for again in (read_resolved("config.yaml"), Config.from_json(config.to_json())):
        assert repr(again) == repr(config)
        assert again == config


def test_shared_values_are_written_out():
    args = {"a": (shared := [1, 2]), "b": shared}
    config = Config(trainer="a.py:T", trainer_args=args, run_dir="r", steps=1, batch_size=8)
    Path("config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert read_resolved("config.yaml") == config


def test_infinite_argument_reaches_the_worker():
    config = load(BASE + "trainer_args: {clip: .inf}\n")
    assert Config.from_json(config.to_json()) == config
    assert "\n" not in config.to_json()


def test_config_made_in_python_holds_the_same_rules():
    with pytest.raises(ValueError, match="batch_shards=7 does not divide batch_size=240"):
        Config(trainer="a.py:T", run_dir="r", steps=1, batch_size=240, batch_shards=7)


def test_config_is_read_only():
    config = load(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3
    with pytest.raises(ValueError, match="frozen"):
        config.cluster.workers = 3


@pytest.mark.parametrize(
    ("item", "old", "new"),
    [
        ("trainer=b.py:T", "'a.py:T'", "'b.py:T'"),
        ("seed=1", "0", "1"),
        ("batch_size=480", "240", "480"),
        ("batch_shards=24", "12", "24"),
        ("data.shuffle=false", "true", "false"),
    ],
)
def test_key_that_fixes_the_samples_must_not_change_when_continued(item, old, new):
    key = item.partition("=")[0]
    assert continue_problems(load(BASE), load(BASE, item)) == [
        f"{key}: {old} when the run began, {new} now; "
        f"set it to {old}, or start a new run with --run-dir"
    ]


def test_all_fixed_keys_that_changed_are_told():
    new = load(BASE, "batch_size=64", "seed=2")
    keys = [line.partition(":")[0] for line in continue_problems(load(BASE), new)]
    assert keys == ["seed", "batch_size", "batch_shards"]


@pytest.mark.parametrize(
    "item",
    [
        "steps=500",
        "steps=300",
        "epochs=3",
        "cluster.workers=3",
        "trainer_args.a=1",
        "reduce_dtype=param",
    ],
)
def test_any_other_key_may_change_when_continued(item):
    assert continue_problems(load(BASE), load(BASE, item)) == []


def test_changed_keys_name_both_values():
    old = load(BASE + "trainer_args: {a: 1, b: 2, n: .nan}\n")
    new = load(
        BASE + "trainer_args: {a: 1.0, c: {d: 3}, n: .nan}\n", "steps=500", "cluster.workers=2"
    )
    changed = changed_keys(old, new)
    assert changed == {
        "trainer_args.a": [1, 1.0],
        "trainer_args.b": [2, None],
        "steps": [400, 500],
        "cluster.workers": [1, 2],
        "trainer_args.c": [None, {"d": 3}],
    }
    assert json.loads(json.dumps(changed)) == changed
    assert changed_keys(old, old) == {}


def test_config_imports_neither_jax_nor_flax():
    check = "import sys, ftrain.config; sys.exit(bool({'jax', 'jaxlib', 'flax'} & {*sys.modules}))"
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", check], cwd=root, timeout=60).returncode == 0
