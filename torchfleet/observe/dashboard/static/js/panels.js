// Which charts a job has, and the lines of each.

import { Chart } from "./chart.js";
import { otherLine, sharedTimes } from "./comparison.js";
import { insertByOrder } from "./dom.js";
import { bytes, metric, milliseconds, number, roleName, share } from "./format.js";
import { smoothed } from "./smoothing.js";
import { spread } from "./store.js";

const MOST_LINES = 8; // of single processes: more of them become a band
const MOST_METRICS = 24;

// Charts of processes: the field of their status, and how it is shown.
const OF_WORKERS = [
  { field: "samples_per_s", title: "Throughput of each worker", unit: "samples/s", format: number, from0: true },
  { field: "waiting", title: "Waiting for servers", unit: "share of the time", format: share, from0: true, isClipped: true },
  { field: "pull_wait_ms", title: "Wait for a pull", unit: "per step", format: milliseconds, from0: true, isClipped: true },
  { field: "push_wait_ms", title: "Wait for a push", unit: "per step", format: milliseconds, from0: true, isClipped: true },
  { field: "queue", title: "Steps in the queue", unit: "of each worker", format: number, from0: true },
  { field: "memory", title: "Memory of workers", unit: "resident", format: bytes, from0: true },
];
const OF_SERVERS = [
  { field: "requests_per_s", title: "Requests", unit: "per second and server", format: number, from0: true },
  { field: "busy", title: "Busy servers", unit: "share of the time", format: share, from0: true },
  { field: "memory", title: "Memory of servers", unit: "resident", format: bytes, from0: true },
];
const OF_TABLES = [
  { field: "rows", title: "Rows of tables", unit: "all servers", format: number, from0: true },
  { field: "bytes", title: "Size of tables", unit: "all servers", format: bytes, from0: true },
  { field: "evicted", title: "Rows evicted", unit: "since the start", format: number, from0: true },
];

/** Makes charts when there is something to show in them, and hands them new lines. */
export class Panels {
  /** `smoothing`: has the weight with which metrics are smoothed. */
  constructor(board, training, servers, smoothing) {
    this._board = board;
    this._smoothing = smoothing;
    this._compared = null;
    this._places = { training, servers };
    this._charts = new Map();
  }

  /** `compared`: {store, name} of another run that is shown beside this one, or null. */
  update(store, selected, compared = null) {
    this._compared = compared;
    const times = sharedTimes(store, compared?.store);
    this._board.begin = store.grid?.begin ?? 0;
    this._board.first = store.firstTime();
    this._job(store, times);
    for (const [i, name] of metricNames(store).slice(0, MOST_METRICS).entries()) {
      const about = { order: 1 + i, title: name, unit: "as reported by workers", format: number, legendFormat: metric };
      this._group("training", `metrics.${name}`, about, store.workers, times, selected, true);
    }
    OF_WORKERS.forEach((about, i) => this._group("training", about.field, { order: 100 + i, ...about }, store.workers, times, selected));
    OF_SERVERS.forEach((about, i) => this._group("servers", `server.${about.field}`, { order: i, ...about }, store.servers, times, selected));
    OF_TABLES.forEach((about, i) => this._tables({ order: 100 + i, ...about }, store, times));
  }

  /** Draw what was off the screen: paper and pictures of the whole page have it all. */
  drawAll() {
    for (const chart of this._charts.values()) chart.drawNow();
  }

  repaint() {
    for (const chart of this._charts.values()) chart.repaint();
  }

  _job(store, times) {
    const values = spread(store.job, "samples_per_s", times.length);
    if (values.every((value) => value === null)) return;
    const about = { order: 0, title: "Throughput", unit: "samples/s, all workers", format: number, from0: true };
    const last = store.isOver ? "" : number(values.findLast((value) => value !== null));
    const line = { name: this._compared ? "this run" : "", values, series: 0, width: 2 };
    this._chart("training", "job", about).update({ times, lines: [line, ...this._otherLines("samples_per_s", times)], now: last });
  }

