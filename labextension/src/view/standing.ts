/** How ranks stand, for wherever one is named: one shape and the same words everywhere. */
import { FINAL_STATES, type JobState, type RankState, type Waiting } from '../protocol';
import { awaited } from '../state';
import { make, setAttribute } from './dom';
import { collective, errorTitle, firstLine, ranksOf, stateWord, theRanks } from './format';
import { stateIcon, tone } from './icons';
import { trans } from './translate';

export interface Standing {
  /** What gives the shape and the colour. */
  state: string;
  words: string;
}

/** What is found once for a state; one is never changed, but followed by another. */
interface Known {
  ranks: Map<number, Standing>;
  /** For whom is waited, by collective. */
  waits: Map<string, string> | null;
  all: Standing | null;
}

const known = new WeakMap<JobState, Known>();

/** What needs a look, before what does not. */
const ORDER = ['failed', 'killed', 'lost', 'timed_out', 'cancelled', 'interrupted', 'stopped', 'waiting', 'starting'];

/** Of one rank. Rows of a log ask at every frame: it is looked up, and made only once. */
export function standingOf(state: JobState, number: number): Standing {
  const { ranks } = knownOf(state);
  let found = ranks.get(number);
  if (!found) {
    const rank = state.ranks[number];
    found = rank ? { state: standing(state, rank), words: rankLine(state, rank) } : unseen(state);
    ranks.set(number, found);
  }
  return found;
}

/** Of all ranks of the job: `7 running, 1 waiting`, and the shape of what most needs a look. */
export function standingOfAll(state: JobState): Standing {
  const its = knownOf(state);
  its.all ??= standingOfSome(
    state,
    Array.from({ length: state.world_size }, (_, rank) => rank)
  );
  return its.all;
}

export function standingOfSome(state: JobState, numbers: readonly number[]): Standing {
  const counts = new Map<string, number>();
  for (const number of numbers) {
    const word = standingOf(state, number).state;
    counts.set(word, (counts.get(word) ?? 0) + 1);
  }
  const place = (word: string): number => (ORDER.includes(word) ? ORDER.indexOf(word) : ORDER.length);
  const sorted = [...counts].sort(([one], [other]) => place(one) - place(other));
  const words = sorted.map(([word, count]) => trans('%1 %2', count, stateWord(word)));
  return { state: sorted[0]?.[0] ?? 'starting', words: words.join(', ') };
}

/** A place for a shape alone; the words are for the title and the name of what it stands in. */
export function makeShape(): HTMLElement {
  return make('span.td-state.td-shape', { 'aria-hidden': 'true' });
}

/** Puts the shape in front of what stands in `place`, and gives all of it the colour. */
export function drawShape(place: Element, { state }: Standing): void {
  if (place.getAttribute('data-state') !== state) {
    setAttribute(place, 'data-state', state);
    setAttribute(place, 'data-tone', tone(state));
    place.querySelector('svg')?.remove();
    place.prepend(stateIcon(state));
  }
}

/** The state of a rank: `waiting` while it waits in a collective, `cancelled` where that ended it. */
export function standing(state: JobState, rank: RankState): string {
  if (rank.state === 'interrupted') {
    const end = state.state === 'stopping' ? state.reason : state.state;
    return ['cancelled', 'timed_out'].includes(end) ? end : rank.state;
  }
  // One that has ended may have waited until then.
  return rank.waiting && rank.state === 'running' && state.ended === 0 ? 'waiting' : rank.state;
}

/** How one rank stands, in a few words. */
export function rankLine(state: JobState, rank: RankState): string {
  if (rank.error) {
    return trans('failed: %1', firstLine(errorTitle(rank.error)));
  }
  const word = standing(state, rank);
  if (rank.waiting && word === 'waiting') {
    const whom = forWhom(state, rank.waiting);
    return whom
      ? trans('waiting in %1 for %2', collective(rank.waiting), whom)
      : trans('waiting in %1', collective(rank.waiting));
  }
  return firstLine(rank.why) || stateWord(word);
}

/** Those that wait in the same collective, and in which: since when is since the first of them. */
export function waitingTogether(state: JobState): { ranks: number[]; waiting: Waiting }[] {
  const groups = new Map<string, { ranks: number[]; waiting: Waiting }>();
  for (const rank of ranksOf(state).filter(rank => standing(state, rank) === 'waiting')) {
    const waiting = rank.waiting!;
    const group = groups.get(keyOf(waiting));
    if (group) {
      group.ranks.push(rank.rank);
      group.waiting = { ...group.waiting, since: Math.min(group.waiting.since, waiting.since) };
    } else {
      groups.set(keyOf(waiting), { ranks: [rank.rank], waiting });
    }
  }
  return [...groups.values()];
}

/** `rank 3`, or nothing. Looked for once a collective: all other ranks may wait in it. */
function forWhom(state: JobState, waiting: Waiting): string {
  const its = knownOf(state);
  its.waits ??= new Map(
    waitingTogether(state).map(({ waiting }) => [keyOf(waiting), theRanks(awaited(state, waiting))])
  );
  return its.waits.get(keyOf(waiting)) ?? '';
}

function keyOf({ group, number, operation }: Waiting): string {
  return `${group} ${number} ${operation}`;
}

/** A rank of which the journal says nothing. */
function unseen(state: JobState): Standing {
  const over = (FINAL_STATES as readonly string[]).includes(state.state);
  return over
    ? { state: 'stopped', words: trans('was never started') }
    : { state: 'starting', words: trans('not started yet') };
}

function knownOf(state: JobState): Known {
  let found = known.get(state);
  if (!found) {
    found = { ranks: new Map(), waits: null, all: null };
    known.set(state, found);
  }
  return found;
}
