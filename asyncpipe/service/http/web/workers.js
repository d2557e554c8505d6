// The service's workers, if it has some: few, and the same ones all the time, so their rows stay where they are.

import { complain } from './actions.js';
import { me, send } from './api.js';
import { $, duration, write } from './text.js';

export function show(workers, jobs) {
  const list = $('workers');
  $('workers-section').hidden = !workers.length;
  while (list.children.length > workers.length) list.lastElementChild.remove();
  workers.forEach((worker, index) => fill(list.children[index] ?? list.appendChild(newRow()), worker, jobs));
}

function fill(row, worker, jobs) {
  const part = name => row.querySelector(name), up = worker.up ? 'up' : 'down', heard = worker.heartbeat_seconds;
  row.dataset.state = worker.draining ? 'draining' : up;
  write(part('.name'), worker.name);
  write(part('.state'), worker.draining ? `${up}, draining` : up);
  write(part('.facts'), [
    worker.host === worker.name ? '' : worker.host, worker.machine, worker.pid ? `process ${worker.pid}` : '',
    heard > 2 ? `silent for ${duration(heard)}` : '', worker.jobs.map(id => jobs.get(id)?.name ?? id).join(', '),
  ].filter(Boolean).join(' · '));
  for (const button of row.querySelectorAll('button')) {
    button.hidden = me.role !== 'operate' || worker.draining !== (button.dataset.act === 'undrain');
    button.setAttribute('aria-label', `${button.textContent} ${worker.host}`);
    button.dataset.host = worker.host;
  }
}

function newRow() {
  const row = $('worker').content.firstElementChild.cloneNode(true);
  for (const button of row.querySelectorAll('button')) {
    button.addEventListener('click', () => {
      const { act, host } = button.dataset;
      send(`v1/workers/${encodeURIComponent(host)}/${act}`).then(() => complain(''), error => complain(error.message));
    });
  }
  return row;
}
