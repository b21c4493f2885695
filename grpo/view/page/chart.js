// Curves: uPlot with a readout instead of a legend, bands, and points that lead somewhere.

import uPlot from "./vendor/uplot/uPlot.js";
import { distances, tick } from "./axis.js";
import { html, number, useEffect, useLayoutEffect, useRef, useState, useWidth } from "./ui.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Exponential smoothing without the pull towards the first value; null stays null. */
export function smooth(values, weight) {
  if (!weight) return values;
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/**
 * series: [{name, values, color, low?, high?, faint?, fill?, dash?, points?, measured?}] over `x`, which is the steps, or what else
 * `axis` names: then `rows` are the steps of the values and `place(step)` is where one is. `pick(step)` is called for a
 * click on a point; `marks` are the steps that lead somewhere. `at`: a step to mark. `sync`: charts with one cursor.
 * `measured`: the places that have a point, where others lie between two. `floor`: where the other axis begins. What was zoomed into stays in sight when the values change.
 */
export function Chart({
  x, axis = "step", rows = x, place: placed = (step) => step,
  series, height = 190, pick, marks, at, log, sync, title, range, floor, readout,
}) {
  const place = useRef(null);
  const plot = useRef(null);
  const live = useRef({});
  const zoom = useRef(null); // {min, max} of the steps in sight, while these are not all
  const measured = new Map(series.map((one) => [one.name, one.measured]));
  live.current = { pick, marks, at, readout, rows, placed, measured };
  const width = useWidth(place);
  const [theme, setTheme] = useState(0);

  useEffect(() => {
    const repaint = () => setTheme((count) => count + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", repaint);
    const watch = new MutationObserver(repaint);
    watch.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => {
      dark.removeEventListener("change", repaint);
      watch.disconnect();
    };
  }, []);

  const columns = [];
  const lines = [];
  const bands = [];
  for (const one of series) {
    if (one.low && one.high) {
      bands.push({ series: [columns.length + 2, columns.length + 1], fill: `${one.color}30` });
      columns.push(one.low, one.high);
      lines.push({ show: true, width: 0, points: { show: false } }, { show: true, width: 0, points: { show: false } });
    }
    columns.push(one.values);
    const known = one.measured ?? [...one.values.keys()].filter((t) => one.values[t] !== null);
    lines.push({
      label: one.name,
      stroke: one.faint ? `${one.color}50` : one.color,
      width: one.faint ? 1 : 1.75,
      dash: one.dash,
      fill: one.fill ? `${one.color}${one.fill}` : undefined,
      spanGaps: even(one.values),
      points: {
        show: one.points !== false && known.length < 40 && !one.faint,
        filter: one.measured && (() => live.current.measured.get(one.name)),
        size: 5,
        fill: one.color,
      },
    });
  }
  const shape = JSON.stringify([
    lines.map((line) => [line.label, line.stroke, line.points.show]),
    log,
    axis,
    theme,
    title,
    range,
    floor,
  ]);

  useLayoutEffect(() => {
    const look = {
      stroke: css("--muted"),
      grid: { stroke: css("--grid"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui",
    };
    const options = {
      width,
      height,
      legend: { show: false },
      padding: [8, 20, 0, 0],
      bands,
      scales: {
        x: { time: false },
        y: { distr: log ? 3 : 1, range: range ? () => range : log ? undefined : (_, low, high) => around(floor ?? low, high) },
      },
      axes: [
        { ...look, size: 32, gap: 8, incrs: distances(axis), values: (_, ticks) => ticks.map((one) => tick(one, axis)) },
        {
          ...look,
          size: (_, labels) => Math.max(54, 14 + 6.5 * Math.max(0, ...(labels ?? []).map((label) => label.length))),
          values: (_, ticks) => ticks.map((one) => (one === null ? "" : number(one, 5))),
        },
      ],
      cursor: {
        y: false,
        sync: sync ? { key: sync } : undefined,
        drag: { x: true, y: false },
        points: { size: 7 },
      },
      series: [{}, ...lines],
      hooks: {
        setScale: [
          (u, key) => {
            const steps = u.data[0];
            if (key !== "x" || !steps.length) return;
            const { min, max } = u.scales.x;
            zoom.current = min > steps[0] || max < steps[steps.length - 1] ? { min, max, axis } : null;
          },
        ],
        setCursor: [(u) => live.current.readout?.(u.cursor.idx ?? null)],
        draw: [(u) => drawMarks(u, live.current)],
      },
    };
    const seen = zoom.current?.axis === axis ? zoom.current : null; // of the chart that this one replaces
    const chart = new uPlot(options, [x, ...columns], place.current);
    if (seen) chart.setScale("x", seen);
    let down = null;
    chart.over.addEventListener("mousedown", (event) => {
      down = event.clientX;
    });
    chart.over.addEventListener("click", (event) => {
      const { pick: go, marks: known, rows: steps } = live.current;
      if (!go || chart.cursor.idx === null || Math.abs(event.clientX - (down ?? event.clientX)) > 3) return;
      go(nearest(known, steps[chart.cursor.idx]));
    });
    plot.current = chart;
    return () => {
      chart.destroy();
      plot.current = null;
    };
  }, [shape]);

  useLayoutEffect(() => {
    const seen = zoom.current?.axis === axis ? zoom.current : null;
    plot.current?.setData([x, ...columns], !seen);
    if (seen) plot.current?.setScale("x", seen);
  }, [x, series]);
  useLayoutEffect(() => {
    plot.current?.setSize({ width, height });
  }, [width, height]);
  useLayoutEffect(() => {
    plot.current?.redraw(false, true);
  }, [at, marks]);

  return html`<div class=${pick ? "chart leads" : "chart"} ref=${place} role="img" aria-label=${title}></div>`;
}

/** Whether values come at even distances: then a gap is a rest between two of them, else there was nothing to tell. */
function even(values) {
  const places = [...values.keys()].filter((i) => values[i] !== null);
  const gaps = places.slice(1).map((place, i) => place - places[i]);
  return !gaps.length || Math.max(...gaps) <= 2 * [...gaps].sort((a, b) => a - b)[gaps.length >> 1];
}

/** The step that has groups and is closest. */
export function nearest(steps, step) {
  if (!steps || !steps.length) return step;
  return steps.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best));
}

/** The range of an axis, also where all values are the same. */
function around(low, high) {
  if (low === null || low < high) return uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true);
  return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
}

/** Ticks below the foot for steps with groups, a line for the one in view. */
function drawMarks(u, { marks, at: step, placed }) {
  const { ctx, bbox } = u;
  const foot = bbox.top + bbox.height;
  const scale = window.devicePixelRatio || 1;
  const inside = (x) => x !== null && x >= u.scales.x.min && x <= u.scales.x.max;
  const at = step === undefined || step === null ? null : placed(step);
  ctx.save();
  if (marks && marks.length) {
    ctx.fillStyle = css("--accent");
    const shown = marks.map(placed).filter(inside);
    const every = Math.max(1, Math.ceil(shown.length / 150));
    for (let i = 0; i < shown.length; i += every) {
      ctx.fillRect(Math.round(u.valToPos(shown[i], "x", true)) - scale, foot + scale, 2 * scale, 5 * scale);
    }
  }
  if (inside(at)) {
    ctx.strokeStyle = css("--accent");
    ctx.lineWidth = 1.5 * scale;
    ctx.setLineDash([4 * scale, 3 * scale]);
    const place = u.valToPos(at, "x", true);
    ctx.beginPath();
    ctx.moveTo(place, bbox.top);
    ctx.lineTo(place, foot);
    ctx.stroke();
  }
  ctx.restore();
}

/** A few numbers as a line, for a row of a table. */
export function Spark({ values, color = "var(--accent)", width = 110, height = 26 }) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return html`<svg class="spark" width=${width} height=${height}></svg>`;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (i) => ((i / (values.length - 1)) * (width - 4) + 2).toFixed(1);
  const y = (value) => (height - 3 - ((value - low) / (high - low || 1)) * (height - 6)).toFixed(1);
  const points = values
    .map((value, i) => (value === null ? null : `${x(i)},${y(value)}`))
    .filter(Boolean)
    .join(" ");
  return html`<svg class="spark" width=${width} height=${height} role="img"
      aria-label=${`from ${number(known[0])} to ${number(known[known.length - 1])}`}>
    <polyline points=${points} fill="none" stroke=${color} stroke-width="1.5" stroke-linejoin="round" /></svg>`;
}
