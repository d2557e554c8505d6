// Lines as SVG in pixels of the page: small ones without axes, and charts of one or several lines with labelled axes.
// A picture is redrawn when its width changes, so that its text keeps its size.

import { lossText, whole } from './text.js';

const SVG = 'http://www.w3.org/2000/svg';

// A new SVG element below `parent`.
export function add(parent, name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  set(element, attributes);
  return parent.appendChild(element);
}

export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

// ---- Axes

// Round steps of an axis: 1, 2 or 5 times a power of ten, at most `most` of them within `span`.
function roundStep(span, most) {
  const rough = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(times => times * power).find(step => step >= rough * 0.999);
}

export function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const step = roundStep(high - low, most), found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

// Powers of ten between `low` and `high`, with 2 and 5 times each where these are few.
function logTicks(low, high) {
  const found = [], few = Math.log10(high / low) < 3;
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const times of few ? [1, 2, 5] : [1]) found.push(times * 10 ** power);
  }
  const inside = found.filter(value => value >= low && value <= high);
  return inside.length > 1 ? inside : ticks(low, high, 4);
}

// `value` with enough decimals to distinguish neighbouring ticks.
export function tickText(value, step) {
  if (Math.abs(value) >= 1e5) return value.toExponential(0).replace('e+', 'e');
  const decimals = step >= 1 ? 0 : Math.min(Math.ceil(-Math.log10(step) - 1e-9), 8);
  return value.toFixed(decimals);
}

const there = points => points.filter(([, value]) => value !== null);

// The lowest and the highest value of `points`; null if there is none.
export function extent(points) {
  let low = Infinity, high = -Infinity;
  for (const [, value] of points) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return high >= low ? [low, high] : null;
}

