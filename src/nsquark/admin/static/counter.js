// Counts up to each new measurement within CATCH_UP_S, so that the number runs on; a lower one is shown at once.
const shown = document.getElementById("counter");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const CATCH_UP_S = 2;
let value = Number(document.getElementById("delivered").value);
let target = value;
let speed = 0;
let last = performance.now();

document.addEventListener("figures", () => {
  const data = document.getElementById("delivered");
  target = Number(data.value);
  if (target < value || calm.matches) value = target;
  speed = (target - value) / CATCH_UP_S;
});

function step(now) {
  const seconds = (now - last) / 1000;
  last = now;
  value = Math.min(target, value + speed * seconds);
  const text = Math.floor(value).toLocaleString("en-US");
  if (shown.textContent !== text) shown.textContent = text;
  requestAnimationFrame(step);
}

requestAnimationFrame(step);
