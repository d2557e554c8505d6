// Drawing: the timeline of a step and the lines of histories, as SVG in pixels of the page. A picture is redrawn when
// its width changes, so that its text keeps its size.

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

// Seconds with a unit.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  if (seconds >= 100) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return `${(seconds * 1e6).toPrecision(3)} µs`;
}

// Round steps of an axis: 1, 2 or 5 times a power of ten, at most `most` of them within `span`.
function roundStep(span, most) {
  const rough = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(times => times * power).find(step => step >= rough * 0.999);
}

function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const step = roundStep(high - low, most), found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

// `value` with enough decimals to distinguish neighbouring ticks.
function tickText(value, step) {
  const decimals = step >= 1 ? 0 : Math.min(Math.ceil(-Math.log10(step) - 1e-9), 8);
  return value.toFixed(decimals);
}

// ---- Timeline

const ROW = 26, BAR = 6, BETWEEN = 9, AXIS = 22, CHARACTER = 6.6;

// The elements of the tasks are reused from step to step, because steps are similar and only changed attributes need to
// be set. There may be two thousand tasks, four times a second.
export class Timeline {
  constructor(svg) {
    this.svg = svg;
    this.lanes = add(svg, 'g');
    this.group = add(svg, 'g');
    this.pool = [];
    this.data = null;
    this.order = [];
  }

  draw(timeline, devices) {
    this.data = timeline;
    this.devices = devices;
    this.redraw();
  }

  redraw() {
    const { data, svg } = this;
    if (!data || !data.tasks.length) return;
    const width = svg.clientWidth, left = width < 560 ? 62 : 96;
    const scale = (width - left - 1) / Math.max(data.seconds * 1e3, 1e-9);
    const pitch = ROW + (('C' in data.kinds) ? BAR + 2 : 0) + BETWEEN, height = data.rows.length * pitch + AXIS;
    set(svg, { viewBox: `0 0 ${width} ${height}`, height });
    this.drawLanes(width, left, pitch, height);
    data.tasks.forEach((task, index) => this.drawTask(task, index, left, scale, pitch));
    for (const mark of this.pool.splice(data.tasks.length)) mark.group.remove();
    // The order in which the arrow keys go through the tasks: row by row.
    this.order = data.tasks.map((_, index) => index).sort((a, b) => data.tasks[a][0] - data.tasks[b][0] || a - b);
  }

  drawLanes(width, left, pitch, height) {
    const { data, lanes } = this;
    lanes.replaceChildren();
    data.rows.forEach((name, row) => {
      const y = row * pitch;
      add(lanes, 'rect', { class: 'lane', x: left, y, width: width - left, height: ROW, rx: 3 });
      add(lanes, 'text', { class: 'name', x: 0, y: y + 12 }).textContent = clipped(name, left - 6);
      add(lanes, 'text', { x: 0, y: y + 25 }).textContent = `${Math.round(this.devices[row].busy * 100)} % busy`;
    });
    const span = data.seconds * 1e3, unit = span >= 1000 ? [1e3, 's'] : span >= 1 ? [1, 'ms'] : [1e-3, 'µs'];
    const found = ticks(0, span / unit[0], (width - left) / 90), step = found[1] - found[0] || 1;
    for (const tick of found) {
      const x = left + tick * unit[0] / span * (width - left - 1);
      add(lanes, 'line', { class: 'tick', x1: x, x2: x, y1: 0, y2: height - AXIS + 3 });
      const anchor = x > width - 24 ? 'end' : tick ? 'middle' : 'start';
      add(lanes, 'text', { x, y: height - 5, 'text-anchor': anchor })
        .textContent = tick ? `${tickText(tick, step)} ${unit[1]}` : '0';
    }
  }

  drawTask([row, start, end, kind, label, stage], index, left, scale, pitch) {
    const mark = this.pool[index] ?? this.newMark(index);
    const copy = 'COL'.includes(kind), x = left + start * scale, width = Math.max((end - start) * scale - 0.7, 1);
    const y = row * pitch + (copy ? ROW + 2 : 0), tint = this.data.tint[stage];
    set(mark.rect, { x: x.toFixed(2), y, width: width.toFixed(2), height: copy ? BAR : ROW, rx: width > 6 ? 2 : 0 });
    mark.rect.setAttribute('fill', this.data.colours[kind][tint]);
    mark.group.dataset.kind = kind;
    const text = !copy && width > label.length * CHARACTER + 2 ? label : '';
    if (text) set(mark.text, { x: (x + width / 2).toFixed(2), y: y + ROW / 2 + 4 });
    if (mark.text.textContent !== text) mark.text.textContent = text;
  }

  newMark(index) {
    const group = add(this.group, 'g', { class: 'task', 'data-index': index });
    return this.pool[index] = { group, rect: add(group, 'rect'), text: add(group, 'text') };
  }

