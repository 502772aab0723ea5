// Curves of the history: loss, accuracy, samples per second and whatever else was written.
const CURVES = ["forward", "gradients", "spatial", "f", "c", "copy"];
const PLOT = { width: 560, height: 240, left: 52, right: 12, top: 10, bottom: 36 };

const shownCurves = { smooth: 0, logarithmic: false };

function drawCharts() {
  const draw = () => find("#training .charts").replaceChildren(...DATA.charts.map((chart) => drawChart(smoothed(chart))));
  if (DATA.runs.length > 1) legend(find("#runs"), DATA.runs.map((name, i) => [name, `var(--${CURVES[i % CURVES.length]})`]));
  find("#smooth").oninput = (event) => { shownCurves.smooth = Number(event.target.value); draw(); };
  find("#logarithmic").onchange = (event) => { shownCurves.logarithmic = event.target.checked; draw(); };
  draw();
}

// Each point as the mean of itself and all before it, older ones counting less: no weight is lost at the beginning.
function smoothed(chart) {
  const keep = shownCurves.smooth;
  if (!keep) return chart;
  return { ...chart, curves: chart.curves.map((curve) => {
    let total = 0, weight = 0;
    const y = curve.y.map((value) => { total = keep * total + value; weight = keep * weight + 1; return total / weight; });
    return { ...curve, y, raw: curve.y };
  }) };
}
// Where several runs are compared a colour is a run; else it is a curve. Further curves of a run are dashed.
function strokeOf(curve, i) {
  const several = DATA.runs.length > 1 && curve.run !== undefined;
  return { style: `--part: var(--${CURVES[(several ? curve.run : i) % CURVES.length]})`, dashed: several && curve.name !== curve.first };
}

function drawChart(chart) {
  const xs = chart.curves.flatMap((curve) => curve.x), ys = chart.curves.flatMap((curve) => curve.y);
  const isLog = shownCurves.logarithmic && Math.min(...ys) > 0;
  const range = { x: [Math.min(...xs), Math.max(...xs)], y: isLog ? [Math.min(...ys) / 1.1, Math.max(...ys) * 1.1] : padded(Math.min(...ys), Math.max(...ys)) };
  if (!isLog && /accuracy|dice|iou|overlap/.test(chart.title) && range.y[1] > 1 && Math.max(...ys) <= 1) range.y[1] = 1;
  if (range.x[0] === range.x[1]) range.x = [range.x[0] - 1, range.x[1] + 1];
  const { width, height, left, right, top, bottom } = PLOT;
  const toX = (x) => left + (x - range.x[0]) / (range.x[1] - range.x[0]) * (width - left - right);
  const bent = isLog ? Math.log : (y) => y;
  const toY = (y) => height - bottom - (bent(y) - bent(range.y[0])) / (bent(range.y[1]) - bent(range.y[0])) * (height - top - bottom);
  const line = (curve, values) => curve.x.map((x, k) => `${toX(x).toFixed(1)},${toY(values[k]).toFixed(1)}`).join(" ");
  const title = chart.title.replaceAll("_", " ");
  const picture = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": `${title} over ${chart.x}; last: ${chart.curves.map((curve) => `${curve.name} ${digits(curve.last, 4)}`).join(", ")}` },
    (isLog ? decades(...range.y) : ticks(...range.y, 4)).map((y) => [shape("line", { class: "grid", x1: left, x2: width - right, y1: toY(y), y2: toY(y) }),
      shape("text", { x: left - 8, y: toY(y) + 4, "text-anchor": "end" }, digits(y, 4))]),
    ticks(...range.x, 6).filter(Number.isInteger).map((x) => shape("text", { x: toX(x), y: height - 20, "text-anchor": "middle" }, digits(x, 6))),
    shape("text", { x: width - right, y: height - 5, "text-anchor": "end" }, chart.x),
    chart.curves.filter((curve) => curve.raw).map((curve, i) => shape("polyline", { class: "curve raw", style: strokeOf(curve, i).style, points: line(curve, curve.raw) })),
    chart.curves.map((curve, i) => shape("polyline", { class: strokeOf(curve, i).dashed ? "curve dashed" : "curve", style: strokeOf(curve, i).style, points: line(curve, curve.y) })));
  const marks = shape("g", {});
  picture.append(marks);
  const reading = make("p", { class: "quiet", role: "status" });
  const all = [...new Set(xs)].sort((a, b) => a - b);
  let at = all.length - 1;
  const read = () => {
    const values = chart.curves.map((curve) => nearest(curve.x, all[at]));
    marks.replaceChildren(shape("line", { class: "cross", x1: toX(all[at]), x2: toX(all[at]), y1: top, y2: height - bottom }),
      ...chart.curves.map((curve, i) => shape("circle", { class: "dot", r: 4.5, style: strokeOf(curve, i).style, cx: toX(curve.x[values[i]]), cy: toY(curve.y[values[i]]) })));
    reading.textContent = `${chart.x} ${digits(all[at], 6)}: ${chart.curves.map((curve, i) => `${curve.name.replaceAll("_", " ")} ${digits(curve.y[values[i]], 4)}`).join(", ")}`;
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = range.x[0] + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (range.x[1] - range.x[0]);
    at = nearest(all, x);
    read();
  });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    at = Math.min(all.length - 1, Math.max(0, at + step));
    read();
  });
  const key = make("ul", { class: "legend" });
  legend(key, chart.curves.map((curve, i) => [curve.name.replaceAll("_", " "), strokeOf(curve, i).style.slice("--part: ".length)]));
  const each = Math.max(...chart.curves.map((curve) => curve.each));
  read();
  return make("div", { class: "chart" }, make("h3", {}, title), chart.curves.length > 1 ? key : [], picture, reading,
    each > 1 ? make("p", { class: "quiet" }, `Each point is the mean of up to ${each}.`) : []);
}

function padded(low, high) {
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}
// 1, 2 and 5 of every power of ten, or the powers alone where those are many.
function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const k of Math.log10(high / low) > 3 ? [1] : [1, 2, 5]) if (k * 10 ** power >= low && k * 10 ** power <= high) found.push(k * 10 ** power);
  }
  return found;
}
function nearest(values, wanted) {
  return values.reduce((best, value, i) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);
}
