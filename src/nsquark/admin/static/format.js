// Formats figures for people by the rules of the server's format.py.
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const MINUTE_S = 60;
const HOUR_S = 3600;
const DAY_S = 86400;
const LONG_UNITS = [[DAY_S, "d"], [HOUR_S, "h"], [MINUTE_S, "min"]];

export function compact(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of UNITS) {
    if (size >= unit) return trim(value / unit) + letter;
  }
  return trim(value);
}

// Rounds to about three digits by the arithmetic of format.py, since toFixed rounds differently.
function trim(value) {
  const size = Math.abs(value);
  const scale = size >= 100 ? 1 : size >= 10 ? 10 : 100;
  return String(Math.floor(value * scale + 0.5) / scale);
}

// Writes a measured time in one unit, so that it fits beside the axis of a chart.
export function seconds(value) {
  if (value === 0) return "0";
  if (value < 1e-3) return `${trim(value * 1e6)} µs`;
  if (value < 1) return `${trim(value * 1e3)} ms`;
  for (const [unit, name] of LONG_UNITS) {
    if (value >= 2 * unit) return `${trim(value / unit)} ${name}`;
  }
  return `${trim(value)} s`;
}

// Writes how long something has lasted, in whole units.
export function duration(value) {
  const whole = Math.max(0, Math.floor(value));
  if (whole < MINUTE_S) return `${whole} s`;
  if (whole < HOUR_S) return `${Math.floor(whole / MINUTE_S)} min`;
  if (whole < DAY_S) return `${Math.floor(whole / HOUR_S)} h ${Math.floor((whole % HOUR_S) / MINUTE_S)} min`;
  return `${Math.floor(whole / DAY_S)} d ${Math.floor((whole % DAY_S) / HOUR_S)} h`;
}

export function size(value) {
  let step = 0;
  while (value >= 1024 && step < BYTE_UNITS.length - 1) {
    value /= 1024;
    step += 1;
  }
  return `${trim(value)} ${BYTE_UNITS[step]}`;
}

export const formatters = {
  count: compact,
  rate: (value) => `${compact(value)}/s`,
  seconds,
  bytes: size,
};

export const exact = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 3 });
