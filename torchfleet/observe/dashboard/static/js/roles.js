// The table of processes: sorted, filtered, folded. Selected ones get lines of their own in charts of many.

import { byId, element, setAttribute, setText } from "./dom.js";
import { bytes, metric, number, roleName, share } from "./format.js";

const value = (field) => (role) => role.status[field];
const STATE = { id: "state", read: (role) => (role.state === "failed" ? `ended with ${role.returncode}` : role.state) };
const COMMON = [{ id: "process", read: (role) => roleName(role.key), order: (role) => role.index }, STATE, { id: "host", read: (role) => role.status.host ?? "" }];
const LAST = [
  { id: "memory", read: value("memory"), format: bytes },
  { id: "restarts", read: (role) => role.restarts, format: number },
];
const COLUMNS = {
  heter_worker: [
    ...COMMON,
    { id: "workers", read: value("sessions"), format: number },
    { id: "passes", read: value("passes"), format: number },
    { id: "busy", read: value("busy"), format: share },
    { id: "errors", read: value("errors"), format: number },
    ...LAST,
  ],
  worker: [
    ...COMMON,
    { id: "steps", read: value("steps"), format: (found) => found.toLocaleString("en-US") },
    { id: "steps/s", read: value("steps_per_s"), format: number },
    { id: "samples/s", read: value("samples_per_s"), format: number },
    { id: "queue", read: value("queue"), format: number },
    { id: "waits", read: value("waiting"), format: share },
    { id: "retries", read: value("retries"), format: number },
    ...LAST,
    { id: "metrics", isText: true, read: (role) => Object.entries(role.status.metrics ?? {}).map(([name, found]) => `${name} ${metric(found)}`).join(", ") },
  ],
  server: [
    ...COMMON,
    { id: "requests/s", read: value("requests_per_s"), format: number },
    { id: "requests", read: value("requests"), format: number },
    { id: "busy", read: value("busy"), format: share },
    { id: "rows", read: (role) => Object.values(role.status.rows ?? {}).reduce((sum, num) => sum + num, 0), format: number },
    { id: "errors", read: value("errors"), format: number },
    ...LAST,
    { id: "kind", isText: true, read: (role) => (role.status.backup ? "backup" : role.status.deposed ? "deposed" : "") },
  ],
};

export class RoleTables {
  constructor(onSelect) {
    this.selected = new Set();
    this._onSelect = onSelect;
    this._groups = new Map();
    byId("role-filter").addEventListener("input", () => this._last && this.update(this._last));
  }

  update(store) {
    this._last = store;
    this._group("server", "Servers", store.of("server"));
    this._group("worker", store.of("rank").length ? "Ranks" : "Workers", store.workers);
    this._group("heter_worker", "Heter workers", store.of("heter_worker"));
    const shown = [...this._groups.values()].reduce((sum, group) => sum + group.num, 0);
    const hint = store.workers.length > 8 ? "; a click on one shows it in the charts" : "";
    setText(byId("role-count"), `${shown} of ${store.roles.size} shown${hint}`);
  }

  _group(kind, title, roles) {
    let group = this._groups.get(kind);
    if (!roles.length && !group) return;
    if (!group) this._groups.set(kind, (group = this._make(kind, title)));
    const used = group.columns.filter((column) => roles.some((role) => (column.read(role) ?? "") !== ""));
    group.table.dataset.columns = used.map((column) => column.id).join();
    const wanted = byId("role-filter").value.toLowerCase().split(",").map((part) => part.trim()).filter(Boolean);
    const shown = roles.filter((role) => matches(role, wanted));
    group.num = shown.length;
    const failed = roles.filter((role) => role.state === "failed").length;
    setText(group.summary, ` ${roles.length}${failed ? `, ${failed} failed` : ""}`);
    this._sort(shown, group);
    this._fill(group, used, shown);
  }

  _make(kind, title) {
    const summary = element("span", "muted"), head = element("tr"), body = element("tbody", "select");
    const table = element("table", "", element("thead", "", head), body);
    const scroll = element("div", "scroll", table);
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", title);
    const details = element("details", "card roles", element("summary", "", title, summary), scroll);
    details.open = true;
    if (kind === "server") byId("role-tables").prepend(details);
    else byId("role-tables").append(details);
    const group = { kind, table, head, body, summary, columns: COLUMNS[kind], rows: new Map(), sort: "process", up: true, num: 0, shownHead: "" };
    return group;
  }

  _sort(roles, group) {
    const column = group.columns.find((each) => each.id === group.sort);
    const read = column.order ?? column.read, sign = group.up ? 1 : -1;
    roles.sort((a, b) => {
      const [x, y] = [read(a) ?? -Infinity, read(b) ?? -Infinity];
      return sign * (x < y ? -1 : x > y ? 1 : a.index - b.index);
    });
  }

  _fill(group, used, roles) {
    this._fillHead(group, used);
    const rows = roles.map((role) => this._row(group, role, used));
    const isSame = rows.length === group.body.children.length && rows.every((row, i) => group.body.children[i] === row);
    if (!isSame) group.body.replaceChildren(...rows);
  }

  _fillHead(group, used) {
    const wanted = used.map((column) => column.id).join() + group.sort + group.up;
    if (group.shownHead === wanted) return;
    group.shownHead = wanted;
    group.rows.clear();
    const had = group.head.contains(document.activeElement) ? document.activeElement.textContent : null;
    group.head.replaceChildren(...used.map((column) => {
      const button = element("button", "", column.id);
      button.type = "button";
      button.addEventListener("click", () => {
        group.up = group.sort === column.id ? !group.up : column.format === undefined;
        group.sort = column.id;
        this.update(this._last);
      });
      const cell = element("th", column.format ? "num" : "", button);
      cell.scope = "col";
      if (group.sort === column.id) cell.setAttribute("aria-sort", group.up ? "ascending" : "descending");
      return cell;
    }));
    if (had) [...group.head.querySelectorAll("button")].find((button) => button.textContent === had)?.focus();
  }

  _row(group, role, used) {
    let row = group.rows.get(role.key);
    if (!row) {
      row = element("tr", "", ...used.map((column) => element("td", column.format ? "num" : column.isText ? "text" : "")));
      row.dataset.role = role.key;
      row.tabIndex = 0;
      row.addEventListener("click", () => this._toggle(role.key));
      row.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this._toggle(role.key); } });
      group.rows.set(role.key, row);
    }
    used.forEach((column, i) => {
      const found = column.read(role);
      setText(row.children[i], typeof found === "number" && column.format ? column.format(found) : String(found ?? ""));
      if (column === STATE) row.children[i].className = `state-${role.state}`;
    });
    setAttribute(row, "aria-selected", String(this.selected.has(role.key)));
    return row;
  }

  _toggle(key) {
    if (!this.selected.delete(key)) this.selected.add(key);
    this.update(this._last);
    this._onSelect(key);
  }
}

/** Whether one of the texts is found in what is said of a process. */
function matches(role, wanted) {
  const text = `${roleName(role.key)} ${role.key} ${role.state} ${role.status.host ?? ""}`.toLowerCase();
  return !wanted.length || wanted.some((part) => text.includes(part));
}
