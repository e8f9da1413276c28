// The job as the server has told it: a snapshot, and the deltas since.

export class Store {
  constructor() {
    this.clear();
  }

  clear() {
    this.grid = null; // {begin, width}: point i is begin + i * width
    this.head = { state: "starting" };
    this.job = { points: [], values: {} };
    this.roles = new Map(); // key → role with its series
    this.events = [];
    this.saves = [];
    this.now = 0; // of the server, when the last message left
    this.heardAt = 0; // of this page
  }

  snapshot(body) {
    this.clear();
    this.grid = body.grid;
    this.head = body.head;
    this.job = body.job;
    for (const [key, role] of Object.entries(body.roles)) this.roles.set(key, { key, ...role });
    this.events = body.events;
    this.saves = body.saves;
    this._hear(body);
  }

  delta(body) {
    this.head = body.head;
    put(this.job, body.job);
    for (const [key, told] of Object.entries(body.roles)) {
      const { tail, ...role } = told;
      const series = this.roles.get(key)?.series ?? { points: [], values: {} };
      put(series, tail);
      this.roles.set(key, { key, ...role, series });
    }
    this.events = this.events.concat(body.events).slice(-1000);
    this.saves = this.saves.concat(body.saves).slice(-500);
    this._hear(body);
  }

  _hear(body) {
    this.now = body.now;
    this.heardAt = performance.now() / 1000;
  }

  /** Seconds since 1970 on the server's clock, as far as this page can tell. */
  time() {
    return this.now + performance.now() / 1000 - this.heardAt;
  }

  get isOver() {
    return this.head.state === "finished" || this.head.state === "failed";
  }

  /** Roles of these kinds in the order of their numbers. */
  of(...kinds) {
    return [...this.roles.values()]
      .filter((role) => kinds.includes(role.role))
      .sort((a, b) => a.index - b.index || a.replica - b.replica);
  }

  get servers() {
    return this.of("server").filter((role) => !role.status.backup);
  }

  get workers() {
    return this.of("worker", "rank");
  }

  /** Samples per second of all workers, in the time of the one that took the longest, as watch/job_totals.py has it. */
  get meanRate() {
    const statuses = this.workers.map((role) => role.status);
    const seconds = Math.max(0, ...statuses.filter((found) => found.samples_per_s_mean).map((found) => found.samples / found.samples_per_s_mean));
    return seconds && statuses.reduce((total, { samples = 0 }) => total + samples, 0) / seconds;
  }

  /** Seconds since the start of the first number: before it processes were starting. */
  firstTime() {
    const first = (column) => column.findIndex((value) => value !== null);
    const found = Object.values(this.job.values).map(first).filter((index) => index >= 0);
    return found.length ? this.job.points[Math.min(...found)] * this.grid.width : 0;
  }

  /** Seconds since the start of all points, for charts. */
  times() {
    if (!this.grid) return [];
    let last = this.job.points.at(-1) ?? -1;
    for (const role of this.roles.values()) last = Math.max(last, role.series.points.at(-1) ?? -1);
    return Array.from({ length: last + 1 }, (_, point) => point * this.grid.width);
  }
}

/** Put a tail of a series in the place of what was there from its beginning on. */
function put(series, { begin, points, values }) {
  series.points = series.points.slice(0, begin).concat(points);
  const old = series.values;
  series.values = {};
  for (const [name, column] of Object.entries(values)) {
    series.values[name] = (old[name]?.slice(0, begin) ?? Array(begin).fill(null)).concat(column);
  }
}

/** A column of a series at all points of the grid, null where there is nothing. */
export function spread(series, name, length) {
  const made = Array(length).fill(null);
  const column = series.values[name];
  if (column) series.points.forEach((point, i) => { if (point < length) made[point] = column[i]; });
  return made;
}
