// Asking the API that programs use. Addresses are relative to this file, so they are right where a host mounts the API.

const ROOT = new URL('.', import.meta.url);

// The service has refused a request, and said why.
export class Refused extends Error {
  constructor(text, status) {
    super(text);
    this.status = status;
  }
}

export const address = path => new URL(path, ROOT).href;

export async function ask(path, options = {}) {
  const response = await fetch(address(path), { cache: 'no-store', ...options });
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  const problems = (body.problems ?? []).map(({ key, text }) => `${key}: ${text}`);
  throw new Refused([body.detail ?? `HTTP ${response.status}`, ...problems].join(' '), response.status);
}

export const send = (path, body = {}, method = 'POST') => ask(path, {
  method, headers: { 'Content-Type': 'application/json' }, body: method === 'DELETE' ? undefined : JSON.stringify(body),
});

const PAUSES = [2, 4, 8, 15, 30];

// Calls `turn` every `seconds`, and at once when the page is seen again; less often while it fails. `tell(state, text)`
// shows whether the service answers. Returns a function that makes it turn now.
export function turns(turn, seconds, tell) {
  let timer = 0, failures = 0, busy = false, again = false;
  const wait = () => {
    clearTimeout(timer);
    const pause = failures ? PAUSES[Math.min(failures, PAUSES.length) - 1] : seconds;
    timer = setTimeout(() => document.hidden ? wait() : now(), pause * 1000);
  };
  async function now() {
    if (busy) { again = true; return; }
    busy = true;
    clearTimeout(timer);
    try {
      do {
        again = false;
        await turn();
        failures = 0;
        tell('live', 'live', '');
      } while (again);
    } catch (error) {
      failures += 1;
      tell('lost', 'not connected', error instanceof Refused ? error.message : '');
      if (!(error instanceof Refused || error instanceof TypeError)) console.error(error);
    }
    busy = false;
    wait();
  }
  document.addEventListener('visibilitychange', () => document.hidden || now());
  return now;
}

// The filters of the list, for the way back from a job's page. Without storage that way leads to the whole list.
const KEPT = 'asyncpipe filters';
export function keepFilters(search) {
  try { sessionStorage.setItem(KEPT, search); } catch { /* not allowed here */ }
}
export function keptFilters() {
  try { return sessionStorage.getItem(KEPT) ?? ''; } catch { return ''; }
}
