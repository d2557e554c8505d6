// How fast a job goes, when it will be done, and where it waits.

import { short, span, whole } from './text.js';

export function speed({ steps_per_second: steps, tokens_per_second: tokens }) {
  if (!steps) return '';
  const paced = steps >= 1 ? `${short(steps)} steps/s` : `${span(1 / steps)} a step`;
  return tokens ? `${paced}, ${short(tokens)} tokens/s` : paced;
}

// In one line: what is known and matters in the job's state.
export function pace(job) {
  if (job.state === 'queued') return job.place ? `place ${whole(job.place)} in the queue` : '';
  const took = job.trained_seconds >= 1 ? span(job.trained_seconds) : '';
  if (job.state !== 'running') return took && `trained for ${took}`;
  const left = job.left_seconds === null || job.left_seconds === undefined ? '' : `${span(job.left_seconds)} left`;
  return [speed({ steps_per_second: job.steps_per_second }), left || took].filter(Boolean).join(' · ');
}
