// The stream of events of a run: connects, and connects again when the server was away.

const PAUSE = 1000, LONGEST_PAUSE = 10000; // milliseconds between two attempts

export class Stream {
  /** `on`: {snapshot(body), delta(body), state(name)}; names: connecting, live, lost, closed, refused. */
  constructor(on) {
    this._on = on;
    this._source = null;
    this._timer = 0;
    this._last = "";
  }

  open(run) {
    this.close();
    this._run = run;
    this._last = "";
    this._pause = PAUSE;
    this._on.state("connecting");
    this._connect();
  }

  close() {
    clearTimeout(this._timer);
    this._source?.close();
    this._source = null;
  }

  _connect() {
    const query = new URLSearchParams({ run: this._run, last: this._last });
    const source = (this._source = new EventSource(`/events?${query}`));
    const take = (name) => (event) => {
      this._last = event.lastEventId;
      this._pause = PAUSE;
      this._on.state("live");
      this._on[name](JSON.parse(event.data));
    };
    source.addEventListener("snapshot", take("snapshot"));
    source.addEventListener("delta", take("delta"));
    source.addEventListener("open", () => { if (this._last) this._on.state("live"); });
    source.addEventListener("closing", () => this._again("closed"));
    source.addEventListener("error", () => this._again("lost"));
  }

  /** Ask by fetch first, which says why it fails; an EventSource that is refused writes to the console each time. */
  _again(state) {
    this._source?.close();
    this._on.state(state);
    this._timer = setTimeout(async () => {
      const answer = await fetch("/api/runs").catch(() => null);
      if (answer?.ok) return this._connect();
      this._pause = Math.min(LONGEST_PAUSE, 1.5 * this._pause);
      return this._again(answer?.status === 401 ? "refused" : state);
    }, this._pause);
  }
}