  // The text for the task under the pointer.
  story(index) {
    const [row, start, end, kind, , stage, microbatch, source] = this.data.tasks[index];
    const which = microbatch === null ? '' : `, micro-batch ${microbatch}`;
    const where = source === null ? `stage ${stage}` : `stage ${source} to ${stage}`;
    const digits = this.data.seconds >= 10 ? 0 : this.data.seconds >= 0.1 ? 1 : 3;
    const ran = `${duration((end - start) / 1e3)}, from ${start.toFixed(digits)} to ${end.toFixed(digits)} ms`;
    return `${this.data.kinds[kind]}${which}\n${where} on ${this.data.rows[row]}\n${ran}`;
  }
}

function clipped(text, width) {
  const most = Math.floor(width / CHARACTER);
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

// ---- Lines

// The lowest and the highest of the values that are not null, with some room around them.
function range(values, always = []) {
  const there = [...values.filter(value => value !== null), ...always];
  const low = Math.min(...there), high = Math.max(...there), room = (high - low) * 0.06 || Math.abs(low) * 0.05 || 0.5;
  return [low - room, high + room];
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

// A line without axes, and a dashed line at `goal` if given.
export function spark(svg, points, goal = null) {
  svg.replaceChildren();
  const width = svg.clientWidth, height = svg.clientHeight;
  const there = points.filter(([, value]) => value !== null);
  if (there.length < 2 || !width) return;
  const [low, high] = range(points.map(([, value]) => value), goal === null ? [] : [goal]);
  const first = points[0][0], span = points.at(-1)[0] - first || 1;
  const across = x => (x - first) / span * width, up = y => y === null ? null : height - (y - low) / (high - low) * height;
  set(svg, { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none' });
  const line = points.map(([x, y]) => [across(x), up(y)]);
  if (there.length === points.length) add(svg, 'path', { class: 'area', d: `${path(line)}L${width} ${height}L0 ${height}Z` });
  if (goal !== null) add(svg, 'path', { class: 'goal', d: path([[0, up(goal)], [width, up(goal)]]) });
  add(svg, 'path', { class: 'line', d: path(line) });
}

// A line with axes, whose points show their values under the pointer.
export class Curve {
  constructor(svg, height) {
    this.svg = svg;
    this.height = height;
    this.points = [];
  }

  draw(points) {
    this.points = points;
    this.redraw();
  }

  redraw() {
    const { svg, points, height } = this, width = svg.clientWidth;
    svg.replaceChildren();
    if (!width || !points.some(([, value]) => value !== null)) return;
    const left = 44, right = 10, top = 8, bottom = 24;
    const [low, high] = range(points.map(([, value]) => value));
    const first = points[0][0], last = Math.max(points.at(-1)[0], first + 1);
    this.x = x => left + (x - first) / (last - first) * (width - left - right);
    this.y = y => y === null ? null : height - bottom - (y - low) / (high - low) * (height - top - bottom);
    set(svg, { viewBox: `0 0 ${width} ${height}`, height });
    this.drawAxes([low, high], [first, last], left, width - right);
    add(svg, 'path', { class: 'line', d: path(points.map(([x, y]) => [this.x(x), this.y(y)])) });
    this.circle = add(svg, 'circle', { r: 4.5, visibility: 'hidden' });
    const end = points.at(-1);
    if (end[1] !== null) this.mark(end);
  }

  drawAxes([low, high], [first, last], left, right) {
    const { svg, height } = this, rows = ticks(low, high, 5), columns = ticks(first, last, (right - left) / 80);
    const step = rows[1] - rows[0] || 1;
    for (const value of rows) {
      add(svg, 'line', { class: 'tick', x1: left, x2: right, y1: this.y(value), y2: this.y(value) });
      add(svg, 'text', { x: left - 7, y: this.y(value) + 4, 'text-anchor': 'end' }).textContent = tickText(value, step);
    }
    for (const value of columns.filter(Number.isInteger)) {
      add(svg, 'text', { x: this.x(value), y: height - 6, 'text-anchor': 'middle' }).textContent = value;
    }
  }

  mark([x, y]) {
    set(this.circle, { cx: this.x(x), cy: this.y(y), visibility: 'visible' });
  }

  // Marks and returns the point nearest to `clientX`; null if there is none.
  nearest(clientX) {
    if (!this.circle) return null;
    const at = clientX - this.svg.getBoundingClientRect().left;
    const there = this.points.filter(([, value]) => value !== null);
    const distance = point => Math.abs(this.x(point[0]) - at);
    const found = there.reduce((best, point) => distance(point) < distance(best) ? point : best, there[0]);
    if (found) this.mark(found);
    return found ?? null;
  }
}
