/** When ranks entered collectives, as bars on a time line; and what that says. Pure. */
import type { Entered } from '../protocol';
import { theRanks } from './format';
import { trans } from './translate';

/** The width of all lanes. */
export const WIDTH = 10_000;

/** Of a bar: about two pixels. */
const LEAST = 25;

/** How many collectives there must be before it is said who is the last. */
const ENOUGH = 10;

/** Seconds. Recorders are not read at the same instant: a collective that was open for less is no wait. */
const WAIT = 1;

/** A rank in a collective, in units of `WIDTH`. `last`: for it the others waited; `open`: it waits for long. */
export interface Bar {
  call: number;
  from: number;
  to: number;
  kind: 'waits' | 'last' | 'open';
}

export interface Lanes {
  /** Seconds since the epoch. */
  from: number;
  to: number;
  bars: Map<number, Bar[]>;
}

/** `until`: when the recorders were read; a collective that has not ended lasts until then. */
export function lanes(calls: readonly Entered[], until: number): Lanes {
  const lasts = (call: Entered): boolean => call.missing.length > 0 || waits(call, until);
  const ends = calls.map(call => (lasts(call) ? Math.max(until, last(call)) : last(call)));
  const from = Math.min(...calls.map(first));
  const to = Math.max(...ends, from + 1e-6);
  const place = (t: number) => Math.round(((t - from) / (to - from)) * WIDTH);
  const bars = new Map<number, Bar[]>();
  calls.forEach((call, number) => {
    call.ranks.forEach((rank, index) => {
      const start = Math.min(place(call.at[index]!), WIDTH - LEAST);
      const end = Math.max(place(ends[number]!), start + LEAST);
      const kind = waits(call, until)
        ? 'open'
        : call.missing.length === 0 && call.at[index] === last(call)
          ? 'last'
          : 'waits';
      const lane = bars.get(rank) ?? [];
      lane.push({ call: number, from: start, to: end, kind });
      bars.set(rank, lane);
    });
  });
  return { from, to, bars };
}

/** The drawing of the bars of one kind, as the path of an SVG. */
export function path(bars: readonly Bar[], kind: Bar['kind']): string {
  return bars
    .filter(bar => bar.kind === kind)
    .map(({ from, to }) => `M${from} 5H${to}`)
    .join('');
}

/** What is under `x` (in units of `WIDTH`): the bar that begins last before it, else the first. */
export function under(bars: readonly Bar[], x: number): Bar | null {
  return bars.filter(bar => bar.from <= x).at(-1) ?? bars[0] ?? null;
}

/**
 * `rank 3 entered last in 81 of 100 collectives, most often 12 ms after the first`; who is missing comes first.
 * `until`: when the recorders were read.
 */
export function summary(calls: readonly Entered[], until: number): string {
  const waiting = calls.find(call => waits(call, until) && call.missing.length > 0);
  if (waiting) {
    return trans('%1 waits for %2.', waiting.name, theRanks(waiting.missing));
  }
  const whole = calls.filter(call => !isOpen(call) && call.ranks.length > 1);
  const counts = new Map<number, number>();
  whole.forEach(call => counts.set(latest(call), (counts.get(latest(call)) ?? 0) + 1));
  const [rank, count] = [...counts].sort(([, one], [, other]) => other - one)[0] ?? [0, 0];
  if (whole.length < ENOUGH || count < usually(whole[0]!.ranks.length) * whole.length) {
    return '';
  }
  const late = whole.filter(call => latest(call) === rank).map(apart);
  const usual = late.sort((one, other) => one - other)[Math.floor(late.length / 2)]!;
  const words = 'Rank %1 entered last in %2 of %3 collectives, most often %4 after the first rank.';
  return trans(words, rank, count, whole.length, short(usual));
}

/** The share of collectives in which one of so many ranks must be the last: two equal ones are by turns. */
function usually(ranks: number): number {
  return 0.5 + 0.5 / ranks;
}

/** `all_reduce #17 of 4 float32`: when the ranks entered it. */
export function reading(call: Entered, rank: number): string {
  const index = call.ranks.indexOf(rank);
  const own = trans('%1: rank %2 entered %3 after the first', nameOf(call), rank, short(call.at[index]! - first(call)));
  const missing = call.missing.length > 0 && trans('%1 did not', theRanks(call.missing));
  return [own, missing || trans('the last was rank %1, after %2', latest(call), short(apart(call)))].join('; ');
}

/** Name, first rank, last rank, time between them, ranks that are missing. */
export function row(call: Entered): string[] {
  const one = call.ranks[call.at.indexOf(first(call))]!;
  return [nameOf(call), String(one), String(latest(call)), short(apart(call)), call.missing.join(', ')];
}

/** `420 µs`, `12.3 ms`, `1.5 s`. */
export function short(seconds: number): string {
  for (const [unit, length] of [
    ['s', 1],
    ['ms', 1e-3]
  ] as const) {
    if (seconds >= length) {
      return `${Number((seconds / length).toPrecision(3))} ${unit}`;
    }
  }
  return `${Math.round(seconds * 1e6)} µs`;
}

function nameOf(call: Entered): string {
  return call.group ? trans('%1 in group %2', call.name, call.group) : call.name;
}

function isOpen(call: Entered): boolean {
  return call.missing.length > 0 || !call.ended;
}

/** Whether it has not ended for long. */
function waits(call: Entered, until: number): boolean {
  return isOpen(call) && until - (call.missing.length > 0 ? first(call) : last(call)) > WAIT;
}

function first(call: Entered): number {
  return Math.min(...call.at);
}

function last(call: Entered): number {
  return Math.max(...call.at);
}

/** The rank that entered last. */
function latest(call: Entered): number {
  return call.ranks[call.at.indexOf(last(call))]!;
}

function apart(call: Entered): number {
  return last(call) - first(call);
}
