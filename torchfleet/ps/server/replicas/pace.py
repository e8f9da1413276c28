"""Intervals and time-outs by which replicas detect each other's failure, in seconds."""

BEAT = 0.2  # between two signs of life of a primary, which its backup answers
SILENCE = 0.65  # of a primary, after which its backup takes over
LEASE = 0.5  # after sending a sign of life that the backup answered, in which the backup cannot have taken over
PATIENCE = 1.5  # of a primary with a silent backup, while all acknowledgements wait; then it goes on alone
GIVE_UP = 10.0  # of either replica while the backup is being filled, and replies do not wait for it
OWN_PAUSE = 0.4  # between two ticks; if more passed, this process stood still, not the other
FAREWELL = 2.0  # for which a replica that took over at the end of a job waits for repeated requests

assert LEASE < SILENCE
