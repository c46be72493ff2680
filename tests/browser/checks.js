// What axe would look at: names of controls, contrast of text, structure. Returns a list of complaints.
() => {
  const complaints = [];
  const isShown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const describe = (element) => `${element.outerHTML.replace(/\s+/g, " ").slice(0, 120)}`;

  function nameOf(element) {
    const labelled = element.getAttribute("aria-labelledby");
    if (labelled) return labelled.split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join(" ").trim();
    if (element.getAttribute("aria-label")) return element.getAttribute("aria-label").trim();
    if (element.labels?.length) return [...element.labels].map((label) => label.textContent).join(" ").trim();
    return element.textContent.trim() || element.getAttribute("title") || "";
  }

  for (const element of document.querySelectorAll("a[href], button, input:not([type=hidden]), select, textarea, summary, [role=img], dialog")) {
    if (!isShown(element)) continue;
    if (!nameOf(element)) complaints.push(`no name: ${describe(element)}`);
  }
  for (const element of document.querySelectorAll("input:not([type=hidden]), select, textarea")) {
    if (!element.labels?.length && !element.getAttribute("aria-label")) complaints.push(`no label: ${describe(element)}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  ids.filter((id, index) => ids.indexOf(id) !== index).forEach((id) => complaints.push(`id twice: ${id}`));
  if (document.querySelectorAll("h1").length !== 1) complaints.push("not one h1");
  if (document.querySelectorAll("main").length !== 1) complaints.push("not one main");
  if (!document.documentElement.lang) complaints.push("no language");
  for (const cell of document.querySelectorAll("th")) if (!cell.scope) complaints.push(`th without scope: ${describe(cell)}`);
  for (const element of document.querySelectorAll("[tabindex]")) if (element.tabIndex > 0) complaints.push(`tabindex: ${describe(element)}`);
  for (const element of document.querySelectorAll("[style], [onclick], script:not([src])")) {
    if (!element.closest("time-chart")) complaints.push(`inline: ${describe(element)}`);
  }

  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  function rgba(color) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  }
  function over(front, back) {
    return [0, 1, 2].map((index) => front[index] * front[3] + back[index] * (1 - front[3]));
  }
  function background(element) {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255]);
  }
  function luminance(color) {
    const [red, green, blue] = color.map((value) => value / 255).map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  }
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !isShown(element) || element.closest(".visually-hidden, .skip, :disabled")) continue;
    const style = getComputedStyle(element);
    const back = background(element);
    const paint = element.namespaceURI.includes("svg") ? style.fill : style.color;
    const [light, dark] = [luminance(over(rgba(paint), back)), luminance(back)].sort((one, other) => other - one);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const key = `${paint} on ${back}`;
    if (ratio < needed && !seen.has(key)) {
      seen.add(key);
      complaints.push(`contrast ${ratio.toFixed(2)}: ${key}: ${describe(element)}`);
    }
  }
  return complaints;
}
