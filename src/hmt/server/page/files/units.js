// Numbers for people, in the same words as the command line's.

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];
const RATES = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];

function scaled(value, step, names) {
  let at = 0;
  while (value >= step && at < names.length - 1) {
    value /= step;
    at += 1;
  }
  return `${at === 0 ? Math.round(value) : significant(value)}\u00a0${names[at]}`;
}

/** Three digits that count. */
export function significant(value) {
  if (value >= 100) return grouped(Math.round(value));
  if (value >= 10) return value.toFixed(1);
  return value === 0 ? "0" : value.toFixed(2);
}

export function bytes(value) {
  return scaled(value, 1024, SIZES);
}

export function rate(value) {
  return scaled(value, 1000, RATES);
}

/** Tokens per second. */
export function speed(value) {
  if (value >= 10) return grouped(Math.round(value));
  return value === 0 ? "0" : value.toFixed(value >= 1 ? 1 : 2);
}

export function percent(share) {
  const value = share * 100;
  if (value > 0 && value < 1) return "under 1%";
  return `${Math.round(value)}%`;
}

export function grouped(value) {
  return value.toLocaleString("en-US");
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
}

/** "1 page", "2 pages". */
export function counted(value, one, many = `${one}s`) {
  return `${grouped(value)} ${value === 1 ? one : many}`;
}
