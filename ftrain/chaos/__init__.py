"""Faults injected into a run on purpose, and the judgement of what became of it. No jax.

plan      what is injected when: read from a file, drawn from a seed, written down
faults    each kind: how it is injected and healed
orders    faults that a worker commits itself, at a place of the step
network   cuts between processes            disk   a full disk
hook      what a run does differently under chaos: the only part that a run ever loads
command   `ftrain chaos`: starts the run, injects, heals, waits, judges
"""
