// Served models: a row for each `fleet serve` that the dashboard was told of.

import { byId, element, setText } from "./dom.js";
import { duration, milliseconds, number } from "./format.js";

const PERIOD = 2000; // milliseconds

/** The texts of a row, in the order of the columns. */
export function cells(row) {
  const rate = typeof row.rate === "number" ? `${number(row.rate)}/s` : "–";
  const refused = typeof row.refused_rate === "number" ? `${number(row.refused_rate)}/s` : "–";
  return [row.model, row.is_reached ? "answers" : "does not answer", number(row.version), duration(row.age_s), rate, milliseconds(row.p99_ms), refused];
}

function show(rows) {
  byId("served").hidden = byId("served-link").hidden = !rows.length;
  const body = byId("served-table").tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, index) => {
    const line = body.rows[index] ?? body.appendChild(element("tr"));
    cells(row).forEach((text, column) => {
      const cell = line.cells[column] ?? line.appendChild(element("td", column > 1 ? "num" : ""));
      setText(cell, text);
    });
    line.title = row.url;
  });
}

/** Ask now and then, as long as there is a model to ask for. */
export async function watchServed() {
  const answer = await fetch("/api/served").catch(() => null);
  if (answer?.ok) {
    const rows = (await answer.json()).served;
    show(rows);
    if (!rows.length) return;
  } else if (answer?.status === 401) return;
  setTimeout(watchServed, document.hidden ? 5 * PERIOD : PERIOD);
}
