import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { decode, tag } from '../src/codec';
import type { Event, JobState } from '../src/protocol';
import { apply, eventFrom, failures, fold, isFinal, newJobState, parseLines } from '../src/state';

const GOLDEN = join(__dirname, '..', '..', 'tests', 'unit', 'golden');
const journal = readFileSync(join(GOLDEN, 'journal.jsonl')).toString('utf8');
const expected = decode(readFileSync(join(GOLDEN, 'state.json'), 'utf8')) as JobState;

function event(kind: string, data: Record<string, unknown> = {}, rank: number | null = 0): Event {
  return { kind, t: 5, node: 'node0', rank, seq: 1, ...data };
}

test('the golden journal folds to the golden state', () => {
  const state = fold(parseLines(journal));
  expect(tag(state)).toEqual(tag(expected));
  expect(state).toEqual(expected);
  expect(isFinal(state)).toBe(true);
  expect(typeof state.driver!['ticks']).toBe('bigint');
  expect(state.notes[0]).toContain('\udc80');
});

test('going on from any point gives the same state', () => {
  const events = parseLines(journal);
  for (let cut = 0; cut <= events.length; cut++) {
    const half = decode(JSON.stringify(tag(fold(events.slice(0, cut))))) as JobState;
    expect(fold(events.slice(cut), half)).toEqual(expected);
  }
});

test('the rank that is blamed comes first, then the earliest', () => {
  expect(failures(expected).map(rank => rank.rank)).toEqual([2, 3]);
  expect(failures({ ...expected, first_failure: 3 }).map(rank => rank.rank)).toEqual([3, 2]);
});

test.each([
  event('rank.failed'),
  event('rank.failed', { error: 3 }),
  event('rank.failed', { error: { type: 'E', module: 'm', message: '', text: '', t: 'soon' } }),
  event('rank.failed', { error: { type: 'E', module: 'm', message: '', text: '', t: 1, frames: [['only a file']] } }),
  event('rank.started', { process: 5 }),
  event('rank.started', { process: null }),
  event('rank.result', { left: [1] }),
  event('rank.result', { names: 4 }),
  event('rank.dropped', { lines: 'many' }),
  event('rank.dropped')
])('damaged data changes nothing but the place in the journal: %j', damaged => {
  expect(apply(newJobState(), damaged)).toEqual({ ...newJobState(), seq: 1 });
});

test('unknown kinds pass; a rank of one becomes known, as in Python', () => {
  expect(apply(newJobState(), event('a.kind.of.tomorrow', {}, null))).toEqual({ ...newJobState(), seq: 1 });
  expect(Object.keys(apply(newJobState(), event('rank.dances', {}, 7)).ranks)).toEqual(['7']);
});

test('an event without a kind is none', () => {
  expect([{}, null, [1], 'text', { kind: 'x', t: 'y' }].map(eventFrom)).toEqual([null, null, null, null, null]);
});
