/** What a job's state means for who looks at it. Pure. */
import type { JobState, RankState, Stall, Wait } from '../protocol';
import type { JobSession } from '../session';
import type { Status } from '../source';
import { awaited, differences, failures, isFinal, placesOf, stallOf } from '../state';
import { collective, errorTitle, firstLine, ranksOf, size, stateWord, theRanks, ticking } from './format';
import { waitingTogether } from './standing';
import { plural, trans } from './translate';

/** Of how many ranks that are awaited the place is shown. */
const PLACES = 4;

/** What a job is called that runs another one again. */
export function calledOf(name: string, rerunOf: string | undefined): string {
  return rerunOf ? trans('%1 (again)', name) : name;
}

/** What the job of a view is called: its name, else its cell. */
export function titleOf({ state, hello, job }: Pick<JobSession, 'state' | 'hello' | 'job'>): string {
  return calledOf(state.name || state.label || job, hello?.spec?.rerun_of);
}

/** The state to show: what the feed sees (`orphaned`, `unreachable`) as long as the journal has no end; `stalled`. */
export function effectiveState(state: JobState, status: Status | null): string {
  const asks = !isFinal(state) && state.state !== 'stopping';
  const seen = (asks && status?.effective) || state.state;
  return seen === state.state && stallOf(state) ? 'stalled' : seen;
}

/** What became of the ranks beside the one that failed first, in one line; empty when there is nothing to say. */
export function others(state: JobState, first: number): string {
  const rest = ranksOf(state).filter(rank => rank.rank !== first);
  const own = rest.filter(rank => rank.error);
  const lines: string[] = [];
  if (own.length > 0) {
    const kinds = own.slice(0, 8).map(rank => trans('rank %1 %2', rank.rank, rank.error!.type));
    const more = own.length > 8 ? trans(' and %1 more', own.length - 8) : '';
    const text = plural('%1 other rank failed too: %2', '%1 other ranks failed too: %2', own.length, kinds.join(', '));
    lines.push(text + more);
  }
  const stopped = rest.filter(rank => !rank.error && rank.state !== 'done').length;
  if (stopped > 0 && isFinal(state)) {
    const many = '%1 other ranks were stopped because of this';
    lines.push(plural('%1 other rank was stopped because of this', many, stopped));
  }
  const early = rest.filter(rank => rank.state === 'done' && rank.why);
  lines.push(...early.slice(0, 8).map(rank => trans('rank %1 %2', rank.rank, firstLine(rank.why))));
  return lines.join('; ');
}

/** `ranks 0-2 wait in all_reduce #17 for rank 3, for 12 s`. */
export function waitingLine({ ranks, collective, awaited, since }: Wait, now: number): string {
  const [who, whom, time] = [theRanks(ranks), theRanks(awaited), ticking(now - since)];
  if (!whom) {
    return plural('%2 waits in %3, for %4', '%2 wait in %3, for %4', ranks.length, who, collective, time);
  }
  const many = '%2 wait in %3 for %4, for %5';
  return plural('%2 waits in %3 for %4, for %5', many, ranks.length, who, collective, whom, time);
}

/** `stalled 34 s: rank 3 has not entered all_reduce #812; …`. */
export function stallLine({ since, finding }: Stall, now: number): string {
  return trans('stalled %1: %2', ticking(now - since), finding.sentence);
}

/** Who stalls. Else a sentence for each collective, and where the ranks are that are awaited; then who calls something else. */
export function waitingLines(state: JobState, now: number): string[] {
  const stall = stallOf(state);
  if (stall) {
    return [stallLine(stall, now)];
  }
  const lines = waitingTogether(state).flatMap(({ ranks, waiting }) => {
    const whom = awaited(state, waiting);
    const wait = { ranks, collective: collective(waiting), awaited: whom, since: waiting.since };
    const others = ranksOf(state).filter(rank => rank.state === 'running' && !rank.waiting);
    const asked = whom.length > 0 ? whom : others.map(rank => rank.rank);
    const places = placesOf(state, asked, waiting.since).slice(0, PLACES);
    return [waitingLine(wait, now), ...places.map(([rank, place]) => trans('rank %1 is at %2', rank, place))];
  });
  return [...lines, ...differences(state).map(ranks => differenceLine(state, ranks))];
}

function differenceLine(state: JobState, ranks: readonly RankState[]): string {
  const calls = ranks.map(({ rank, waiting }) => {
    const [, place] = placesOf(state, [rank], waiting!.since)[0] ?? [];
    const volume = waiting!.size > 0 ? ` (${size(waiting!.size)})` : '';
    const call = `${collective(waiting!)}${volume}`;
    return place ? trans('rank %1 %2 at %3', rank, call, place) : trans('rank %1 %2', rank, call);
  });
  return trans('ranks call different collectives: %1', calls.join('; '));
}

/** The last value of these curves is NaN or infinite. */
export function brokenLine(curve: string): string {
  return trans('The last value is not a number: %1', curve);
}

/** What the start waits for now, or the first steps; empty if that is over, or not known. */
export function stageOf(state: JobState): string {
  if (state.state === 'running' && ranksOf(state).some(rank => rank.proving)) {
    return trans('proving the first steps');
  }
  const last = state.stages.at(-1);
  if (state.state !== 'starting' || !last || last.seconds) {
    return '';
  }
  return last.percent ? `${last.text}, ${last.percent} %` : last.text;
}

/** What the reader should know beside the state: notes of capture and driver, lines that a full disk did not take. */
export function notesOf(state: JobState, captured: readonly string[]): string[] {
  const lost = ranksOf(state)
    .filter(rank => rank.dropped > 0)
    .map(rank =>
      plural(
        'rank %2: the disk was full, %1 printed line lost',
        'rank %2: the disk was full, %1 printed lines lost',
        rank.dropped,
        rank.rank
      )
    );
  return [...new Set([...captured, ...state.notes, ...lost])];
}

/** What a view opens with: the log of the rank that failed; else curves, where there are any; else the log. */
export function firstTab(state: JobState, status: Status): { tab: 'curves' | 'logs'; rank: number | null } {
  const failed = failures(state)[0];
  if (failed) {
    return { tab: 'logs', rank: failed.rank };
  }
  const curves = status.curves.names.length > 0;
  return { tab: curves ? 'curves' : 'logs', rank: null };
}

/** `ValueError: …`, or `was killed (SIGKILL)`: how the first failure is headed. */
export function failureTitle(rank: RankState): string {
  return rank.error ? errorTitle(rank.error) : rank.why || stateWord(rank.state);
}
