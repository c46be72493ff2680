// Numbers as people read them; the same rules as the server's in format.py.
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function compact(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of UNITS) {
    if (size >= unit) return trim(value / unit) + letter;
  }
  return trim(value);
}

const trim = (value) => {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(size >= 10 ? 1 : 2).replace(/\.?0+$/, "");
};

export function seconds(value) {
  if (value === 0) return "0";
  if (value < 1e-3) return `${trim(value * 1e6)} µs`;
  if (value < 1) return `${trim(value * 1e3)} ms`;
  if (value < 120) return `${trim(value)} s`;
  return value < 7200 ? `${trim(value / 60)} min` : `${trim(value / 3600)} h`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < units.length - 1) {
    value /= 1024;
    step += 1;
  }
  return `${trim(value)} ${units[step]}`;
}

export const formatters = {
  count: compact,
  rate: (value) => `${compact(value)}/s`,
  seconds,
  bytes,
};

export const exact = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 3 });
