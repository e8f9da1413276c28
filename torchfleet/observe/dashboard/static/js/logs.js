// The log of one process: its end, followed; earlier lines; lines that hold a text.

import { byId, element, setText } from "./dom.js";
import { bytes, roleName } from "./format.js";

const PERIOD = 1000, MOST = 1 << 19; // milliseconds between two looks; characters that are kept

export class LogView {
  constructor() {
    this._run = "";
    this._roles = "";
    this._isBusy = false;
    this._clear();
    byId("log-role").addEventListener("change", () => this._open());
    byId("log-earlier").addEventListener("click", () => this._earlier());
    byId("log-follow").addEventListener("change", () => this._follow());
    let timer = 0;
    byId("log-search").addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this._search(), 300);
    });
    new IntersectionObserver(([entry]) => {
      this._isSeen = entry.isIntersecting;
      if (this._isSeen && !this._file) this._open();
    }).observe(byId("logs"));
    setInterval(() => this._follow(), PERIOD);
  }

  update(store, run) {
    const keys = [...store.workers, ...store.of("server")].map((role) => role.key);
    if (run === this._run && keys.join() === this._roles) return;
    const isOther = run !== this._run, before = byId("log-role").value;
    this._run = run;
    this._roles = keys.join();
    byId("log-role").replaceChildren(...keys.map((key) => {
      const option = element("option", "", roleName(key));
      option.value = key;
      return option;
    }));
    if (!isOther && keys.includes(before)) byId("log-role").value = before;
    else this._open();
  }

  show(key) {
    byId("log-role").value = key;
    this._open();
  }

  _clear() {
    this._file = ""; // the one that is followed, up to _end
    this._end = 0;
    this._firstFile = ""; // the one of the first line that is shown, from _start on
    this._start = 0;
    this._size = 0;
    this._hasEarlierFile = false;
    this._text = "";
  }

  async _ask(path, more) {
    const query = new URLSearchParams({ run: this._run, role: byId("log-role").value, ...more });
    const answer = await fetch(`${path}?${query}`).catch(() => null);
    return answer?.ok ? answer.json() : null;
  }

  async _open() {
    this._clear();
    if (!this._isSeen || !byId("log-role").value) return;
    if (byId("log-search").value) return this._search();
    const piece = await this._ask("/api/log", {});
    if (!piece) return this._show("", "no log, or it cannot be read");
    this._file = piece.file;
    this._end = piece.end;
    this._size = piece.size;
    this._takeFirst(piece);
    return this._show(piece.text, this._about(), true);
  }

  /** What was written since. A log that was put aside ends, and the present one is begun. */
  async _follow() {
    if (!byId("log-follow").checked || !this._isSeen || !this._file || this._isBusy || document.hidden || byId("log-search").value) return;
    this._isBusy = true;
    const before = this._file, role = byId("log-role").value;
    const piece = await this._ask("/api/log", { file: this._file, start: this._end });
    this._isBusy = false;
    if (!piece || before !== this._file || role !== byId("log-role").value) return;
    if (piece.file !== this._file) return void this._open();
    if (piece.end > this._end) {
      this._end = piece.end;
      this._size = piece.size;
      this._show((this._text + piece.text).slice(-MOST), this._about(), true);
    } else if (piece.is_aside) {
      this._open();
    }
  }

  async _earlier() {
    if (!this._file || byId("log-search").value) return;
    const more = this._start > 0 ? { file: this._firstFile, end: this._start } : { before_file: 1 };
    const piece = await this._ask("/api/log", more);
    if (!piece || (this._start > 0 && piece.file !== this._firstFile)) return;
    this._takeFirst(piece);
    this._show((piece.text + this._text).slice(0, MOST), this._about(), false);
  }

  async _search() {
    const text = byId("log-search").value;
    if (!text) return this._open();
    const found = await this._ask("/api/find", { text });
    if (!found || text !== byId("log-search").value) return undefined;
    const where = found.searched < found.size ? `the last ${bytes(found.searched)}` : "the whole log";
    const shown = found.lines.length < found.num ? `the last ${found.lines.length} of ` : "";
    return this._show(found.lines.join("\n"), `${shown}${found.num} lines in ${where}`, true);
  }

  _takeFirst(piece) {
    this._firstFile = piece.file;
    this._start = piece.start;
    this._hasEarlierFile = piece.has_earlier_file;
  }

  _about() {
    const before = this._firstFile !== this._file ? " and the file before it" : this._hasEarlierFile ? ", and a file before it" : "";
    const shown = this._firstFile === this._file ? this._end - this._start : this._end;
    return `${bytes(shown)} of ${bytes(this._size)}${before}`;
  }

  _show(text, about, isAtEnd) {
    const place = byId("log-text"), wasAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    const before = place.scrollHeight;
    this._text = text;
    setText(place, text);
    setText(byId("log-about"), about);
    byId("log-earlier").disabled = this._start === 0 && !this._hasEarlierFile;
    if (isAtEnd && (wasAtEnd || byId("log-follow").checked)) place.scrollTop = place.scrollHeight;
    else if (!isAtEnd) place.scrollTop += place.scrollHeight - before;
  }
}
