// The timeline of a step, as SVG in pixels of the page.

import { add, set, tickText, ticks } from './charts.js';
import { duration } from './text.js';

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
