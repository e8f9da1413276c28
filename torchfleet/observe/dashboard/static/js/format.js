// Numbers and times as people read them.

const STEPS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** 1234567 → "1.23 M". What is no number (null, "nan") is shown as it is. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  for (const [step, letter] of STEPS) if (size >= step * 0.9995) return `${digits(value / step)} ${letter}`;
  return Number.isInteger(value) ? String(value) : digits(value);
}

function digits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return value.toFixed(0);
  if (size >= 9.995) return value.toFixed(1);
  if (size >= 0.9995) return value.toFixed(2);
  return Number(value.toPrecision(3)).toString();
}

/** A metric, with enough digits to see it move. */
export function metric(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  const size = Math.abs(value);
  return size >= 1000 || (size > 0 && size < 0.0001) ? number(value) : value.toFixed(4);
}

export function bytes(value) {
  return typeof value === "number" ? `${number(value)}${Math.abs(value) < 999.5 ? " " : ""}B` : "–";
}

export function share(value) {
  return typeof value === "number" ? `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %` : "–";
}

export function milliseconds(value) {
  return typeof value === "number" ? `${number(value)} ms` : "–";
}

/** 75 → "1:15", 4000 → "1:06:40", 200000 → "2 d 7 h". */
export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole >= 172800) return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
  const two = (part) => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString("en-GB");
}

export function date(time) {
  return new Date(1000 * time).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

/** "worker.3" → "worker 3", "server.0.replica1" → "server 0, replica 1". */
export function roleName(key) {
  return key.replace(/\.replica(\d+)$/, ", replica $1").replace(".", " ");
}
