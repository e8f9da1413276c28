// The head of the page: what the job is, how it goes, how far it is; and tiles with the numbers of now.

import { median, merged } from "./bars.js";
import { byId, element, insertByOrder, setAttribute, setText } from "./dom.js";
import { bytes, clock, date, duration, metric, number } from "./format.js";
import { metricNames } from "./panels.js";

const SILENT = 60; // seconds without a record after which the page says so; more in a job that is recorded less often

const sum = (values) => values.reduce((total, value) => total + value, 0);
const known = (roles, field) => roles.map((role) => role.status[field]).filter((value) => typeof value === "number");

export function showHead(store, run) {
  const { head } = store, command = head.command ?? [];
  const script = command.find((part) => part.endsWith(".py")) ?? command[command.indexOf("-m") + 1] ?? run;
  const name = script.split("/").at(-1) || "torchfleet";
  setText(byId("job-name"), name);
  const silence = head.last ? store.time() - head.last : 0;
  const period = Math.min(60, (head.last - head.started) / 600); // as watch/due_roles.py has it
  const isSilent = !store.isOver && silence > Math.max(SILENT, 3 * period);
  const isStarting = head.state === "running" && store.roles.size && store.workers.every((role) => role.state === "starting");
  const state = isSilent ? "silent" : isStarting ? "starting" : head.state;
  setText(byId("state"), isSilent ? `no news for ${duration(silence)}` : state);
  setAttribute(byId("state"), "data-state", state);
  document.title = `${state} · ${name} · torchfleet`;
  setText(byId("job-about"), about(store));
  showProgress(store);
}

function about(store) {
  const { head } = store, parts = [];
  const mode = store.workers.find((role) => role.status.mode)?.status.mode;
  if (mode) parts.push(mode);
  const servers = new Set(store.of("server").map((role) => role.index)); // a server and its backup are one
  const counts = [["server", servers.size], [store.of("rank").length ? "rank" : "worker", store.workers.length]];
  const told = counts.filter(([, num]) => num).map(([what, num]) => `${num} ${what}${num > 1 ? "s" : ""}`);
  if (told.length) parts.push(told.join(" × "));
  if (head.started) {
    const end = store.isOver ? head.ended : store.time();
    parts.push(`${store.isOver ? "took" : "running for"} ${duration(end - head.started)}`);
    if (head.attempt) parts.push(`attempt ${head.attempt + 1}`);
    parts.push(`since ${date(head.started)}`);
  }
  return parts.join(" · ");
}

function showProgress(store) {
  const found = store.workers.map((role) => role.status.progress).filter(Boolean);
  const shares = found.filter((each) => each.total > 0).map(shareOf);
  byId("progress").hidden = !found.length;
  if (!found.length) return;
  const parts = [], first = found.reduce((a, b) => (b.epoch < a.epoch ? b : a));
  if (store.head.state === "finished") parts.push(first.epochs ? `${first.epochs} epochs` : "done");
  else if (first.epoch !== undefined) parts.push(`epoch ${first.epoch + 1}${first.epochs ? ` of ${first.epochs}` : ""}`);
  const whole = store.head.state === "finished" ? 1 : shares.length ? sum(shares) / shares.length : null;
  const isOfAll = first.epochs && store.head.state !== "finished"; // the terminal has the share of this epoch
  if (whole !== null) parts.push(`${(100 * whole).toFixed(0)} %${isOfAll ? " of all" : ""}`);
  const left = found.map((each) => each.eta_s).filter((value) => typeof value === "number");
  if (left.length && !store.isOver) parts.push(`${duration(Math.max(...left))} left`);
  if (whole === null) byId("progress-bar").removeAttribute("value");
  else byId("progress-bar").value = whole;
  setText(byId("progress-text"), parts.join(" · "));
}

