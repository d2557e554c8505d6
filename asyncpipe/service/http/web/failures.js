// Failures by their root line: how often each has happened, and to whom. A click shows the jobs.

import { ask } from './api.js';
import { $, ago, count, fill, make } from './text.js';

export async function show({ state, root }, choose) {
  const wanted = state === 'failed' || root, { failures } = wanted ? await ask('v1/failures?limit=20').catch(() => ({ failures: [] })) : { failures: [] };
  $('failures').hidden = !failures.length;
  fill($('failure-rows'), [failures, root], () => failures.map(group => {
    const item = make('li'), chosen = group.root === root;
    const button = item.appendChild(make('button', '', { type: 'button', 'aria-pressed': chosen }));
    button.append(make('b', `${count(group.count, 'job')} `), group.root);
    button.addEventListener('click', () => choose({ state: 'failed', root: chosen ? '' : group.root }));
    item.append(make('span', [group.users.join(', '), ago(group.last)].filter(Boolean).join(' · '), { class: 'faint' }));
    return item;
  }));
}
