// One chart in a card: lines, an optional band, marks of events, a legend with the numbers under the cursor.

import { element, setAttribute, setText } from "./dom.js";
import { clock, duration } from "./format.js";
import { usualTop } from "./scale.js";
import { colour } from "./theme.js";

const HEIGHT = 190;
const PAUSE = 5000; // milliseconds between two drawings of a chart that is out of sight
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const MARKS = { save: "good", restart: "warn", fault: "bad" };

/** What all charts share: the cursor, the span of time that is shown, the marks. */
export class Board {
  constructor(onZoom) {
    this.zoom = null; // [from, to] in seconds since the start; null: all
    this.last = 0; // seconds before the end that are shown; 0: all
    this.marks = []; // {time, kind}
    this.begin = 0; // of the job, in seconds since 1970
    this.first = 0; // seconds since then of the first number
    this.charts = new Set();
    this._onZoom = onZoom;
    this._sync = uPlot.sync("job");
  }

  get syncKey() {
    return this._sync.key;
  }

  setZoom(span) {
    this.zoom = span;
    this._onZoom(span);
    for (const chart of this.charts) chart.rescale();
  }

  /** The span of the x axis for these times. */
  span(times) {
    if (this.zoom) return this.zoom;
    const end = times.at(-1) ?? 1, begin = this.first;
    return [this.last ? Math.max(begin, end - this.last) : begin, Math.max(end, begin + 5)];
  }
}

export class Chart {
  /** `about`: {title, unit, format}. */
  constructor(board, about) {
    this._board = board;
    this._about = about;
    this._names = [];
    this._drawn = null; // what the plot has now
    this._wanted = null; // what it will have when it can be seen
    this._isSeen = false;
    this._timer = 0; // of the next drawing out of sight
    this._drawnAt = -Infinity;
    this._build();
    board.charts.add(this);
  }

  _build() {
    this._now = element("span", "now");
    this._plotArea = element("div", "plot");
    this._plotArea.setAttribute("role", "img");
    this._legend = element("ul", "legend");
    const title = element("div", "title", element("h3", "", this._about.title), element("span", "unit", this._about.unit), this._now);
    this.card = element("article", "card chart", title, this._plotArea, this._legend);
    new ResizeObserver(() => this._resize()).observe(this._plotArea);
    new IntersectionObserver(([entry]) => {
      this._isSeen = entry.isIntersecting;
      if (this._isSeen && this._wanted) this._draw();
    }, { rootMargin: "200px" }).observe(this.card);
  }

  /** Show lines: {times, lines: [{name, values, series, width, band}], now}. Off the screen it is drawn later. */
  update(shown) {
    this._wanted = shown;
    setText(this._now, shown.now ?? "");
    setAttribute(this._plotArea, "aria-label", `${this._about.title}, ${this._about.unit}: now ${shown.now || "unknown"}`);
    if (this._isSeen) this._draw();
    else this._drawLater(Math.max(0, this._drawnAt + PAUSE - performance.now()));
  }

  /** Draw in `wait` milliseconds though the chart is out of sight: pictures of the whole page have it. */
  _drawLater(wait = 0) {
    clearTimeout(this._timer);
    this._timer = setTimeout(() => whenIdle(() => this.drawNow()), wait);
  }

  /** Draw what waits until it is seen. */
  drawNow() {
    if (this._wanted) this._draw();
  }

  rescale() {
    if (this._plot && this._isSeen && !this._wanted) this._fit();
    else if (this._drawn) {
      this._wanted ??= this._drawn;
      this._drawLater();
    }
  }

  /** Draw anew with other colours. */
  repaint() {
    this._plot?.destroy();
    this._plot = null;
    this._wanted ??= this._drawn;
    if (!this._wanted) return;
    if (this._isSeen) this._draw();
    else this._drawLater();
  }

  _draw() {
    const shown = this._wanted;
    this._wanted = null;
    clearTimeout(this._timer);
    this._drawnAt = performance.now();
    this._drawn = shown;
    const names = shown.lines.map((line) => `${line.name}|${line.series}|${line.width}|${line.band ?? ""}`).join("\n") + shown.lines.map((line) => (line.isFaint ? "f" : line.isDashed ? "d" : "")).join();
    const data = [shown.times, ...shown.lines.map((line) => line.values)];
    if (!this._plot || names !== this._names) {
      this._plot?.destroy();
      this._names = names;
      this._plot = new uPlot(this._options(shown.lines), data, this._plotArea);
      this._makeLegend(shown.lines);
    } else {
      this._plot.setData(data, false);
    }
    this._fit();
    this._showLegend();
  }

