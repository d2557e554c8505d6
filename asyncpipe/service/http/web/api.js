// Asking the API that programs use. Addresses are relative to this file, so they are right where a host mounts the API.

import { complain } from './actions.js';
import { $, write } from './text.js';

const ROOT = new URL('.', import.meta.url);

// The service has refused a request, and said why.
class Refused extends Error {
  constructor(text, status, problems) {
    super(text);
    Object.assign(this, { status, problems });
  }
}

export const address = path => new URL(path, ROOT).href;

export async function ask(path, options = {}) {
  const response = await fetch(address(path), { cache: 'no-store', ...options });
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  const problems = body.problems ?? [], texts = problems.map(({ key, text }) => `${key}: ${text}`);
  throw new Refused([body.detail ?? `HTTP ${response.status}`, ...texts].join(' '), response.status, problems);
}

export const send = (path, body = {}) =>
  ask(path, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) });

// Who looks at the page, and what that user's role is. Where there are no users, everybody may do everything.
export const me = await ask('v1/me').catch(() => ({ user: null, role: 'operate', teams: [] }));
if ($('me')) write($('me'), me.user ? `${me.user}, may ${me.role}` : '');
if ($('to-submit')) $('to-submit').hidden = me.role === 'read';

const PAUSES = [2, 4, 8, 15, 30];

// Calls `turn` every `seconds`, and at once when the page is seen again; less often while it fails. On the list, the
// connection says whether the service answers. Returns a function that makes it turn now.
export function turns(turn, seconds, tells = true) {
  let timer = 0, failures = 0, busy = false, again = false;
  const wait = () => {
    clearTimeout(timer);
    const pause = failures ? PAUSES[Math.min(failures, PAUSES.length) - 1] : seconds;
    timer = setTimeout(() => document.hidden ? wait() : now(), pause * 1000);
  };
  const tell = (state, text) => {
    if (!tells) return;
    $('connection').dataset.state = state;
    write($('connection-text'), text);
  };
  async function now() {
    again = busy;
    if (busy) return;
    busy = true;
    try {
      await turn();
      failures = 0;
      tell('live', 'live');
    } catch (error) {
      failures += 1;
      tell('lost', 'not connected');
      if (error instanceof Refused) complain(error.message);
      else if (!(error instanceof TypeError)) console.error(error);
    }
    busy = false;
    if (again) now();
    else wait();
  }
  document.addEventListener('visibilitychange', () => document.hidden || now());
  return now;
}
