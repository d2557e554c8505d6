// Which jobs the list shows: kept in the page's address, so that a list can be bookmarked and sent to somebody.

import { keepFilters } from './api.js';
import { $, whole, write } from './text.js';

const FIELDS = ['text', 'entry', 'since', 'sort', 'by'], HIDDEN = ['state', 'tag'];

// The list by state: what needs somebody comes first.
const BY_STATE = [
  { key: 'failed', title: 'Failed', states: ['failed', 'quarantined'], first: 5 },
  { key: 'running', title: 'Running', states: ['running'], first: 25 },
  { key: 'queued', title: 'Waiting', states: ['queued'], first: 10 },
  { key: 'paused', title: 'Paused', states: ['paused'], first: 10 },
  { key: 'finished', title: 'Finished', states: ['finished'], first: 15 },
  { key: 'cancelled', title: 'Cancelled', states: ['cancelled'], first: 5 },
];
const CHIPS = [
  ['', 'All'], ['failed', 'Failed'], ['quarantined', 'Quarantined'], ['running', 'Running'], ['queued', 'Waiting'],
  ['paused', 'Paused'], ['finished', 'Finished'], ['cancelled', 'Cancelled'],
];
const PAGE = 25;

const values = () => Object.fromEntries(new URLSearchParams(location.search));
let chosen = values();

// Changes some filters; those that are empty leave the address.
export function choose(change) {
  chosen = Object.fromEntries(Object.entries({ ...chosen, ...change }).filter(([, value]) => value));
  const query = new URLSearchParams(chosen).toString();
  history.replaceState(null, '', query ? `?${query}` : location.pathname);
  keepFilters(location.search);
}

export const filter = name => chosen[name] ?? '';
export const isNarrowed = () => [...FIELDS.slice(0, 3), ...HIDDEN].some(filter);

// The sections that the filters ask for: which states, and how many rows at first.
export function wanted() {
  const state = filter('state');
  const only = state && [{ key: state, title: CHIPS.find(([name]) => name === state)?.[1] ?? state, states: [state], first: PAGE }];
  if (filter('by')) return [{ states: null, title: 'Jobs', ...(only ? only[0] : {}), key: 'all', first: 2 * PAGE }];
  return only || BY_STATE;
}

// What to ask the API for a page of a section. The only place that knows how filters are called there.
export function query({ states }, limit, after) {
  const asked = new URLSearchParams({ limit });
  for (const state of states ?? []) asked.append('state', state);
  for (const name of ['text', 'entry', 'tag']) if (filter(name)) asked.set(name, filter(name).trim());
  // To the minute, so that pages of one list belong together.
  if (filter('since')) asked.set('since', Math.floor(Date.now() / 60_000) * 60 - filter('since'));
  // Who waits longest is the next to begin.
  const order = filter('sort') || (states?.join() === 'queued' ? 'oldest' : '');
  if (order === 'oldest') asked.set('order', order);  // The others sort what is there.
  if (after) asked.set('after', after);
  return asked;
}

// ---- The form

// `changed()` is called when the filters have changed.
export function begin(changed) {
  let typing = 0;
  const set = change => { choose(change); show(); changed(); };
  for (const name of FIELDS.slice(1)) $(name).addEventListener('change', event => set({ [name]: event.target.value }));
  $('text').addEventListener('input', event => {
    clearTimeout(typing);
    typing = setTimeout(() => set({ text: event.target.value }), 250);
  });
  $('filters').addEventListener('submit', event => event.preventDefault());
  $('widen').addEventListener('click', () => {
    set(Object.fromEntries([...FIELDS.slice(0, 3), ...HIDDEN].map(name => [name, ''])));
    $('text').focus();
  });
  $('states').replaceChildren(...CHIPS.map(([state, label]) => {
    const chip = document.createElement('button');
    chip.type = 'button';
    chip.dataset.state = state;
    chip.append(label, ' ', document.createElement('b'));
    chip.addEventListener('click', () => set({ state: filter('state') === state ? '' : state }));
    return chip;
  }));
  keepFilters(location.search);
  addEventListener('popstate', () => { chosen = values(); show(); changed(); });
  show();
}

// Puts what is chosen into the form.
export function show() {
  for (const name of FIELDS) {
    const field = $(name);
    if (field === document.activeElement && name === 'text') continue;
    const value = filter(name);
    if (field.tagName === 'SELECT' && value && ![...field.options].some(option => option.value === value)) field.add(new Option(value));
    field.value = value;
  }
  for (const chip of $('states').children) chip.setAttribute('aria-pressed', chip.dataset.state === filter('state'));
  const told = [filter('tag') && `tag “${filter('tag')}”`].filter(Boolean);
  $('narrowed').hidden = !isNarrowed();
  write($('narrowed-text'), told.length ? `Only jobs of ${told.join(' and ')}.` : 'Not all jobs are shown.');
}

// How many jobs there are in each state; states without jobs have no chip, unless it is pressed.
export function showCounts(states) {
  const all = Object.values(states).reduce((sum, count) => sum + count, 0);
  for (const chip of $('states').children) {
    const { state } = chip.dataset, count = state ? states[state] ?? 0 : all;
    chip.hidden = !count && chip !== document.activeElement && filter('state') !== state;
    write(chip.lastElementChild, whole(count));
  }
  return all;
}

export function showEntries(names) {
  const known = new Set([...$('entry').options].map(option => option.value));
  for (const name of names) if (!known.has(name)) $('entry').add(new Option(name));
}