/** How much of all epochs is done, if their number is known; else of this one. */
function shareOf({ epoch = 0, epochs, done, total }) {
  const here = Math.min(1, done / total);
  return epochs ? Math.min(1, (epoch + here) / epochs) : here;
}

/** Tiles in a fixed order; those without a number are not there. */
export function showTiles(store) {
  const groups = [training, metrics, servers, troubles];
  const tiles = groups.flatMap((group, i) => [...group(store)].map((tile, j) => ({ order: 100 * i + j, ...tile })));
  const place = byId("tiles");
  for (const tile of tiles) {
    let card = [...place.children].find((child) => child.dataset.tile === tile.id);
    if (!card) {
      card = element("div", "tile", element("div", "name"), element("div", "value"), element("div", "note"));
      card.dataset.tile = tile.id;
      insertByOrder(place, card, tile.order);
    }
    const [name, value, note] = card.children;
    setText(name, tile.name);
    name.title = tile.name;
    setText(value, tile.text);
    setAttribute(value, "data-value", String(tile.value));
    setAttribute(value, "title", String(tile.value));
    setText(note, tile.note ?? "");
    setAttribute(card, "data-level", tile.level ?? "");
  }
}

function* training(store) {
  const running = store.workers.filter((role) => role.state === "running" && !role.status.left);
  const speeds = known(running, "samples_per_s"), pace = store.meanRate;
  const mean = pace ? `mean ${number(pace)}` : "";
  if (store.isOver && pace) yield { id: "samples_per_s", name: "samples/s, mean", value: pace, text: number(pace) };
  else if (speeds.length) yield { id: "samples_per_s", name: "samples/s now", value: sum(speeds), text: number(sum(speeds)), note: mean };
  const samples = known(store.workers, "samples"), steps = known(store.workers, "steps");
  if (samples.length) yield { id: "samples", name: "samples", value: sum(samples), text: number(sum(samples)), note: "all workers" };
  if (steps.length) yield { id: "steps", name: "steps", value: sum(steps), text: number(sum(steps)), note: "all workers" };
}

function* metrics(store) {
  for (const name of metricNames(store).slice(0, 8)) {
    const found = store.workers.map((role) => role.status.metrics?.[name]).filter((value) => value !== undefined);
    const numbers = found.filter((value) => typeof value === "number");
    const value = numbers.length < found.length ? "nan" : sum(numbers) / numbers.length;
    const note = found.length > 1 ? `mean of ${found.length}` : "";
    yield { id: `metric.${name}`, name, value, text: metric(value), note, level: value === "nan" ? "bad" : "" };
  }
}

function* servers(store) {
  const memory = known(store.servers, "memory");
  const rows = store.servers.flatMap((role) => Object.values(role.status.rows ?? {}));
  if (rows.length) yield { order: 200, id: "rows", name: "rows", value: sum(rows), text: number(sum(rows)), note: "all tables" };
  if (memory.length) yield { order: 201, id: "memory", name: "server memory", value: sum(memory), text: bytes(sum(memory)), note: `largest ${bytes(Math.max(...memory))}` };
  const age = median(merged(store.servers.map((role) => role.status.staleness_dense)));
  if (age !== null) yield { order: 202, id: "staleness", name: "network age", value: age, text: number(age), note: "updates, median" };
  if (store.saves.length) {
    const last = store.saves.at(-1), num = Math.max(...store.servers.map((role) => role.status.saves?.num ?? 0));
    yield { order: 203, id: "saves", name: "saves", value: num, text: String(num), note: `last at ${clock(last.time)}` };
  }
}

function* troubles(store) {
  const count = (...kinds) => store.events.filter((event) => kinds.includes(event.kind)).length;
  const faults = count("fault", "restart"), warnings = count("warning");
  const level = faults ? "bad" : warnings ? "warn" : "";
  const note = warnings ? `${warnings} warnings` : "no warnings";
  yield { id: "faults", name: "faults", value: faults, text: String(faults), note, level };
}