  _group(place, id, about, roles, times, selected, isMetric = false) {
    const field = isMetric ? id : about.field;
    const having = roles.filter((role) => role.series.values[field]?.some((value) => value !== null));
    if (!having.length) return;
    const lines = having.length <= MOST_LINES
      ? having.map((role, i) => ({ name: roleName(role.key), values: spread(role.series, field, times.length), series: i, width: 1.5 }))
      : summary(having, field, times.length, selected);
    const drawn = isMetric ? [...this._smoothed(lines), ...this._otherLines(field, times)] : lines;
    const now = having.map((role) => role.series.values[field].findLast((value) => value !== null));
    const mean = now.reduce((sum, value) => sum + value, 0) / now.length;
    const format = about.legendFormat ?? about.format;
    this._chart(place, id, about).update({ times, lines: drawn, now: having.length > 1 ? `mean ${format(mean)}` : format(mean) });
  }

  /** Smoothed lines in front of the numbers as they are, which are faint then. */
  _smoothed(lines) {
    const weight = this._smoothing?.weight ?? 0;
    if (!weight) return lines;
    const faint = lines.filter((line) => !line.band).map((line) => ({ ...line, name: "", width: 1, isFaint: true }));
    return [...lines.map((line) => ({ ...line, values: smoothed(line.values, weight) })), ...faint];
  }

  /** The line of the run that is compared with this one, dashed. */
  _otherLines(field, times) {
    const values = this._compared && otherLine(this._compared.store, field, times);
    if (!values) return [];
    const shown = field.startsWith("metrics.") ? smoothed(values, this._smoothing?.weight ?? 0) : values;
    return [{ name: this._compared.name, values: shown, series: 7, width: 2, isDashed: true }];
  }

  _tables(about, store, times) {
    const names = Object.keys(store.job.values).filter((name) => name.startsWith(`${about.field}.`));
    if (!names.length) return;
    if (about.field === "evicted" && names.every((name) => !store.job.values[name].some((value) => value > 0))) return;
    const last = (name) => store.job.values[name].findLast((value) => value !== null) ?? 0;
    names.sort((a, b) => last(b) - last(a));
    const lines = names.slice(0, MOST_LINES).map((name, series) => ({
      name: name.slice(about.field.length + 1), values: spread(store.job, name, times.length), series, width: 1.5,
    }));
    const sum = names.reduce((total, name) => total + last(name), 0);
    const rest = names.length > MOST_LINES ? `, the ${MOST_LINES} largest of ${names.length} shown` : "";
    this._chart("servers", about.field, about).update({ times, lines, now: `all ${about.format(sum)}${rest}` });
  }

  _chart(place, id, about) {
    if (!this._charts.has(id)) {
      const chart = new Chart(this._board, about);
      chart.card.dataset.chart = id;
      this._charts.set(id, chart);
      insertByOrder(this._places[place], chart.card, about.order);
      this._places[place].parentElement.hidden = false;
    }
    return this._charts.get(id);
  }
}

export function metricNames(store) {
  const names = new Set();
  for (const role of store.workers) for (const name of Object.keys(role.status.metrics ?? {})) names.add(name);
  return [...names];
}

/** Many processes: the median, the span from the lowest to the highest, and lines of those that are selected. */
function summary(roles, field, length, selected) {
  const low = Array(length).fill(null), high = Array(length).fill(null), middle = Array(length).fill(null);
  const columns = roles.map((role) => carried(spread(role.series, field, length), role.series.points.at(-1)));
  for (let point = 0; point < length; point++) {
    const found = columns.map((column) => column[point]).filter((value) => value !== null).sort((a, b) => a - b);
    if (!found.length) continue;
    low[point] = found[0];
    high[point] = found.at(-1);
    middle[point] = found[found.length >> 1];
  }
  const chosen = roles.filter((role) => selected.has(role.key)).slice(0, MOST_LINES - 1);
  return [
    { name: "highest", values: high, series: 0, width: 0, band: "top" },
    { name: "lowest", values: low, series: 0, width: 0, band: "bottom" },
    { name: `median of ${roles.length}`, values: middle, series: 0, width: 2 },
    ...chosen.map((role, i) => ({ name: roleName(role.key), values: spread(role.series, field, length), series: i + 1, width: 1.5 })),
  ];
}

/** A number stays until the next one: a process is recorded when something has changed. */
function carried(values, end) {
  let last = null;
  return values.map((value, point) => (point > end ? null : (last = value ?? last)));
}
