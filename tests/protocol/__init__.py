"""A randomised model checker of the step protocol, without JAX.

One `World` is one schedule. Read `worker` (the loop that is checked) beside section 3 of the
design, then `service` and `collectives` (what it runs on, with their real weaknesses), `faults`
and `supervisor` (what happens to it), `checks` (what must never happen) and `world` (the
scheduler and the verdict). `rules` holds a switch for every rule, so that a test can leave one out
and see it missed.

    python -m tests.protocol 11 --steps 40                       one schedule's transcript
    python -m tests.protocol 5 r1_commit=off                     ... without a rule
    python -m tests.protocol --sweep 100                         a table over rules left out
"""
