"""Numbers over time, thinned so that a chart has at most some hundred points, however long the job has run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Value = float | int | None


class Grid:
    """Points of time that all series of a job share: point i is `begin + i * width` seconds since 1970.

    The width doubles when there would be more than `most` points.
    """

    def __init__(self, begin: float, most: int, width: float = 1.0) -> None:
        self.begin, self.most, self.width = begin, most, width

    def point(self, time: float) -> int:
        return max(0, int((time - self.begin) / self.width))

    def doublings(self, time: float) -> int:
        """Return how many times the width must double before this time is on the grid."""
        num, point = 0, self.point(time)
        while point >= self.most:
            num, point = num + 1, point // 2
        return num

    def double(self) -> None:
        self.width *= 2


class Columns:
    """Values by name at the points of a grid. The last value at a point wins; None marks a point without a value."""

    def __init__(self) -> None:
        self.points: list[int] = []
        self.values: dict[str, list[Value]] = {}
        self._num_told = 0  # points that `tail` has handed out

    def put(self, point: int, row: Mapping[str, Value], most_names: int = 200) -> None:
        """Set values at this point, or at the last point if a clock went back. Names beyond `most_names` are
        dropped."""
        if not self.points or point > self.points[-1]:
            self.points.append(point)
            for column in self.values.values():
                column.append(None)
        for name, value in row.items():
            if name not in self.values:
                if len(self.values) >= most_names:
                    continue
                self.values[name] = [None] * len(self.points)
            if value is not None:
                self.values[name][-1] = value

    def tail(self) -> dict[str, Any]:
        """Return the new values since the last call and the index where they begin. They include the last point of that
        call, which may have changed."""
        begin, self._num_told = max(0, self._num_told - 1), len(self.points)
        values = {name: column[begin:] for name, column in self.values.items()}
        return {"begin": begin, "points": self.points[begin:], "values": values}

    def halve(self) -> None:
        """Merge every two points into one, after the width of the grid has doubled."""
        points: list[int] = []
        values: dict[str, list[Value]] = {name: [] for name in self.values}
        for index, point in enumerate(self.points):
            is_new = not points or points[-1] != point // 2
            if is_new:
                points.append(point // 2)
            for name, column in self.values.items():
                if is_new:
                    values[name].append(column[index])
                elif column[index] is not None:
                    values[name][-1] = column[index]
        self.points, self.values = points, values
        self._num_told = 0  # all points have new numbers
