"use strict";
// Two things need a script: what the pointer shows over a chart, and the timelines.  All texts go in as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";
const data = name => JSON.parse(document.getElementById("data-" + name).textContent);

function element(tag, attributes, text) {
  const made = tag === "svg" || attributes && attributes.svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) if (key !== "svg") made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function figures(value) {
  if (value === null) return "–";
  return Math.abs(value) >= 1e5 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

// The box beside the pointer; `rows` are [text, class] pairs.
function place(tip, host, event, rows) {
  tip.replaceChildren(...rows.map(([text, kind]) => element(kind === "head" ? "b" : "p", kind ? {class: kind} : {}, text)));
  tip.hidden = false;
  const box = host.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  tip.style.left = Math.max(4, x + 16 + tip.offsetWidth > box.width ? x - 16 - tip.offsetWidth : x + 16) + "px";
  tip.style.top = Math.max(4, y + 18) + "px";
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return high < 0 ? -1 : Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function hover(figure, chart) {
  const svg = figure.querySelector("svg"), tip = element("div", {class: "tip", hidden: ""});
  const [left, right, top, bottom] = chart.box, mark = element("path", {svg: 1, class: "at"});
  figure.append(tip);
  svg.append(mark);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const x = chart.x[0] + (at - left) / (right - left) * (chart.x[1] - chart.x[0]);
    const found = chart.lines.map(line => [line, nearest(line.xs, x)]).filter(([, k]) => k >= 0), rows = [];
    if (!found.length) return;
    const shown = found.map(([line, k]) => line.xs[k]).reduce((best, at) => Math.abs(at - x) < Math.abs(best - x) ? at : best);
    for (const [line, k] of found) {
      if (Math.abs(line.xs[k] - shown) > 0.02 * (chart.x[1] - chart.x[0])) continue; // it has ended before, or begins later
      rows.push([line.name + ": " + figures(line.ys[k]), ""]);
      if (line.notes.length && line.notes[k]) rows.push([line.notes[k], "why"]);
    }
    const px = left + (shown - chart.x[0]) / (chart.x[1] - chart.x[0]) * (right - left);
    mark.setAttribute("d", `M${px} ${top}V${bottom}`);
    place(tip, figure, event, [[chart.xLabel + " " + figures(shown), "head"], ...rows]);
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; mark.removeAttribute("d"); });
}

function duration(us) {
  return us >= 1e6 ? figures(us / 1e6) + " s" : us >= 1e3 ? figures(us / 1e3) + " ms" : figures(us) + " µs";
}

function roundTicks(low, high, about) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw * 0.999), at = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k++) at.push(k * step);
  return at;
}

class Timeline {
  constructor(host, run) {
    this.host = host; this.run = run; this.lane = 24; this.top = 6;
    this.left = 26 + 7 * Math.max(...run.lanes.map(lane => lane.length));
    this.tip = element("div", {class: "tip", hidden: ""});
    this.svg = element("svg", {role: "img", "aria-label": "timeline of " + run.name, tabindex: "0"});
    this.hint = element("p", {class: "hint"});
    this.legend = element("ul", {class: "legend"});
    host.append(this.controls(), this.svg, this.legend, this.hint, this.tip);
    this.listen();
    this.choose(run.steps.findIndex(step => step[0] === run.first));
    new ResizeObserver(() => this.draw()).observe(host);
  }

