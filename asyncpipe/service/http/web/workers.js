// The service's workers, if it has some: few, and the same ones all the time, so their rows stay where they are.

import { send } from './api.js';
import { complain } from './actions.js';
import { jobs } from './list.js';
import { $, duration, write } from './text.js';

let turn = () => {};
export const begin = now => { turn = now; };

export function show(workers) {
  const list = $('workers');
  $('workers-section').hidden = !workers.length;
  while (list.children.length > workers.length) list.lastElementChild.remove();
  workers.forEach((worker, index) => fill(list.children[index] ?? list.appendChild(newWorker()), worker));
}

function fill(row, worker) {
  const part = name => row.querySelector(name), up = worker.up ? 'up' : 'down';
  row.dataset.state = worker.draining ? 'draining' : up;
  write(part('.name'), worker.name);
  write(part('.state'), worker.draining ? `${up}, draining` : up);
  const heard = worker.heartbeat_seconds, names = worker.jobs.map(id => jobs.get(id)?.name ?? id);
  write(part('.facts'), [
    worker.host === worker.name ? '' : worker.host, worker.machine, worker.pid ? `process ${worker.pid}` : '',
    heard > 2 ? `silent for ${duration(heard)}` : '', names.join(', '),
  ].filter(Boolean).join(' · '));
  const focused = row.contains(document.activeElement);
  for (const button of row.querySelectorAll('button')) {
    button.hidden = worker.draining !== (button.dataset.act === 'undrain');
    button.setAttribute('aria-label', `${button.textContent} ${worker.host}`);
    button.dataset.host = worker.host;
  }
  // The button that took the place of the one with the focus.
  if (focused && !row.contains(document.activeElement)) row.querySelector('button:not([hidden])').focus({ preventScroll: true });
}

function newWorker() {
  const row = $('worker').content.firstElementChild.cloneNode(true);
  for (const button of row.querySelectorAll('button')) button.addEventListener('click', () => act(button.dataset.act, button.dataset.host));
  return row;
}

async function act(what, host) {
  try {
    await send(`v1/workers/${encodeURIComponent(host)}/${what}`);
    complain('');
  } catch (error) {
    complain(error.message);
  }
  turn();
}
