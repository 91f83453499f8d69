// Reading values off the charts: by pointer, or by the arrow keys. A chart's paths are its data; see charts.py.
"use strict";
const SQUARE = 10000;
const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const UNITS = { bytes: "B", rate: "FLOPS" };

function scaled(value, unit) {
  const [size, prefix] = PREFIXES.find(([least]) => Math.abs(value) >= least) || [1, ""];
  return `${Number((value / size).toPrecision(3))} ${prefix}${unit}`.trim();
}

function text(value, unit) {
  if (unit === "seconds") return value >= 1 ? `${Number(value.toPrecision(3))} s` : `${Number((value * 1000).toPrecision(3))} ms`;
  if (unit === "share") return `${Number((value * 100).toPrecision(3))} %`;
  if (UNITS[unit]) return scaled(value, UNITS[unit]);
  return String(Number(value.toPrecision(4)));
}

function pointsOf(path) {
  return [...path.getAttribute("d").matchAll(/(\d+) (\d+)/g)].map(([, x, y]) => [Number(x), Number(y)]);
}

function reader(figure) {
  const { x0, x1, y0, y1, log, unit } = figure.dataset;
  const [low, high, first, last] = [y0, y1, x0, x1].map(Number);
  const valueAt = (y) => {
    const part = 1 - y / SQUARE;
    return log === "1" ? low * (high / low) ** part : low + part * (high - low);
  };
  const stepAt = (x) => Math.round(first + (x / SQUARE) * (last - first));
  const lines = [...figure.querySelectorAll(".plot path[data-name]:not(.faint)")].map((path) => {
    const points = pointsOf(path);
    const isArea = path.classList.contains("area");
    const edge = isArea ? points.slice(0, points.length / 2) : points;
    const values = edge.map(([, y], at) => (isArea ? valueAt(y) - valueAt(points[points.length - 1 - at][1]) : valueAt(y)));
    return { name: path.dataset.name, xs: edge.map(([x]) => x), values, colour: getComputedStyle(path)[isArea ? "fill" : "stroke"] };
  });
  const stops = [...new Set(lines.flatMap(({ xs }) => xs))].sort((a, b) => a - b);
  const slider = document.createElement("div");
  const cross = document.createElement("div");
  const tip = document.createElement("div");
  slider.className = "reader";
  cross.className = "cross";
  tip.className = "tip";
  slider.tabIndex = 0;
  for (const [name, value] of Object.entries({ role: "slider", "aria-label": `${figure.querySelector("h3").textContent}: values by step`, "aria-valuemin": stepAt(stops[0]), "aria-valuemax": stepAt(stops[stops.length - 1]) })) slider.setAttribute(name, value);
  figure.querySelector(".plot").append(cross, slider, tip);
  let place = stops.length - 1;

  function tell(isShown) {
    const x = stops[place];
    const told = lines.map(({ name, xs, values, colour }) => {
      let nearest = 0;
      xs.forEach((each, at) => { if (Math.abs(each - x) < Math.abs(xs[nearest] - x)) nearest = at; });
      return { name, colour, value: text(values[nearest], unit) };
    });
    slider.setAttribute("aria-valuenow", stepAt(x));
    slider.setAttribute("aria-valuetext", `step ${stepAt(x)}: ${told.map(({ name, value }) => `${name} ${value}`).join(", ")}`);
    cross.hidden = tip.hidden = !isShown;
    if (!isShown) return;
    const percent = (100 * x) / SQUARE;
    cross.style.left = `${percent}%`;
    tip.style.left = percent > 50 ? "auto" : `calc(${percent}% + 8px)`;
    tip.style.right = percent > 50 ? `calc(${100 - percent}% + 8px)` : "auto";
    const title = document.createElement("b");
    title.textContent = `step ${stepAt(x).toLocaleString("en")}`;
    tip.replaceChildren(title, ...told.map(({ name, value, colour }) => {
      const row = document.createElement("span");
      const dot = document.createElement("i");
      dot.style.background = colour;
      row.append(dot, `${name}: ${value}`);
      return row;
    }));
  }

  slider.addEventListener("pointermove", (event) => {
    const box = slider.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * SQUARE;
    place = stops.reduce((best, each, at) => (Math.abs(each - x) < Math.abs(stops[best] - x) ? at : best), 0);
    tell(true);
  });
  slider.addEventListener("pointerleave", () => tell(document.activeElement === slider));
  slider.addEventListener("focus", () => tell(true));
  slider.addEventListener("blur", () => tell(false));
  slider.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(stops.length / 10));
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -far, PageUp: far, Home: -stops.length, End: stops.length };
    if (!(event.key in moves)) return;
    event.preventDefault();
    place = Math.min(stops.length - 1, Math.max(0, place + moves[event.key]));
    tell(true);
  });
  tell(false);
}

document.querySelectorAll("figure[data-x0]").forEach(reader);
