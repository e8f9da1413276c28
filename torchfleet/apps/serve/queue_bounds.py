"""How much work may wait: in samples, and in seconds by the speed at which samples were computed."""

from __future__ import annotations

_KEPT = 0.9  # of the earlier batches in the speed, when another one is counted
_ALWAYS = 32  # samples that may wait however slow the last batches were: a pause must not refuse a few clients
_PAUSE = 0.1  # seconds; a batch that takes more than this and ten times what was expected counts as no more
_SHARE = 8  # an eighth of the queue is kept for small requests
_SMALL = 64  # a small request has at most max_batch / _SMALL samples


class QueueBounds:
    """Decides whether a request may wait. The speed is that of batches, with all that is done between them."""

    def __init__(self, max_batch: int, max_queue: int, max_seconds: float) -> None:
        """`max_batch`, `max_queue`: samples. `max_seconds`: of work that waits. Small requests may use all of it,
        others seven eighths.
        """
        self._max_batch, self._small = max_batch, max(1, max_batch // _SMALL)
        self._max_queue, self._max_seconds = max_queue, max_seconds
        self._num, self._seconds = 0.0, 0.0  # of the last batches
        self._sizes, self._num_sized = 0.0, 0.0  # bytes and samples of the last requests

    def note_batch(self, num: int, seconds: float) -> None:
        """`seconds`: from the moment at which the batch could begin, until its results are there."""
        if self._num:
            seconds = min(seconds, _PAUSE + 10 * num * self._seconds / self._num)
        self._num, self._seconds = _KEPT * self._num + num, _KEPT * self._seconds + seconds

    def note_size(self, num_bytes: int, num: int) -> None:
        """Of a request that was decoded."""
        self._sizes, self._num_sized = _KEPT * self._sizes + num_bytes, _KEPT * self._num_sized + num

    def samples_of(self, num_bytes: int) -> int:
        """About how many samples a request of this size has."""
        return min(self._max_batch, max(1, int(num_bytes * self._num_sized / self._sizes))) if self._sizes else 1

    def has_room(self, num_waiting: int, num: int) -> bool:
        """Whether a request of `num` samples may wait behind these. If none waits, each may."""
        if not num_waiting:
            return True
        if num <= self._small:
            most, most_seconds = self._max_queue, self._max_seconds
        else:
            most = self._max_queue - self._max_queue // _SHARE
            most_seconds = self._max_seconds - self._max_seconds / _SHARE
        if num_waiting + num > most:
            return False
        return num_waiting + num <= _ALWAYS or num_waiting * self._seconds <= most_seconds * self._num
