"""Intervals and time-outs, in seconds, with which replicas detect each other's failure; and what they tell workers."""

BEAT = 0.2  # between two signs of life that the primary sends; the backup answers each
SILENCE = 0.65  # without a message from the primary, after which the backup takes over; more on a busy machine
LEASE = 0.5  # after the primary sent a message that the backup answered; in this time the backup cannot take over
PATIENCE = 1.5  # without an answer from the backup while replies wait for it; then the primary goes on alone
GIVE_UP = 10.0  # without a message from the other replica while the backup is being filled; then either gives up
MISSED = 0.3  # without a message, after which a replica asks the kernel whether the other's process has ended
RECHECK = 1.0  # between two reads of the view by a backup that may have taken over, while the primary is heard
RESTORE = 5.0  # without a view that names another primary, after which a replica is restored from its log
FAREWELL = 2.0  # after a take-over at the end of a job, in which the replica still answers repeated requests

NO_BACKUP = "it waits for its backup"  # what a primary tells workers that may not begin yet

assert LEASE < SILENCE
