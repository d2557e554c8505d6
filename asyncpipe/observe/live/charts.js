// Losses over steps as charts of uPlot (vendor/), and small lines without axes as SVG.

import { lossText, set, whole, write } from './text.js';

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shown = value => value === null || value === undefined ? '–' : lossText(value);

// Lines over the same axes in `box`. The legend below names the values under the pointer, or at the step to which the
// arrow keys have gone.
export class Chart {
  constructor(box, height) {
    Object.assign(this, { box, height, lines: [], marks: [], log: false, plot: null, made: '' });
    this.told = box.appendChild(document.createElement('p'));
    this.told.className = 'unseen';
    this.told.setAttribute('role', 'status');
    new ResizeObserver(() => this.redraw()).observe(box);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { this.made = ''; this.redraw(); });
    box.addEventListener('keydown', event => this.go(event));
  }

  // `lines` are { name, points: [[step, loss]] }; a loss of null leaves a gap.
  draw(lines) {
    this.lines = lines;
    this.redraw();
  }

  redraw() {
    const { box, height, lines } = this, width = box.clientWidth;
    if (!width || !lines.length) return;
    const data = uPlot.join(lines.map(({ points }) => [points.map(([x]) => x), points.map(([, y]) => y)]));
    const log = this.log && lines.every(({ points }) => points.every(([, y]) => y === null || y > 0));
    const made = JSON.stringify([lines.map(line => line.name), log]);
    if (made !== this.made) {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(width, log), data, box);
      this.made = made;
    } else {
      this.plot.setData(data);
      if (this.plot.width !== width) this.plot.setSize({ width, height });
    }
  }

  options(width, log) {
    const axis = { stroke: colour('--faint'), grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false }, font: '11px system-ui' };
    const series = this.lines.map(({ name }, index) => ({
      label: name, stroke: colour(`--line-${index % 8}`), width: 2, dash: index > 3 ? [6, 4] : [],
      value: (_, loss) => shown(loss),
    }));
    return {
      width, height: this.height, series: [{ label: 'step', value: (_, step) => step === null ? '–' : whole(step) }, ...series],
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } }, cursor: { y: false, drag: { x: false } },
      axes: [{ ...axis, size: 30 }, { ...axis, size: 60 }], hooks: { draw: [plot => this.mark(plot)] },
    };
  }

  // A line, with a word beside it, at each of `marks`: [step, word].
  mark({ ctx, bbox, valToPos }) {
    const drawn = Object.assign(ctx, { strokeStyle: colour('--faint'), fillStyle: colour('--faint'), font: `${11 * devicePixelRatio}px system-ui`, textAlign: 'left' });
    for (const [step, word] of this.marks) {
      const x = Math.round(valToPos(step, 'x', true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      drawn.fillRect(x, bbox.top, devicePixelRatio, bbox.height);
      drawn.fillText(word, x + 4 * devicePixelRatio, bbox.top + 11 * devicePixelRatio);
    }
  }

  go(event) {
    const { plot } = this, steps = plot?.data[0] ?? [];
    const way = { ArrowRight: 1, ArrowLeft: -1, End: Infinity, Home: -Infinity }[event.key];
    if (!way || !steps.length) return;
    event.preventDefault();
    const from = plot.cursor.idx ?? (way > 0 ? -1 : steps.length), to = Math.min(Math.max(from + way, 0), steps.length - 1);
    plot.setCursor({ left: plot.valToPos(steps[to], 'x'), top: 0 });
    const losses = this.lines.map(({ name }, index) => `${name} ${shown(plot.data[index + 1][to])}`);
    write(this.told, [`step ${whole(steps[to])}`, ...losses].join(', '));
  }
}

// A line through `points` [x, y] in `svg`, over an area; a dashed line stands at `goal` if given.
export function spark(svg, points, goal = null) {
  const drawn = points.filter(([, y]) => y !== null), values = drawn.map(([, y]) => y).concat(goal ?? []);
  svg.replaceChildren();
  if (drawn.length < 2) return;
  const low = Math.min(...values), room = Math.max(...values) - low || 1, [first] = drawn[0], [last] = drawn.at(-1);
  const up = y => (28 - (y - low) / room * 26).toFixed(2);
  const line = drawn.map(([x, y]) => `${((x - first) / (last - first || 1) * 100).toFixed(2)} ${up(y)}`).join('L');
  set(svg, { viewBox: '0 0 100 30', preserveAspectRatio: 'none' });
  const paths = { area: `M${line}L100 30L0 30Z`, goal: goal === null ? '' : `M0 ${up(goal)}H100`, line: `M${line}` };
  for (const [name, d] of Object.entries(paths)) {
    const path = svg.appendChild(document.createElementNS(svg.namespaceURI, 'path'));
    set(path, { class: name, d, 'vector-effect': 'non-scaling-stroke' });
  }
}
