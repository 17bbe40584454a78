"""Sinks for tests: they write down what they are given, and do what a user's may do wrong."""

from __future__ import annotations

import json
import os
import time


class Notes:
    """Keeps all it gets, in `notes.jsonl` of the run's folder."""

    def __init__(self, config):
        self.file = open(os.path.join(config.run_dir, "notes.jsonl"), "a", buffering=1)

    def commit(self, line):
        self.file.write(json.dumps({"commit": line}) + "\n")

    def event(self, row):
        self.file.write(json.dumps({"event": row["event"]}) + "\n")

    def close(self):
        self.file.write(json.dumps({"closed": True}) + "\n")


class Fails(Notes):
    """At step 3, and at every event."""

    def commit(self, line):
        super().commit(line)
        if line["step"] == 3:
            raise ConnectionError("no route to the tracker")

    def event(self, row):
        raise KeyError(row["event"])


class Blocks(Notes):
    """For ever, at its first line."""

    def commit(self, line):
        time.sleep(3600)

    event = commit


class Dies(Notes):
    """Once, at step 5, as a bug in C does."""

    def commit(self, line):
        super().commit(line)
        mark = self.file.name + ".died"
        if line["step"] == 5 and not os.path.exists(mark):
            open(mark, "w").close()
            os.abort()


class CannotStart:
    """As one whose package is not installed."""

    def __init__(self, config):
        raise ModuleNotFoundError("No module named 'tracker'")
