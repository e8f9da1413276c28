// Histograms of how old values were, and keys that are asked for most.

import { byId, element, setText } from "./dom.js";
import { number } from "./format.js";

const MOST_BARS = 16, MOST_TABLES = 6, MOST_KEYS = 8;

const isNarrow = globalThis.matchMedia?.("(max-width: 700px)") ?? { matches: false }; // a phone: the list is long there
let areKeysOpen = null; // as the reader has left them; null: not touched

export function showBars(store) {
  const dense = merged(store.servers.map((role) => role.status.staleness_dense));
  const sparse = merged(store.servers.map((role) => role.status.staleness_sparse));
  const cards = [
    histogram("staleness_dense", "Age of the network", "updates since the pull, of pushes", dense),
    histogram("staleness_sparse", "Age of rows", "updates since the pull, of pushes", sparse),
    hotKeys(store.servers),
  ].filter(Boolean);
  byId("staleness").hidden = !cards.length;
  const text = cards.map((card) => card.textContent).join();
  const place = byId("bars");
  if (place.dataset.shown !== String(text.length) + text.slice(-4000)) {
    place.dataset.shown = String(text.length) + text.slice(-4000);
    place.replaceChildren(...cards);
  }
}

/** One histogram of several, by age: pairs of an age and a number of pushes. */
export function merged(all) {
  const made = new Map();
  for (const each of all) for (const [age, num] of Object.entries(each ?? {})) made.set(age, (made.get(age) ?? 0) + num);
  return [...made].sort(([a], [b]) => parseFloat(a) - parseFloat(b));
}

function histogram(id, title, unit, counts) {
  const total = counts.reduce((sum, [, num]) => sum + num, 0);
  if (!total) return null;
  const shown = counts.slice(0, MOST_BARS), rest = counts.slice(MOST_BARS);
  const late = rest.reduce((sum, [, num]) => sum + num, 0);
  if (rest.length) shown.push([`${rest[0][0]}+`, late]);
  const most = Math.max(...shown.map(([, num]) => num));
  const rows = shown.map(([age, num]) => bar(age, num, most, `${number(num)} (${((100 * num) / total).toFixed(0)} %)`));
  return card(id, title, unit, `median ${median(counts)}`, element("ol", "", ...rows));
}

/** The age that half of the pushes do not exceed, as the terminal has it; null without pushes. */
export function median(counts) {
  const half = counts.reduce((sum, [, num]) => sum + num, 0) / 2;
  let seen = 0;
  return half ? parseFloat(counts.find(([, num]) => (seen += num) >= half)[0]) : null;
}

function hotKeys(servers) {
  const tables = new Map();
  for (const role of servers) {
    for (const [table, keys] of Object.entries(role.status.hot_keys ?? {})) {
      tables.set(table, (tables.get(table) ?? []).concat(keys));
    }
  }
  if (!tables.size) return null;
  const parts = [...tables].slice(0, MOST_TABLES).flatMap(([table, keys]) => {
    const top = keys.sort((a, b) => b[1] - a[1]).slice(0, MOST_KEYS), most = top[0]?.[1] ?? 1;
    const list = element("ol", "", ...top.map(([key, num]) => bar(String(key), num, most, number(num))));
    return [element("div", "", element("h4", "", table), list)];
  });
  const folded = element("details", "", element("summary", "", `${tables.size} ${tables.size > 1 ? "tables" : "table"}`), element("div", "columns", ...parts));
  folded.open = areKeysOpen ?? !isNarrow.matches;
  folded.addEventListener("toggle", () => { if (folded.isConnected) areKeysOpen = folded.open; });
  return card("hot_keys", "Hot keys", "samples in which a key was seen", "", folded);
}

function bar(label, num, most, text) {
  const meter = element("meter");
  meter.max = most || 1;
  meter.value = num;
  meter.setAttribute("aria-label", label);
  return element("li", "row", element("code", "", label), meter, element("span", "", text));
}

function card(id, title, unit, now, ...content) {
  const right = element("span", "now");
  setText(right, now);
  const made = element("article", "card bars", element("div", "title", element("h3", "", title), element("span", "unit", unit), right), ...content);
  made.dataset.bars = id;
  return made;
}
