"""Silence counts while this process runs on schedule, and is judged by how late messages have come before."""

from __future__ import annotations

from torchfleet.ps.net.transport import TICK
from torchfleet.ps.server.replicas.silence import Silence

LIMIT = 0.65


def seconds_to(silence: Silence, now: float, gap: float, limit: float = LIMIT, most: int = 1000) -> float:
    """How long it takes until the limit is exceeded, with a look after every `gap` seconds."""
    start = now
    for _ in range(most):
        now += gap
        silence.look(now)
        if silence.exceeds(limit):
            return now - start
    raise AssertionError("it is never exceeded")


def heard_every(silence: Silence, now: float, pause: float, times: int) -> float:
    for _ in range(times):
        end = now + pause
        while now < end - TICK / 2:
            now += TICK
            silence.look(now)
            assert not silence.exceeds(LIMIT)
        silence.hear()
    return now


def test_on_schedule_a_limit_is_what_it_says() -> None:
    silence = Silence(100.0)
    now = heard_every(silence, 100.0, 0.2, 50)
    assert LIMIT <= seconds_to(silence, now, TICK) <= LIMIT + 3 * TICK


def test_a_process_that_is_late_counts_a_part_of_its_own_delay() -> None:
    took = seconds_to(Silence(100.0), 100.0, 1.0)
    assert took > 6 * LIMIT, "it may have messages that it has not read"
    assert took < 20 * LIMIT, "the other one is dead all the same"


def test_a_look_that_is_late_decides_nothing() -> None:
    silence = Silence(100.0)
    for look in range(1, 12):  # 0.55 s
        silence.look(100.0 + look * TICK)
    silence.look(130.0)
    assert not silence.exceeds(LIMIT)
    silence.hear()
    assert seconds_to(silence, 130.0, TICK) >= LIMIT


def test_limits_grow_with_late_messages_within_bounds_and_shrink_again() -> None:
    silence = Silence(100.0)
    now = heard_every(silence, 100.0, 0.5, 3)
    grown = seconds_to(silence, now, TICK)
    assert 2 * 0.5 < grown < 4 * LIMIT
    silence.hear()
    now = heard_every(silence, now + grown, 0.2, 300)  # a minute
    assert seconds_to(silence, now, TICK) <= LIMIT + 3 * TICK


def test_the_counted_time_is_never_more_than_what_has_passed() -> None:
    silence = Silence(100.0)
    for look in range(100):
        silence.look(100.0 + look * 0.003)
    assert silence.seconds <= 0.3
    silence.look(99.0)
    assert silence.seconds <= 0.3, "a clock that goes back counts nothing"


def test_time_before_a_message_does_not_count() -> None:
    silence = Silence(100.0)
    for look in range(1, 40):  # a message comes 1 ms before every fourth look
        if look % 4 == 0:
            silence.hear()
        silence.look(100.0 + look * TICK)
        assert silence.seconds <= (look % 4) * TICK + 0.001 + 1e-9
