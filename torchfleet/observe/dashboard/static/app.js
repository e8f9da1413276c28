// The page: a stream fills the store, and everything that shows it is told once a frame.

import { showBars } from "./js/bars.js";
import { Board } from "./js/chart.js";
import { byId, element, setText } from "./js/dom.js";
import { EventLists, marksOf, showMarks } from "./js/events.js";
import { showHead, showTiles } from "./js/header.js";
import { LogView } from "./js/logs.js";
import { Panels } from "./js/panels.js";
import { RoleTables } from "./js/roles.js";
import { watchServed } from "./js/served.js";
import { Smoothing } from "./js/smoothing.js";
import { Store } from "./js/store.js";
import { Stream } from "./js/stream.js";
import { startTheme } from "./js/theme.js";

const LINKS = { connecting: "connecting", live: "live", lost: "disconnected", closed: "not served any more", refused: "no access" };

const store = new Store();
const board = new Board(showZoom);
const smoothing = new Smoothing(byId("smoothing"), byId("smoothing-weight"), () => draw());
const panels = new Panels(board, byId("charts-training"), byId("charts-servers"), smoothing);
const roles = new RoleTables(() => draw());
const events = new EventLists();
const logs = new LogView();
const stream = new Stream({
  snapshot: (body) => { document.body.dataset.connected = ""; store.snapshot(body); draw(); },
  delta: (body) => { store.delta(body); draw(); },
  state: showLink,
});
const other = new Store(); // the run that is compared with this one
const otherStream = new Stream({
  snapshot: (body) => { other.snapshot(body); draw(); },
  delta: (body) => { other.delta(body); draw(); },
  state: () => {},
});
globalThis.dashboard = { store, other }; // for the console of a browser
let run = "", compared = "", link = "", isDrawn = true;

function draw() {
  if (!isDrawn) return;
  isDrawn = false;
  requestAnimationFrame(() => {
    isDrawn = true;
    const begin = performance.now();
    board.marks = marksOf(store);
    showMarks(board.marks);
    showHead(store, run);
    showTiles(store);
    panels.update(store, roles.selected, compared ? { store: other, name: compared } : null);
    showBars(store);
    showEmpty();
    roles.update(store);
    events.update(store, run);
    logs.update(store, run);
    document.body.dataset.drawMs = (performance.now() - begin).toFixed(1);
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
  });
}

/** What a new page would leave open: whether more will come. */
function showEmpty() {
  const isEmpty = !byId("charts-training").childElementCount;
  byId("training-empty").hidden = !isEmpty;
  setText(byId("training-empty"), store.isOver ? "No step was recorded." : "Nothing yet: numbers come with the first steps.");
  if (link === "live") setText(byId("link"), store.isOver ? "recorded" : LINKS.live);
}

function showLink(state) {
  if (state === link) return;
  link = state;
  const isOver = store.isOver && state !== "live";
  byId("link").dataset.state = isOver ? "closed" : state;
  setText(byId("link"), LINKS[isOver ? "closed" : state]);
  const texts = {
    lost: "The server of this page does not answer. What is shown is the last that was heard; the page goes on by itself when the server is back.",
    closed: `fleetrun has ended, and this page with it. To see it again: fleet dashboard LOG_DIR/${run}`,
    refused: "A token is needed: open the address that was printed at the start, with #token= at its end.",
  };
  const text = texts[isOver ? "closed" : state] ?? "";
  byId("notice").hidden = !text;
  byId("waiting").hidden = Boolean(text); // the notice says more
  setText(byId("notice"), text);
}

function showZoom(span) {
  byId("unzoom").hidden = !span;
  byId("range").value = span ? "zoom" : String(board.last);
}

byId("unzoom").addEventListener("click", () => board.setZoom(null));
byId("range").addEventListener("change", (event) => {
  board.last = Number(event.target.value) || 0;
  board.setZoom(null);
});
function choose() {
  location.search = `?${new URLSearchParams({ run: byId("run").value, compare: byId("compare").value })}`;
}

byId("run").addEventListener("change", choose);
byId("compare").addEventListener("change", choose);
addEventListener("beforeprint", () => panels.drawAll());
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
startTheme(byId("theme"), () => panels.repaint());
setInterval(() => { if (store.grid && !document.hidden) showHead(store, run); }, 1000);

/** The token of the address, given once for a cookie, and taken out of the address. */
async function logIn(given) {
  await fetch("/login", { method: "POST", body: given });
  history.replaceState(null, "", location.pathname + location.search);
}

/** Offer the other runs for a comparison, and begin the one that was asked for. */
function startComparison(names, wanted) {
  compared = names.includes(wanted) ? wanted : "";
  byId("compare-label").hidden = !names.length;
  byId("compare").replaceChildren(element("option", "", ""), ...names.map((name) => element("option", "", name)));
  byId("compare").value = compared;
  if (compared) otherStream.open(compared);
}

async function start() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token"), asked = new URLSearchParams(location.search);
  if (token) await logIn(token);
  const answer = await fetch("/api/runs").catch(() => null);
  if (answer?.status === 401) return showLink("refused");
  const told = answer?.ok ? await answer.json() : { runs: [], compare: "" }, names = told.runs;
  run = names.includes(asked.get("run")) ? asked.get("run") : names[0] ?? "";
  startComparison([...new Set([...names, told.compare])].filter((name) => name && name !== run), asked.get("compare") ?? told.compare);
  byId("run-label").hidden = names.length < 2;
  byId("run").replaceChildren(...names.map((name) => element("option", "", name)));
  byId("run").value = run;
  watchServed();
  return stream.open(run);
}

start();
