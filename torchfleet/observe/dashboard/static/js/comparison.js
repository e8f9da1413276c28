// Another run beside the one that is shown: its throughput and metrics, by the time since its start.

import { spread } from "./store.js";

/** The mean over its workers of a metric of a run, or the job's own column, at these seconds since its start. */
export function otherLine(other, field, times) {
  if (!other?.grid) return null;
  const length = other.times().length;
  const columns = field.startsWith("metrics.")
    ? other.workers.map((role) => spread(role.series, field, length))
    : [spread(other.job, field, length)];
  const means = Array.from({ length }, (_, point) => {
    const found = columns.map((column) => column[point]).filter((value) => value !== null && value !== undefined);
    return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null;
  });
  if (means.every((value) => value === null)) return null;
  return at(means, other.grid.width, times);
}

/** A column of points that are `width` seconds apart, at other times: the last number before each, null behind the end. */
export function at(column, width, times) {
  let next = 0, last = null;
  return times.map((time) => {
    while (next < column.length && next * width <= time) last = column[next++] ?? last;
    return time <= (column.length - 1) * width ? last : null;
  });
}

/** Times on the grid of a run, as far as the longer of both runs goes. */
export function sharedTimes(store, other) {
  const times = store.times(), end = other?.grid ? other.times().at(-1) ?? 0 : 0;
  if (!store.grid || !times.length) return times;
  const length = Math.max(times.length, Math.floor(end / store.grid.width) + 1);
  return Array.from({ length }, (_, point) => point * store.grid.width);
}
