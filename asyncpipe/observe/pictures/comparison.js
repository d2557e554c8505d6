'use strict';
// The script of a page that compares steps. Without it the page is complete: browsers show a task's <title> when the
// pointer rests on it. The script shows it at once, fades all other micro-batches, sorts the table, and zooms. Zooming
// stretches only the time axis: it scales the horizontal coordinates, and shows the labels that fit.
const $ = (selector, within) => [...(within || document).querySelectorAll(selector)];
const pictures = $('.scroll svg'), tip = document.getElementById('tip'), zoom = document.getElementById('zoom');
const focus = document.head.appendChild(document.createElement('style'));
document.body.classList.add('ready');

// Zoom: remember every horizontal coordinate as drawn, and scale it by each new factor.
const LABEL = /^(\w)\((?:(\d+),)?(\d+)\)/, WIDTH = 7;
const parts = pictures.map(svg => ({
  svg, left: +svg.dataset.left, width: +svg.dataset.width, height: svg.viewBox.baseVal.height,
  right: svg.viewBox.baseVal.width - svg.dataset.left - svg.dataset.width,
  lanes: $('rect.lane', svg).map(e => [e, +e.getAttribute('width')]),
  axis: $('.axis text', svg).map(e => [e, +e.getAttribute('x')]),
  paths: $('.axis path, .arrows path', svg).map(e => [e, e.getAttribute('d').split(/(-?[\d.]+)/)]),
  tasks: $('g[data-m]', svg).map(g => {
    const rect = g.querySelector('rect'), text = g.querySelector('text');
    return { g, rect, text, x: +rect.getAttribute('x'), width: +rect.getAttribute('width') + 0.8 };
  }),
}));

// The text of the task's title, which is removed: the browser would show it a second time.
function story(g) {
  const title = g.querySelector('title');
  if (title) { g.dataset.story = title.textContent; title.remove(); }
  return g.dataset.story;
}

function label(part, task) {
  const [, kind, microbatch, stage] = LABEL.exec(story(task.g)) || [];
  if (!kind || +task.rect.getAttribute('height') < 20) return null;
  const text = document.createElementNS('http://www.w3.org/2000/svg', 'text');
  text.textContent = kind + (microbatch || '') + ('stages' in part.svg.dataset ? '.' + stage : '');
  text.setAttribute('y', +task.rect.getAttribute('y') + 17);
  return task.g.appendChild(text);
}

function stretch(part, factor) {
  const at = x => (part.left + (x - part.left) * factor).toFixed(2), svg = part.svg;
  const whole = part.left + part.width * factor + part.right;
  svg.setAttribute('width', whole);
  svg.setAttribute('viewBox', `0 0 ${whole} ${part.height}`);
  for (const [e, width] of part.lanes) e.setAttribute('width', width * factor);
  for (const [e, x] of part.axis) e.setAttribute('x', at(x));
  for (const [e, d] of part.paths) {
    // The numbers after M, C and H are x, y, x, y …, in absolute coordinates; those after a tick's v are only y.
    let vertical = false;
    e.setAttribute('d', d.map((piece, k) => {
      if (k % 2 === 0) { vertical ||= piece.includes('v'); return piece; }
      return k % 4 === 1 && !vertical ? at(+piece) : piece;
    }).join(''));
  }
  for (const task of part.tasks) {
    const width = task.width * factor;
    task.rect.setAttribute('x', at(task.x));
    task.rect.setAttribute('width', Math.max(width - 0.8, 0.3).toFixed(2));
    if (task.text === null && width > 3 * WIDTH) task.text = label(part, task);
    if (!task.text) continue;
    const fits = task.text.textContent.length * WIDTH <= width;
    task.text.style.display = fits ? '' : 'none';
    if (fits) task.text.setAttribute('x', +at(task.x) + width / 2 - 0.4);
  }
}

function fitting() {
  const part = parts[0], room = part.svg.parentElement.clientWidth - part.left - part.right;
  return Math.max(room, 200) / part.width;
}

let shown = 0;
function redraw() {
  const factor = fitting() * 2 ** +zoom.value;
  if (factor === shown) return;
  const scroll = parts[0].svg.parentElement.scrollLeft * (shown ? factor / shown : 1);
  shown = factor;
  for (const part of parts) stretch(part, factor);
  for (const part of parts) part.svg.parentElement.scrollLeft = scroll;
}
zoom.addEventListener('input', () => requestAnimationFrame(redraw));
addEventListener('resize', () => requestAnimationFrame(redraw));
redraw();
for (const { svg } of parts) svg.parentElement.addEventListener('scroll', event => {
  for (const other of parts) other.svg.parentElement.scrollLeft = event.target.scrollLeft;
});

// Hovering over a task: show its title, and fade all other micro-batches in every picture.
function enter(event) {
  const task = event.target.closest ? event.target.closest('g[data-m]') : null;
  tip.hidden = !task;
  focus.textContent = '';
  if (!task) return;
  tip.textContent = story(task);
  if (task.dataset.m >= 0) focus.textContent = `g[data-m]:not([data-m="${task.dataset.m}"]) { fill-opacity: .2 }`;
}
document.addEventListener('pointerover', enter);
document.addEventListener('pointermove', event => {
  if (tip.hidden) return;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + 'px';
});

// The table: a click on a heading sorts by it, a second click reverses the order.
for (const [column, heading] of $('thead th').entries()) heading.addEventListener('click', () => {
  const order = heading.getAttribute('aria-sort') === 'ascending' ? 'descending' : 'ascending';
  for (const other of $('thead th')) other.removeAttribute('aria-sort');
  heading.setAttribute('aria-sort', order);
  const sign = order === 'ascending' ? 1 : -1, body = document.querySelector('tbody');
  const value = row => row.cells[column].dataset.v;
  const compare = (a, b) => (isNaN(value(a)) ? value(a).localeCompare(value(b)) : value(a) - value(b));
  body.append(...$('tr', body).sort((a, b) => sign * compare(a, b)));
});
