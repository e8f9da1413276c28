// What happened, the newest first; saves; settings.

import { byId, element } from "./dom.js";
import { bytes, clock, date, duration, number, roleName } from "./format.js";

const MOST = 300;

export class EventLists {
  constructor() {
    this._shown = "";
  }

  update(store, run) {
    const state = [run, store.events.length, store.events.at(-1)?.time, store.saves.length, store.saves.at(-1)?.time].join();
    if (state !== this._shown) {
      this._shown = state;
      this._showEvents(store.events);
      this._showSaves(store.saves);
    }
    this._showSettings(store, run);
  }

  _showEvents(events) {
    byId("event-empty").hidden = events.length > 0;
    byId("event-list").replaceChildren(...events.slice(-MOST).reverse().map((event) => {
      const time = element("time", "", clock(event.time));
      time.title = date(event.time);
      return element("li", "", time, element("span", `kind-${event.kind}`, event.kind), element("span", "text", event.text));
    }));
  }

  _showSaves(saves) {
    byId("save-empty").hidden = saves.length > 0;
    byId("save-table").hidden = !saves.length;
    byId("save-table").tBodies[0].replaceChildren(...saves.slice(-MOST).reverse().map((save) => element(
      "tr", "",
      element("td", "", clock(save.time)),
      element("td", "", roleName(save.role)),
      element("td", "text", save.dirname ?? ""),
      element("td", "num", number(save.last_rows)),
      element("td", "num", bytes(save.last_bytes)),
      element("td", "num", typeof save.last_seconds === "number" ? `${number(save.last_seconds)} s` : "–"),
    )));
  }

  _showSettings(store, run) {
    const { head } = store;
    const hosts = [...new Set([...store.roles.values()].map((role) => role.status.host).filter(Boolean))];
    const found = [
      ["command", (head.command ?? []).join(" ")], ["run", run], ["release of torchfleet", head.version ?? ""],
      ["started", head.started ? date(head.started) : ""], ["ended", head.ended ? `${date(head.ended)}, after ${duration(head.ended - head.started)}` : ""],
      ["attempt", head.attempt ? String(head.attempt + 1) : ""], ["hosts", hosts.join(", ")],
    ].filter(([, text]) => text);
    const list = byId("setting-list"), wanted = JSON.stringify(found);
    if (list.dataset.shown === wanted) return;
    list.dataset.shown = wanted;
    list.replaceChildren(...found.flatMap(([name, text]) => [element("dt", "", name), element("dd", "", text)]));
  }
}

/** Moments to mark in charts. */
export function marksOf(store) {
  const events = store.events.filter((event) => event.kind === "restart" || event.kind === "fault");
  const saves = new Map(store.saves.map((save) => [Math.round(save.time), { time: save.time, kind: "save" }]));
  return [...events.map(({ time, kind }) => ({ time, kind })), ...saves.values()];
}

export function showMarks(marks) {
  const kinds = ["save", "restart", "fault"].filter((kind) => marks.some((mark) => mark.kind === kind));
  const place = byId("marks");
  place.hidden = !kinds.length;
  if (place.dataset.shown === kinds.join()) return;
  place.dataset.shown = kinds.join();
  place.replaceChildren(...kinds.map((kind) => element("span", kind, kind)));
}

