// The columns of the list: which are shown, in which order its jobs are, and what the cells say. What is chosen is kept in
// the page's address, so that a list can be sent to somebody, and in the browser, for the next visit.

import { devicesText, pace, speed } from './actions.js';
import { me } from './api.js';
import { $, ago, fill, lossText, make, set, span, whole, write } from './text.js';

const taken = seconds => seconds >= 1 ? span(seconds) : '';
// By name: the label, what jobs are sorted by, what a cell says, and whether the first click on the head sorts upwards.
const COLUMNS = {
  name: { label: 'Name', by: job => job.name, up: true },
  state: { label: 'State', by: job => job.state, up: true },
  owner: { label: 'User', by: job => job.owner, text: job => job.owner ?? '', up: true },
  devices: { label: 'Devices', by: devicesText, text: devicesText, up: true },
  steps: { label: 'Steps', by: job => job.step / (job.steps ?? Infinity) },
  loss: { label: 'Loss', by: job => job.loss, text: job => job.loss === null ? '' : lossText(job.loss), up: true },
  speed: { label: 'Speed', by: job => job.steps_per_second, text: job => speed({ steps_per_second: job.steps_per_second }) },
  waited: { label: 'Waited', by: job => job.waited_seconds, text: job => taken(job.waited_seconds) },
  trained: { label: 'Trained', by: job => job.trained_seconds, text: job => taken(job.trained_seconds) },
  updated: { label: 'Updated', by: job => job.updated, text: job => ago(job.updated) },
  submitted: { label: 'Submitted', by: job => job.submitted, text: job => ago(job.submitted) },
  tags: { label: 'Tags', by: job => job.tags.join(), text: job => job.tags.join(', '), up: true },
};
const USUAL = 'state,owner,devices,steps,loss,updated,tags', NEWEST = '-submitted', KEPT = 'asyncpipe columns';

const names = ({ columns = localStorage.getItem(KEPT) ?? USUAL }) => Object.keys(COLUMNS).filter(
  name => name === 'name' || (columns.split(',').includes(name) && (name !== 'owner' || me.user)));

// What the list is sorted by, `down` or up, and whether the service does it (`all`) or the page, for the jobs that it has.
export function order({ sort = NEWEST }) {
  const name = sort.replace('-', '');
  return name in COLUMNS ? { sort, name, label: COLUMNS[name].label, down: sort.startsWith('-'), all: name === 'submitted' } : order({});
}

// `jobs` as they are to be shown; those of which there is nothing to sort by come last.
export function sorted(jobs, asked) {
  const { name, down, all } = order(asked), none = value => value === null || value === undefined || value === '';
  const compared = (a, b) => typeof a === 'string' ? a.localeCompare(b, 'en', { numeric: true }) : a - b;
  return all ? jobs : jobs.map(job => [COLUMNS[name].by(job), job]).sort(
    ([a], [b]) => none(a) || none(b) ? none(a) - none(b) : compared(a, b) * (down ? -1 : 1)).map(([, job]) => job);
}

// The head of the table, and the panel in which columns and order are chosen. True if the rows are to be made anew.
export function showHead(asked, choose) {
  const { sort, name: by, down } = order(asked), there = names(asked), before = $('head').dataset.shown;
  const focused = document.activeElement?.closest('th')?.dataset.column;
  const unseen = text => { const head = make('th'); head.append(make('span', text, { class: 'unseen' })); return head; };
  fill($('head'), [there, sort], () => [unseen('Choose'), ...there.map(name => {
    const sign = by === name ? (down ? ' ↓' : ' ↑') : '', first = COLUMNS[name].up ? name : `-${name}`;
    const head = make('th', '', { scope: 'col', 'data-column': name, 'aria-sort': sign ? (down ? 'descending' : 'ascending') : 'none' });
    const button = head.appendChild(make('button', COLUMNS[name].label + sign, { type: 'button' }));
    button.addEventListener('click', () => choose({ sort: sort === first ? (down ? name : `-${name}`) : first }));
    return head;
  }), unseen('Actions')]);
  if ($('head').dataset.shown === before) return false;
  $('head').querySelector(`[data-column=${focused}] button`)?.focus();
  for (const box of $('columns').querySelectorAll('input')) box.checked = there.includes(box.value);
  $('sort').value = sort;
  return true;
}

export function makePanel(choose) {
  for (const [name, { label }] of Object.entries(COLUMNS)) {
    for (const [value, way] of [[name, 'upwards'], [`-${name}`, 'downwards']]) $('sort').append(make('option', `${label}, ${way}`, { value }));
    if (name === 'name') continue;
    const choice = make('label'), box = make('input', '', { type: 'checkbox', value: name });
    choice.append(box, ` ${label}`);
    $('columns').append(choice);
  }
  $('sort').addEventListener('change', event => choose({ sort: event.target.value }));
  $('columns').addEventListener('change', () => {
    const columns = [...$('columns').querySelectorAll(':checked')].map(box => box.value).join();
    localStorage.setItem(KEPT, columns);
    choose({ columns: columns === USUAL ? '' : columns || 'name' });
  });
}

// The cells of a row between its name and its buttons.
export function addCells(row, asked) {
  const cells = names(asked).slice(1).map(name => make('td', '', { 'data-column': name, 'data-label': COLUMNS[name].label }));
  row.querySelector('.what').after(...cells);
  for (const cell of cells) {
    if (cell.dataset.column === 'state') cell.append(make('p', '', { class: 'state' }));
    if (cell.dataset.column !== 'steps') continue;
    const bar = make('div', '', { class: 'bar', role: 'progressbar' });
    bar.append(make('div'));
    cell.append(bar, make('p', '', { class: 'done faint' }), make('p', '', { class: 'pace faint' }));
  }
}

export function fillCells(row, job) {
  for (const cell of row.querySelectorAll('[data-column]')) {
    const { column } = cell.dataset, { step, steps } = job;
    if (column === 'state') write(cell.firstChild, job.asked ? `${job.state}, to be ${job.asked}` : job.state);
    else if (column !== 'steps') write(cell, COLUMNS[column].text(job));
    else {
      const [bar, done, below] = cell.children;
      bar.hidden = !steps;
      set(bar, { 'aria-label': `Training steps of ${job.name}`, 'aria-valuemax': steps ?? 0, 'aria-valuenow': Math.min(step, steps ?? step) });
      bar.firstChild.style.width = `${steps ? Math.min(step / steps, 1) * 100 : 0}%`;
      write(done, `step ${whole(step)}${steps ? ` of ${whole(steps)}` : ''}`);
      write(below, pace(job));
    }
  }
}