  controls() {
    const bar = element("div", {class: "controls"}), button = (text, label, act) => {
      const made = element("button", {type: "button", "aria-label": label, title: label}, text);
      made.addEventListener("click", act);
      return made;
    };
    const numbers = this.run.steps.map(step => step[0]);
    this.input = element("input", {type: "number", min: numbers[0], max: numbers[numbers.length - 1], "aria-label": "step"});
    this.input.addEventListener("change", () => this.choose(nearest(numbers, +this.input.value)));
    this.slider = element("input", {type: "range", min: 0, max: numbers.length - 1, "aria-label": "choose a step"});
    this.slider.addEventListener("input", () => this.choose(+this.slider.value));
    bar.append(
      element("b", {}, this.run.name), element("span", {}, "step"),
      button("‹", "previous step", () => this.choose(this.index - 1)), this.input, button("›", "next step", () => this.choose(this.index + 1)),
      this.slider, button("slowest", "the slowest step", () => this.choose(this.slowest())),
      button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)),
      button("whole step", "show the whole step", () => this.whole()));
    return bar;
  }

  slowest() {
    return this.run.steps.reduce((best, step, k) => step[1] > this.run.steps[best][1] ? k : best, 0);
  }

  choose(index) {
    this.index = Math.min(Math.max(index, 0), this.run.steps.length - 1);
    [this.step, this.length, this.isWhole, this.spans] = this.run.steps[this.index];
    this.input.value = this.step; this.slider.value = this.index;
    this.whole();
  }

  whole() { this.from = 0; this.to = Math.max(this.length, 1); this.draw(); }

  zoom(factor, at) {
    const middle = at === undefined ? (this.from + this.to) / 2 : at;
    const span = Math.min(Math.max((this.to - this.from) * factor, 5), Math.max(this.length, 5));
    this.move(middle - (middle - this.from) * span / (this.to - this.from), span);
  }

  move(from, span) {
    this.from = Math.min(Math.max(from, 0), Math.max(0, this.length - span));
    this.to = this.from + span;
    this.draw();
  }

  time(event) {
    const box = this.svg.getBoundingClientRect();
    return this.from + (event.clientX - box.left - this.left) / (this.width - this.left) * (this.to - this.from);
  }

  listen() {
    let start = null;
    this.svg.addEventListener("wheel", event => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.move(this.from + (event.deltaX || event.deltaY) * (this.to - this.from) / 1000, this.to - this.from);
      } else this.zoom(Math.exp(event.deltaY * 0.0015), this.time(event));
    }, {passive: false});
    this.svg.addEventListener("pointerdown", event => {
      start = [event.clientX, this.from];
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", event => {
      if (start !== null) {
        const scale = (this.to - this.from) / (this.width - this.left);
        this.move(start[1] - (event.clientX - start[0]) * scale, this.to - this.from);
      } else this.tell(event);
    });
    for (const end of ["pointerup", "pointercancel"]) this.svg.addEventListener(end, () => { start = null; });
    this.svg.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.svg.addEventListener("dblclick", () => this.whole());
    this.svg.addEventListener("keydown", event => {
      const span = this.to - this.from, act = {
        ArrowLeft: () => this.move(this.from - span / 8, span), ArrowRight: () => this.move(this.from + span / 8, span),
        "+": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.whole(),
        PageUp: () => this.choose(this.index - 1), PageDown: () => this.choose(this.index + 1),
      }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
  }

  // The span under the pointer: of several, the one that is drawn last.
  tell(event) {
    const box = this.svg.getBoundingClientRect(), time = this.time(event);
    const lane = Math.floor((event.clientY - box.top - this.top) / this.lane);
    const near = 2 * (this.to - this.from) / (this.width - this.left);
    let found = -1;
    for (let k = 0; k < this.spans.length; k += 6) {
      if (this.spans[k] === lane && this.spans[k + 2] - near <= time && time <= this.spans[k + 2] + this.spans[k + 3] + near) found = k;
    }
    if (found < 0) { this.tip.hidden = true; return; }
    const [, kind, start, length, other, count] = this.spans.slice(found, found + 6);
    place(this.tip, this.host, event, [
      [this.run.kinds[kind][0] + (count > 1 ? " (" + count + " spans drawn as one)" : ""), "head"],
      [this.run.lanes[lane], ""], [duration(length) + ", from " + duration(start), ""], ...(other ? [["work of another step", "why"]] : []),
    ]);
  }

  draw() {
    this.width = this.host.clientWidth - 28;
    if (this.width < 50) return;
    const height = this.top + this.lane * this.run.lanes.length + 42, scale = (this.width - this.left) / (this.to - this.from);
    const x = time => this.left + (time - this.from) * scale, bottom = height - 42, marks = [];
    const about = Math.max(3, Math.floor((this.width - this.left) / 110)), unit = this.to - this.from >= 2e6 ? 1e6 : this.to - this.from >= 2e3 ? 1e3 : 1;
    for (const at of roundTicks(this.from / unit, this.to / unit, about)) {
      marks.push(element("path", {svg: 1, class: "grid", d: `M${x(at * unit)} ${this.top}V${bottom}`}));
      marks.push(element("text", {svg: 1, x: x(at * unit), y: bottom + 15, "text-anchor": "middle"}, String(+at.toPrecision(6))));
    }
    const name = unit === 1e6 ? "seconds" : unit === 1e3 ? "milliseconds" : "microseconds";
    marks.push(element("text", {svg: 1, class: "axis", x: (this.left + this.width) / 2, y: height - 7, "text-anchor": "middle"}, name + " since the step's start"));
    this.run.lanes.forEach((lane, k) => marks.push(
      element("text", {svg: 1, class: "lane", x: this.left - 10, y: this.top + this.lane * k + 16, "text-anchor": "end"}, lane)));
    marks.push(...this.bars(x, scale));
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.dataset.step = this.step; this.svg.dataset.from = Math.round(this.from); this.svg.dataset.to = Math.round(this.to);
    this.svg.replaceChildren(...marks);
    this.explain();
  }

  // A bar too short to be seen beside the bar before it, of the same lane and colour, is not drawn.
  bars(x, scale) {
    const made = [], reached = new Map();
    for (let k = 0; k < this.spans.length; k += 6) {
      const [lane, kind, start, length, other] = this.spans.slice(k, k + 5);
      if (start + length < this.from || start > this.to) continue;
      const colour = this.run.kinds[kind][1], key = lane + colour + other;
      const left = Math.max(x(start), this.left), right = Math.min(x(start + length), this.width), end = Math.max(right, left + 0.6);
      if (end <= (reached.get(key) ?? -1) + 0.3) continue;
      reached.set(key, end);
      const bar = element("rect", {svg: 1, x: left.toFixed(2), width: (end - left).toFixed(2), y: this.top + this.lane * lane + 4, height: this.lane - 7, style: `fill:var(--c-${colour})`});
      if (other) bar.setAttribute("class", "other");
      made.push(bar);
    }
    return made;
  }

  explain() {
    const seen = new Map();
    for (let k = 0; k < this.spans.length; k += 6) {
      const [name, colour] = this.run.kinds[this.spans[k + 1]];
      seen.set(colour === "idle" ? "waiting" : name.split(" ")[0], colour);
    }
    const items = [...seen].map(([name, colour]) => {
      const item = element("li", {}, name);
      item.prepend(element("span", {class: "key bar", style: `--colour:var(--c-${colour})`}));
      return item;
    });
    this.legend.replaceChildren(...items);
    const merged = this.isWhole ? "" : " Short neighbouring spans are drawn as one in this page.";
    this.hint.textContent = `Step ${this.step}: ${duration(this.length)}, ${duration(this.to - this.from)} of it shown.${merged}`;
  }
}

const charts = data("charts");
for (const figure of document.querySelectorAll("figure[data-hover]")) hover(figure, charts[figure.dataset.chart]);
const runs = data("timelines");
for (const host of document.querySelectorAll(".timeline")) new Timeline(host, runs[+host.dataset.run]);
document.documentElement.dataset.ready = "yes";