  _fit() {
    const [min, max] = this._board.span(this._drawn.times);
    this._plot.setScale("x", { min, max });
  }

  _resize() {
    if (this._plot && this._plotArea.clientWidth) this._plot.setSize({ width: this._plotArea.clientWidth, height: HEIGHT });
  }

  _options(lines) {
    const format = this._about.format, grid = { stroke: colour("grid"), width: 1 }, text = colour("muted");
    const font = "11px system-ui, sans-serif", board = this._board;
    const bands = lines.flatMap((line, i) => (line.band === "top" ? [{ series: [i + 1, i + 2], fill: colour("band") }] : []));
    return {
      width: this._plotArea.clientWidth || 400,
      height: HEIGHT,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      scales: { x: { time: false }, y: { range: (u, min, max) => this._range(u, min, max) } },
      axes: [
        { stroke: text, grid, ticks: grid, font, incrs: STEPS, space: 60, size: 28, values: (u, splits) => splits.map(duration) },
        { stroke: text, grid, ticks: { show: false }, font, size: (u, values) => axisWidth(values), values: (u, splits) => splits.map((value) => short(format(value))), space: 34 },
      ],
      series: [{}, ...lines.map((line) => this._series(line))],
      bands,
      cursor: {
        sync: { key: board.syncKey, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false,
        bind: { dblclick: () => () => board.setZoom(null) },
      },
      hooks: {
        setCursor: [() => this._showLegend()],
        setSelect: [(u) => this._select(u)],
        draw: [(u) => this._drawMarks(u)],
      },
    };
  }

  _series(line) {
    const stroke = line.band ? "transparent" : colour(`series-${line.series}`);
    const look = { alpha: line.isFaint ? 0.3 : 1, dash: line.isDashed ? [6, 4] : undefined };
    return { label: line.name, stroke, width: line.width ?? 1.5, spanGaps: true, ...look, points: { show: (u) => u.data[0].length < 3 } };
  }

  _range(plot, min, max) {
    if (min === null || min === undefined) return [0, 1];
    if (this._about.isClipped) {
      const [begin, end] = plot.series[0].idxs ?? [0, plot.data[0].length - 1];
      max = usualTop(plot.data.slice(1).map((values) => values.slice(begin, end + 1)));
    }
    if (this._about.from0) return [0, max > 0 ? max * 1.08 : 1];
    const room = (max - min || Math.abs(max) || 1) * 0.08;
    return [min >= 0 && min - room < 0 ? 0 : min - room, max + room];
  }

  _select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const span = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this._board.setZoom(span);
  }

  _drawMarks(plot) {
    const { ctx, bbox } = plot, { min, max } = plot.scales.x;
    ctx.save();
    ctx.globalAlpha = 0.6;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { time, kind } of this._board.marks) {
      const since = time - this._board.begin;
      if (since < min || since > max) continue;
      const x = Math.round(plot.valToPos(since, "x", true));
      ctx.strokeStyle = colour(MARKS[kind]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  _makeLegend(lines) {
    this._values = [];
    this._legend.replaceChildren(...lines.map((line) => {
      const value = element("b");
      this._values.push(value);
      const swatch = element("span", line.band ? "swatch band" : `swatch s${line.series}`);
      const label = element("span", "label", line.name);
      label.title = line.name;
      const item = element("li", "", swatch, label, value);
      item.hidden = Boolean(line.isFaint);
      return item;
    }));
    this._legend.hidden = lines.every((line) => line.isFaint || !line.name);
  }

  /** Numbers under the cursor, or the last ones. */
  _showLegend() {
    const shown = this._drawn;
    if (!shown || !this._plot || !this._values) return;
    const index = this._plot.cursor.idx, format = this._about.legendFormat ?? this._about.format;
    const isAt = index !== null && index !== undefined && this._plot.cursor.left >= 0;
    shown.lines.forEach((line, i) => {
      const value = isAt ? line.values[index] : line.values.findLast((found) => found !== null);
      setText(this._values[i], value === null || value === undefined ? "" : format(value));
    });
    const time = shown.times[index];
    setText(this._now, isAt && time !== undefined ? `${duration(time)} · ${clock(time + this._board.begin)}` : shown.now ?? "");
  }
}

const whenIdle = (work) => (globalThis.requestIdleCallback ? requestIdleCallback(work, { timeout: 500 }) : setTimeout(work, 200));

/** "20.0 k" → "20 k": ticks are round numbers. */
function short(text) {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

function axisWidth(values) {
  const longest = Math.max(0, ...(values ?? []).map((text) => text.length));
  return 14 + 6.3 * longest;
}
