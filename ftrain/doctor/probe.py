"""What the doctor has done in a process of its own, since its own may not import jax.

python -m ftrain.doctor.probe devices PLATFORM         prints the devices, as JSON
python -m ftrain.doctor.probe sum ADDRESS I PLATFORM   is one of two workers; prints a sum over both
"""

from __future__ import annotations

import json
import os
import sys
import threading

import jax
import numpy as np

from ftrain.communicators import Cutter
from ftrain.mesh import DataPlane
from ftrain.runtime import Runtime
from ftrain.table import Table

WORKERS = 2
SIZE = 1024  # numbers that each gives
HEARTBEAT_TIMEOUT_S = 10.0


def devices() -> dict:
    """The platform and the names of this host's devices."""
    found = jax.local_devices()
    return {"platform": found[0].platform, "devices": [d.device_kind for d in found]}


def sum_with_other(address: str, worker: int, platform: str) -> float:
    """What a step's reduction gives of 1 from worker 0 and 2 from worker 1, by the same path."""
    runtime = Runtime(
        address=address,
        worker=worker,
        workers=WORKERS,
        platform=platform,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        host="127.0.0.1",
    )
    runtime.start_backend()
    by_worker = sorted(runtime.new_view_devices(), key=lambda d: d.process_index)
    table = Table([jax.ShapeDtypeStruct((1, 1, SIZE), np.float32)], SIZE)
    never = Cutter(threading.Event().wait, set, set())  # whoever waits for this is killed
    plane = DataPlane(by_worker, range(WORKERS), worker, table, lambda low: low.compile(), never)
    plane.connect()
    mine = np.full((1, 1, SIZE), worker + 1, np.float32)
    summed = plane.sum([jax.device_put(mine, jax.local_devices()[0])])
    return float(np.asarray(summed[0]).min())


def main(argv: list[str]) -> None:
    """Prints the answer and ends at once: a worker's client never disconnects itself."""
    if argv[0] == "devices":
        answer = devices()
    else:
        answer = {"sum": sum_with_other(argv[1], int(argv[2]), argv[3])}
    sys.stderr.write(f"answer {json.dumps(answer)}\n")  # gloo writes to stdout as it connects
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