// The path through `points` [x, y]; a y of null leaves a gap.
function path(points) {
  let pen = 'M';
  return points.map(([x, y]) => {
    if (y === null) { pen = 'M'; return ''; }
    const piece = `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = 'L';
    return piece;
  }).join('');
}

// ---- A line without axes

// A dashed line stands at `goal` if given. `values` and `steps` are what the picture spans, if it is to be comparable.
export function spark(svg, points, { goal = null, values = null, steps = null } = {}) {
  svg.replaceChildren();
  const width = svg.clientWidth, height = svg.clientHeight;
  if (there(points).length < 2 || !width) return;
  let [low, high] = values ?? extent(goal === null ? points : [...points, [0, goal]]);
  const room = (high - low) * 0.06 || Math.abs(low) * 0.05 || 0.5;
  [low, high] = [low - room, high + room];
  const [first, last] = steps ?? [points[0][0], points.at(-1)[0]];
  const across = x => (x - first) / (last - first || 1) * width;
  const up = y => y === null ? null : height - (y - low) / (high - low) * height;
  set(svg, { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none' });
  const line = points.map(([x, y]) => [across(x), up(y)]);
  if (there(points).length === points.length) {
    const [start, end] = [line[0][0].toFixed(1), line.at(-1)[0].toFixed(1)];
    add(svg, 'path', { class: 'area', d: `${path(line)}L${end} ${height}L${start} ${height}Z` });
  }
  if (goal !== null) add(svg, 'path', { class: 'goal', d: path([[0, up(goal)], [width, up(goal)]]) });
  add(svg, 'path', { class: 'line', d: path(line) });
}

// ---- A chart

const LEFT = 52, RIGHT = 12, TOP = 22, BOTTOM = 34;

// Lines over the same axes. `across` and `up` are what the axes show; both are written at them.
export class Chart {
  constructor(svg, { height, across = 'step', up = 'loss' }) {
    Object.assign(this, { svg, height, across, up, lines: [], next: null, held: false, log: false, marks: [] });
  }

  // `lines` are { name, points: [[x, y]], index }; the index chooses the colour. While somebody reads values, the picture
  // stays as it is.
  draw(lines) {
    this.next = lines;
    if (!this.held) this.redraw();
  }

  release() {
    this.held = false;
    this.redraw();
  }

  redraw() {
    this.lines = this.next ?? this.lines;
    const { svg, height } = this, width = svg.clientWidth, all = this.lines.flatMap(line => line.points);
    svg.replaceChildren();
    this.marks = [];
    const values = extent(all);
    if (!width || !values) return;
    const logarithmic = this.log && values[0] > 0;
    const steps = all.map(([x]) => x), first = steps.reduce((a, b) => Math.min(a, b)), end = steps.reduce((a, b) => Math.max(a, b));
    const last = Math.max(end, first + 1), scale = logarithmic ? Math.log10 : value => value;
    const [bottom, top] = values.map(scale), room = (top - bottom) * 0.06 || Math.abs(bottom) * 0.05 || 0.5;
    this.x = x => LEFT + (x - first) / (last - first) * (width - LEFT - RIGHT);
    const share = y => (scale(y) - bottom + room) / (top - bottom + 2 * room);
    this.y = y => y === null ? null : height - BOTTOM - share(y) * (height - TOP - BOTTOM);
    set(svg, { viewBox: `0 0 ${width} ${height}`, height });
    this.drawAxes(logarithmic ? logTicks(...values) : ticks(bottom - room, top + room, 5), ticks(first, last, (width - LEFT) / 80), width);
    this.cursor = add(svg, 'line', { class: 'cursor', y1: TOP, y2: height - BOTTOM, visibility: 'hidden' });
    for (const line of this.lines) this.drawLine(line);
  }

  drawAxes(rows, columns, width) {
    const { svg, height } = this, right = width - RIGHT;
    const step = rows.length > 1 ? Math.min(...rows.slice(1).map((row, index) => row - rows[index])) : 1;
    for (const value of rows) {
      const y = this.y(value);
      add(svg, 'line', { class: 'tick', x1: LEFT, x2: right, y1: y, y2: y });
      add(svg, 'text', { x: LEFT - 7, y: y + 4, 'text-anchor': 'end' }).textContent = tickText(value, this.log ? Math.min(value, step) : step);
    }
    for (const value of columns.filter(Number.isInteger)) {
      const x = this.x(value), anchor = x > right - 20 ? 'end' : 'middle';
      add(svg, 'text', { x, y: height - BOTTOM + 15, 'text-anchor': anchor }).textContent = whole(value);
    }
    add(svg, 'text', { class: 'axis', x: 0, y: 11 }).textContent = this.up;
    add(svg, 'text', { class: 'axis', x: right, y: height - 3, 'text-anchor': 'end' }).textContent = this.across;
  }

  drawLine({ points, index = 0 }) {
    const group = add(this.svg, 'g'), alone = there(points).length === 1;
    group.style.setProperty('--colour', `var(--line-${index % 8})`);
    const dashed = index % 8 > 3 ? ' dashed' : '';
    add(group, 'path', { class: `line${dashed}`, d: path(points.map(([x, y]) => [this.x(x), this.y(y)])) });
    const circle = add(group, 'circle', { r: 4.5, visibility: 'hidden' }), end = there(points).at(-1);
    this.marks.push(circle);
    if (end && (alone || end === points.at(-1))) this.mark(circle, end);
  }

  mark(circle, [x, y]) {
    set(circle, { cx: this.x(x), cy: this.y(y), visibility: 'visible' });
  }

  // Marks each line's point nearest to step `x`; returns their text.
  tell(x) {
    const near = ({ points }) => there(points).reduce((best, one) => Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best);
    const told = this.lines.filter(line => there(line.points).length).map(line => [line, near(line)]);
    if (!told.length || !this.x) return '';
    for (const [line, point] of told) this.mark(this.marks[this.lines.indexOf(line)], point);
    const place = this.x(told.length > 1 ? x : told[0][1][0]);
    set(this.cursor, { x1: place, x2: place, visibility: 'visible' });
    if (told.length === 1 && this.lines.length === 1) {
      return `${this.across} ${whole(Math.round(told[0][1][0]))}\n${this.up} ${lossText(told[0][1][1])}`;
    }
    const at = `${this.across} ${whole(Math.round(x))}`;
    return [at, ...told.map(([line, [, y]]) => `${line.name}: ${lossText(y)}`)].join('\n');
  }

  // The step under `clientX`.
  stepAt(clientX) {
    const steps = this.lines.flatMap(line => line.points.map(([x]) => x)), box = this.svg.getBoundingClientRect();
    const share = (clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    const first = steps.reduce((a, b) => Math.min(a, b), Infinity), last = steps.reduce((a, b) => Math.max(a, b), first);
    return first + Math.min(Math.max(share, 0), 1) * (last - first);
  }

  get steps() {
    return [...new Set(this.lines.flatMap(line => there(line.points).map(([x]) => x)))].sort((a, b) => a - b);
  }
}

// Has the pointer and the arrow keys read a chart's values; `say(text, x, y)` shows them.
export function readable(chart, say) {
  const { svg } = chart;
  let at = -1;
  const leave = () => { at = -1; say(''); chart.release(); };
  svg.addEventListener('pointermove', event => {
    chart.held = true;
    say(chart.tell(chart.stepAt(event.clientX)), event.clientX, event.clientY);
  });
  svg.addEventListener('pointerleave', leave);
  svg.addEventListener('blur', leave);
  svg.addEventListener('keydown', event => {
    const steps = chart.steps, way = { ArrowRight: 1, ArrowLeft: -1, End: Infinity, Home: -Infinity }[event.key];
    if (event.key === 'Escape') leave();
    if (!way || !steps.length) return;
    event.preventDefault();
    chart.held = true;
    const few = Math.max(1, Math.round(steps.length / 60));
    at = at < 0 ? (way > 0 && way < Infinity ? 0 : steps.length - 1) : at + way * few;
    at = Math.min(Math.max(at, 0), steps.length - 1);
    const box = svg.getBoundingClientRect();
    say(chart.tell(steps[at]), box.left + chart.x(steps[at]), box.top + TOP);
  });
}

// A box beside the pointer, or below what the keyboard has chosen; no text hides it.
export function teller(tip) {
  return (text, x, y) => {
    tip.hidden = !text;
    tip.textContent = text;
    if (!text) return;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(Math.min(x + 12, innerWidth - width - 8), 8)}px`;
    tip.style.top = `${y + 18 + height > innerHeight ? Math.max(y - height - 12, 8) : y + 18}px`;
  };
}
