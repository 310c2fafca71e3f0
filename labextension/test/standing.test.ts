import { describe, expect, it } from 'vitest';
import { standingOf, standingOfAll, waitingTogether } from '../src/view/standing';
import { aRank, anError, aState } from './played';

const waiting = { operation: 'barrier', group: 'gloo:0', number: 3, since: 5, size: 0, members: null };

describe('how a rank stands', () => {
  it('says in what it waits and for whom, and what became of it', () => {
    const state = aState([
      aRank(0, { waiting }),
      aRank(1, { entered: { 'gloo:0': 2 }, counted: 9 }),
      aRank(2, { state: 'failed', error: anError() }),
      aRank(3, { state: 'killed', why: 'was killed (SIGKILL)' })
    ]);
    const standings = [0, 1, 2, 3].map(rank => standingOf(state, rank));
    expect(standings.map(({ words }) => words)).toEqual([
      'waiting in barrier #3 for ranks 1-3',
      'running',
      'failed: ValueError: batch 3 is empty',
      'was killed (SIGKILL)'
    ]);
    expect(standings.map(({ state }) => state)).toEqual(['waiting', 'running', 'failed', 'killed']);
    expect(standingOfAll(state)).toEqual({ state: 'failed', words: '1 failed, 1 killed, 1 waiting, 1 running' });
  });

  it('is looked up when the state is the same, and found anew when it is another', () => {
    const state = aState([aRank(0)]);
    expect(standingOf(state, 0)).toBe(standingOf(state, 0));
    expect(standingOf({ ...state, ranks: { 0: aRank(0, { state: 'done' }) } }, 0).words).toBe('done');
  });

  it('calls it cancelled, not interrupted, where that ended it', () => {
    const ranks = [aRank(0, { state: 'interrupted' })];
    const words = (more: object): string => standingOf(aState(ranks, more), 0).words;
    expect(words({ state: 'cancelled' })).toBe('cancelled');
    expect(words({ state: 'stopping', reason: 'cancelled' })).toBe('cancelled');
    expect(words({ state: 'timed_out' })).toBe('timed out');
    expect(words({ state: 'failed', reason: 'cancelled' })).toBe('interrupted');
  });

  it('has words for one that the journal does not know', () => {
    expect(standingOf(aState([], { world_size: 2 }), 1).words).toBe('not started yet');
    expect(standingOf(aState([], { world_size: 2, state: 'failed' }), 1).words).toBe('was never started');
  });

  it('counts the wait of several from the first of them', () => {
    const state = aState([aRank(0, { waiting }), aRank(1, { waiting: { ...waiting, since: 3 } })]);
    expect(waitingTogether(state)).toEqual([{ ranks: [0, 1], waiting: { ...waiting, since: 3 } }]);
  });
});
