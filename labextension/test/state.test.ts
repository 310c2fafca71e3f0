import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { decode, tag } from '../src/codec';
import type { Event, JobState } from '../src/protocol';
import { apply, awaited, eventFrom, failures, fold, isFinal, newJobState, parseLines } from '../src/state';

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
  event('rank.dropped'),
  event('rank.entered'),
  event('rank.entered', { counts: { 'gloo:0': 'many' } }),
  event('rank.waiting', { counts: {}, group: 'gloo:0', number: 1, since: 1 }),
  event('rank.waiting', { operation: 'barrier', counts: {}, group: 'gloo:0', number: 1, since: 'soon' })
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

test('a collective waits for those that are behind, as far as they said since it began', () => {
  const waiting = { operation: 'all_reduce', group: 'gloo:0', number: 17, since: 10, size: 0, members: null };
  const said = (t: number, rank: number, count: number): Event => ({
    ...event('rank.entered', { counts: { 'gloo:0': count } }, rank),
    t
  });
  const events = [
    event('job.submitted', { world_size: 5 }, null),
    said(11, 0, 17),
    said(11, 1, 16),
    said(9, 2, 16),
    { ...event('rank.entered', { counts: {} }, 3), t: 11 },
    event('rank.done', {}, 4)
  ];
  const state = fold(events);
  expect(awaited(state, waiting)).toEqual([1, 3, 4]);
  expect(awaited(state, { ...waiting, members: [0, 1, 2] })).toEqual([1]);
  expect(awaited(state, { ...waiting, members: [] })).toEqual([]);
  expect(awaited(state, { ...waiting, group: 'gloo:1', members: [0] })).toEqual([0]);
});
