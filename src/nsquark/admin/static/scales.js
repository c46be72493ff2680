// Finds round numbers for the axes of charts.
const STEPS = [1, 2, 5, 10];
const TIME_STEPS = [15, 30, 60, 120, 300, 600, 900];

// Returns values from zero to a round number not below `highest`, in about `count` steps.
export function valueTicks(highest, count, isWhole) {
  const rough = (highest || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = STEPS.map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  if (isWhole) step = Math.max(1, step);
  const ticks = [];
  for (let value = 0; value < highest + step * 0.999; value += step) ticks.push(value);
  return ticks.length > 1 ? ticks : [0, step];
}

// Returns round times within [from, to], at most about `count` of them, and the step between them.
export function timeTicks(from, to, count) {
  const step = TIME_STEPS.find((seconds) => (to - from) / seconds <= count) ?? 1800;
  const ticks = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) ticks.push(time);
  return { ticks, step };
}

// Returns the index of the value nearest to `wanted` in rising `values`.
export function nearest(values, wanted) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle;
    else high = middle;
  }
  return high >= 0 && Math.abs(values[high] - wanted) < Math.abs(values[low] - wanted) ? high : low;
}
