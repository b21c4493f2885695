// A group of pulls: what each arm was worth to it, and how the policy's arms went over time.

import { ArmsPanel } from "./curves.js";
import { useDocs } from "./metrics.js";
import { go, href } from "./route.js";
import { between, diverging, SERIES } from "./scale.js";
import { html, number, signed, useMemo } from "./ui.js";

export function ArmsView({ data, run, look, metrics, step }) {
  const docs = useDocs();
  const arms = useMemo(() => byArm(data.samples), [data]);
  const rewards = data.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const most = Math.max(...data.samples.map((sample) => Math.abs(sample.advantage ?? 0)), 1e-9);
  const names = Object.keys(metrics.data?.columns ?? {}).filter((name) => name.startsWith("arm_probability/"));
  const steps = run.sample_steps?.list ?? [];
  return html`
    ${
      names.length > 0 &&
      html`<${ArmsPanel} data=${metrics.data} docs=${docs} arms=${names} at=${step} steps=${steps}
      lead=${(other) => go(href(["run", run.run, "step", other]))} />`
    }
    <div class="wide"><table class="plain arms"><thead><tr><th>arm</th><th>pulls</th><th>mean reward</th>
      <th>advantage</th><th></th></tr></thead><tbody>
      ${arms.map(
        ({
          arm,
          samples,
        }) => html`<tr><td><span class="swatch" style=${{ background: SERIES[arm % SERIES.length] }}></span> ${arm}
            </td><td>${samples.length}</td>
        <td>${number(mean(samples.map((sample) => sample.reward)))}</td><td>
          ${signed(mean(samples.map((sample) => sample.advantage)))}</td>
        <td><span class="dots">${samples.map((sample) => html`<${Pull} ...${{ sample, look, low, high, most }} />`)}
          </span></td></tr>`,
      )}
    </tbody></table></div>`;
}

function Pull({ sample, look, low, high, most }) {
  const row = look.rows.get(sample.row);
  return html`<button type="button" class=${look.chosen?.row === sample.row ? "dot big chosen" : "dot big"}
      data-row=${sample.row} aria-label=${`reward ${number(sample.reward)}, advantage ${signed(sample.advantage)}`}
    style=${{ background: between(sample.reward, low, high), outlineColor: diverging(sample.advantage, most) }}
    onMouseEnter=${(event) => row && look.point(row, 0, event.target)} onMouseLeave=${() => look.point(null, null)}
      onClick=${() => row && look.choose(row, 0)}></button>`;
}

function byArm(samples) {
  const found = new Map();
  for (const sample of samples) {
    if (!found.has(sample.arm)) found.set(sample.arm, { arm: sample.arm, samples: [] });
    found.get(sample.arm).samples.push(sample);
  }
  return [...found.values()].sort((a, b) => a.arm - b.arm);
}

const mean = (values) => {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};
