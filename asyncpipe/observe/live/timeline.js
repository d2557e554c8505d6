// The timeline of a step, as SVG in pixels of the page. A task's text is told below the picture, for the task under the
// pointer or the one to which the arrow keys have gone; it stays told when the next step is drawn.

import { duration, set, write } from './text.js';

const ROW = 26, BAR = 6, BETWEEN = 9, AXIS = 22, CHARACTER = 6.6, LABEL = 18;

// A new SVG element below `parent`.
function add(parent, name, attributes = {}) {
  const element = parent.appendChild(document.createElementNS('http://www.w3.org/2000/svg', name));
  set(element, attributes);
  return element;
}

// The elements of the tasks are reused from step to step, because steps are similar and only changed attributes need to
// be set. There may be two thousand tasks, four times a second.
export class Timeline {
  constructor(svg, story) {
    Object.assign(this, { svg, story, data: null, pool: [], order: [], chosen: -1 });
    this.lanes = add(svg, 'g');
    this.tasks = add(svg, 'g');
    const point = event => this.choose(+(event.target.closest('.task')?.dataset.index ?? -1));
    svg.addEventListener('pointermove', point);
    svg.addEventListener('pointerdown', point);
    svg.addEventListener('pointerleave', event => { if (event.pointerType === 'mouse') this.choose(-1); });
    svg.addEventListener('blur', () => this.choose(-1));
    svg.addEventListener('keydown', event => this.go(event));
    new ResizeObserver(() => this.redraw()).observe(svg.parentElement);
  }

  draw(timeline, devices) {
    Object.assign(this, { data: timeline, devices });
    this.redraw();
  }

  redraw() {
    const { data, svg } = this;
    if (!data || !data.tasks.length) return;
    const width = svg.clientWidth, left = width < 560 ? 62 : 96;
    const scale = (width - left - 1) / Math.max(data.seconds * 1e3, 1e-9);
    const pitch = ROW + (('C' in data.kinds || 'A' in data.kinds) ? BAR + 2 : 0) + BETWEEN;
    // Where there are replicas, the name of each stands above its rows.
    const top = row => row * pitch + (data.replica ? (Math.floor(row / data.replica) + 1) * LABEL : 0);
    const height = top(data.rows.length - 1) + pitch + AXIS;
    set(svg, { viewBox: `0 0 ${width} ${height}`, height });
    this.drawLanes(width, left, top, height);
    data.tasks.forEach((task, index) => this.drawTask(task, index, left, scale, top(task[0])));
    for (const mark of this.pool.splice(data.tasks.length)) mark.group.remove();
    // The order in which the arrow keys go through the tasks: row by row.
    this.order = data.tasks.map((_, index) => index).sort((a, b) => data.tasks[a][0] - data.tasks[b][0] || a - b);
    this.choose(this.chosen);
  }

  drawLanes(width, left, top, height) {
    const { data, lanes } = this, most = Math.floor((left - 6) / CHARACTER);
    lanes.replaceChildren();
    data.rows.forEach((name, row) => {
      const y = top(row);
      if (data.replica && row % data.replica === 0) {
        add(lanes, 'text', { class: 'replica', x: 0, y: y - 6 }).textContent = `replica ${row / data.replica}`;
      }
      add(lanes, 'rect', { class: 'lane', x: left, y, width: width - left, height: ROW, rx: 3 });
      const clipped = name.length > most ? `${name.slice(0, most - 1)}…` : name;
      add(lanes, 'text', { class: 'name', x: 0, y: y + 12 }).textContent = clipped;
      add(lanes, 'text', { x: 0, y: y + 25 }).textContent = `${Math.round(this.devices[row].busy * 100)} % busy`;
    });
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const x = left + share * (width - left - 1), anchor = share === 1 ? 'end' : share ? 'middle' : 'start';
      add(lanes, 'line', { class: 'tick', x1: x, x2: x, y1: 0, y2: height - AXIS + 3 });
      const text = add(lanes, 'text', { x, y: height - 5, 'text-anchor': anchor });
      text.textContent = share ? duration(share * data.seconds) : '0';
    }
  }

  drawTask([, start, end, kind, label, stage], index, left, scale, top) {
    const mark = this.pool[index] ?? this.newMark(index);
    const copy = 'COLA'.includes(kind), x = left + start * scale, width = Math.max((end - start) * scale - 0.7, 1);
    const y = top + (copy ? ROW + 2 : 0), fill = this.data.colours[kind][this.data.tint[stage]];
    set(mark.rect, { x: x.toFixed(2), y, width: width.toFixed(2), height: copy ? BAR : ROW, fill });
    mark.group.dataset.kind = kind;
    const text = !copy && width > label.length * CHARACTER + 2 ? label : '';
    if (text) set(mark.text, { x: (x + width / 2).toFixed(2), y: y + ROW / 2 + 4 });
    write(mark.text, text);
  }

  newMark(index) {
    const group = add(this.tasks, 'g', { class: 'task', 'data-index': index });
    return this.pool[index] = { group, rect: add(group, 'rect'), text: add(group, 'text') };
  }

  go(event) {
    const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === 'Escape') this.choose(-1);
    if (!way || !this.order.length) return;
    event.preventDefault();
    const at = this.order.indexOf(this.chosen), last = this.order.length - 1;
    this.choose(this.order[at < 0 ? (way > 0 ? 0 : last) : Math.min(Math.max(at + way, 0), last)]);
  }

  choose(index) {
    this.pool[this.chosen]?.group.classList.remove('chosen');
    this.chosen = index in this.pool ? index : -1;
    this.pool[this.chosen]?.group.classList.add('chosen');
    write(this.story, this.chosen < 0 ? '' : this.told(this.data.tasks[index]));
  }

  told([row, start, end, kind, , stage, microbatch, source]) {
    const which = microbatch === null ? '' : `, micro-batch ${microbatch}`;
    const where = source === null ? `stage ${stage}` : `stage ${source} to ${stage}`;
    const ran = `${duration((end - start) / 1e3)}, from ${duration(start / 1e3)} to ${duration(end / 1e3)}`;
    return `${this.data.kinds[kind]}${which}: ${where} on ${this.data.rows[row]}, ${ran}`;
  }
}
