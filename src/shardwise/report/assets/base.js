// What every part of the page uses: elements, numbers for people, the tip.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = document.querySelector("svg").namespaceURI;
const find = (selector) => document.querySelector(selector);

// An element with attributes and children; text is never read as HTML.
function make(tag, attributes, ...children) { return fill(document.createElement(tag), attributes, children); }
function shape(tag, attributes, ...children) { return fill(document.createElementNS(SVG, tag), attributes, children); }
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity));
  return element;
}

function digits(number, count = 3) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1000) return Math.round(number).toLocaleString("en");
  if (size < 1e-4) return number.toExponential(1);
  return String(Number(number.toPrecision(count)));
}
function time(seconds) {
  if (seconds >= 1) return `${digits(seconds)} s`;
  return seconds > 0 && seconds < 1e-4 ? `${digits(1e6 * seconds)} µs` : `${digits(1e3 * seconds)} ms`;
}
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${digits(bytes)} ${units[unit]}`;
}
const percent = (part) => `${digits(100 * part)} %`;

// Round numbers that divide a range into about `count` parts.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((k) => k * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

const tip = find("#tip");
function showTip(event, ...lines) {
  tip.replaceChildren(...lines.filter(Boolean).map((line, i) => make("div", {}, i ? line : make("b", {}, line))));
  tip.hidden = false;
  const room = 14;
  const left = Math.min(event.clientX + room, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + room + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? event.clientY + room : event.clientY - tip.offsetHeight - room}px`;
}
function hideTip() { tip.hidden = true; }

function legend(list, entries) {
  list.replaceChildren(...entries.map(([name, colour]) =>
    make("li", {}, make("i", colour.startsWith("var") ? { style: `background: ${colour}` } : { class: colour }), name)));
}
// A row of coloured parts, each as long as its share of `most`.
function track(parts, most, name = "") {
  return make("div", { class: `track ${name}` }, parts.map(([part, value]) =>
    make("i", { style: `--part: var(--${part}); width: ${most ? (100 * value) / most : 0}%` })));
}
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
function present(id, there) { find(`#${id}`).hidden = !there; return there; }
