/** The points of a curve on their way to the screen: gaps, smoothing, one x for all series, ranges. Pure. */
import { trans } from './translate';
import type { Series, Status } from '../source';
import { number } from './format';

/** Null is a gap; undefined: this series has no point at this x. */
export type Values = (number | null | undefined)[];

export interface Line {
  name: string;
  rank: number | null;
  y: Values;
  low: Values;
  high: Values;
  /** Null where nothing is smoothed. */
  smooth: Values | null;
}

/** What one plot draws. Values are those of the job divided by 10 ** `power`, so that no number breaks an axis. */
export interface Picture {
  x: number[];
  lines: Line[];
  power: number;
  /** Values that are no finite number; they are gaps. */
  holes: number;
  /** Whether low and high of a point are those of the ranks at one step, not of several steps. */
  exact: boolean;
}

/** The least and the greatest value of the ranks. */
export interface Spread {
  low: number;
  high: number;
  /** Of the ranks. */
  mean: number;
}

/** NaN and the infinities are gaps; a canvas knows none of them. */
function finite(value: unknown): number | null {
  const real = typeof value === 'bigint' ? Number(value) : value;
  return typeof real === 'number' && Number.isFinite(real) ? real : null;
}

/** The series of one curve, `smoothing` from 0 (none) to 1 (excluded), on a log axis without values at or below 0. */
export function picture(all: readonly Series[], smoothing: number, log: boolean, exact = false): Picture {
  const sorted = all.map(ordered);
  const power = commonPower(sorted);
  const x = union(sorted.map(series => series.x));
  const places = new Map(x.map((value, index) => [value, index]));
  let holes = 0;
  const take = (values: readonly unknown[], series: Series): Values => {
    const placed: Values = new Array<undefined>(x.length).fill(undefined);
    series.x.forEach((at, index) => {
      const value = finite(values[index]);
      placed[places.get(at)!] = value === null || (log && value <= 0) ? null : scaled(value, power);
    });
    return placed;
  };
  const lines = sorted.map(series => {
    holes += series.y.reduce((sum, value) => sum + Number(finite(value) === null), 0);
    const y = take(series.y, series);
    return {
      name: series.name,
      rank: series.rank,
      y,
      low: take(series.low, series),
      high: take(series.high, series),
      smooth: smoothing > 0 ? smoothed(y, smoothing) : null
    };
  });
  return { x, lines, power, holes, exact };
}

/** In order of x, without points whose x is no finite number. */
function ordered(series: Series): Series {
  const { x } = series;
  const good = x.every((at, index) => finite(at) !== null && (index === 0 || x[index - 1]! <= at));
  if (good) {
    return series;
  }
  const order = x.map((_, index) => index).filter(index => finite(x[index]) !== null);
  order.sort((one, other) => x[one]! - x[other]!);
  const pick = <T>(values: T[]): T[] => order.map(index => values[index]!);
  return { ...series, x: pick(x), y: pick(series.y), low: pick(series.low), high: pick(series.high) };
}

function union(columns: number[][]): number[] {
  const longest = columns[0] ?? [];
  const same = columns.every(
    column => column.length === longest.length && column.every((value, at) => value === longest[at])
  );
  const distinct = new Set(same ? longest : columns.flat());
  return [...distinct].sort((one, other) => one - other);
}

/** The power of ten that brings the largest value near 1; 0 where the axis can bear the values as they are. */
function commonPower(all: readonly Series[]): number {
  let largest = 0;
  for (const series of all) {
    for (const values of [series.y, series.low, series.high]) {
      for (const value of values) {
        largest = Math.max(largest, Math.abs(finite(value) ?? 0));
      }
    }
  }
  const power = largest > 0 ? Math.floor(Math.log10(largest)) : 0;
  return Math.abs(power) > 15 ? power : 0;
}

/** In two steps: 10 ** 308 and its inverse are at the edge of what a number holds. */
function scaled(value: number, power: number): number {
  const half = Math.trunc(power / 2);
  return power === 0 ? value : value / 10 ** half / 10 ** (power - half);
}

/** A value of the plot in words, with the power of ten that was taken out of it. */
export function unscaled(value: number, power: number): string {
  if (power === 0 || value === 0) {
    return number(value);
  }
  const [digits, exponent] = value.toExponential(3).split('e');
  return `${Number(digits)}e${Number(exponent) + power}`;
}

/** An exponential mean whose first values are not drawn to zero, as TensorBoard has it. Gaps stay gaps. */
export function smoothed(values: Values, weight: number): Values {
  let mean = 0;
  let seen = 0;
  return values.map(value => {
    if (value === null || value === undefined) {
      return value;
    }
    mean = mean * weight + value * (1 - weight);
    seen += 1;
    return mean / (1 - weight ** seen);
  });
}

/** The y axis for values from `low` to `high`: some room around them; a flat curve stands in the middle. */
export function padded(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) {
    return [0, 1];
  }
  const room = high > low ? (high - low) * 0.06 : Math.abs(low) * 0.1 || 1;
  return [low - room, high + room];
}

/** The last value of each line that is not a gap. */
export function lastValue(line: Line): number | null {
  for (let at = line.y.length - 1; at >= 0; at--) {
    const value = line.y[at];
    if (value !== null && value !== undefined) {
      return value;
    }
  }
  return null;
}

/** How far the ranks are from each other at the end of their mean, a step that all have; null: nobody knows. */
export function spreadAtEnd({ lines, exact }: Picture): Spread | null {
  const line = lines[0];
  if (!exact || !line || line.rank !== null) {
    return null;
  }
  const [low, high] = [line.low.at(-1), line.high.at(-1)];
  return isNumber(low) && isNumber(high) ? { low, high, mean: lastValue(line) ?? low } : null;
}

/** As far as the feed tells of the ranks' last values: only those of one step can be compared. */
export function spreadOfRanks(ranks: Status['ranks'], name: string): Spread | null {
  const last = Object.values(ranks).filter(rank => name in rank.last);
  const values = last.map(rank => Number(rank.last[name])).filter(value => Number.isFinite(value));
  if (last.length < 2 || values.length < last.length || last.some(rank => rank.step !== last[0]!.step)) {
    return null;
  }
  const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  return { low, high, mean: values.reduce((sum, value) => sum + value / values.length, 0) };
}

function isNumber(value: number | null | undefined): value is number {
  return value !== null && value !== undefined;
}

/** Curves whose last value is not finite, with the ranks of which that is so: `loss on ranks 0, 1`. */
export function brokenCurves(ranks: Status['ranks']): string[] {
  const broken = new Map<string, string[]>();
  for (const [rank, { last }] of Object.entries(ranks)) {
    for (const [name, value] of Object.entries(last)) {
      if (!Number.isFinite(Number(value))) {
        broken.set(name, [...(broken.get(name) ?? []), rank]);
      }
    }
  }
  return [...broken].map(([name, on]) => {
    const where = on.length === 1 ? trans('on rank %1', on[0]!) : trans('on ranks %1', on.slice(0, 8).join(', '));
    return `${name.slice(0, 80)} ${where}`;
  });
}

/**
 * Since which x a curve has values that are not finite, without an end; null: its last value is finite. Where some ranks
 * have a number and others none, the feed gives the point and a gap at the same x.
 */
export function notFiniteSince({ x, y }: { x: ArrayLike<number>; y: ArrayLike<number> }): number | null {
  let since: number | null = null;
  let at = x.length - 1;
  while (at >= 0 && !Number.isFinite(y[at])) {
    since = x[at]!;
    while (at >= 0 && x[at] === since) {
      at -= 1;
    }
  }
  return since;
}

/** The place in `values` nearest to `at` that holds a point; null: none within the screen's reach (`reach` places). */
export function nearest(values: Values, at: number, reach: number): number | null {
  for (let step = 0; step <= reach; step++) {
    for (const place of [at - step, at + step]) {
      const value = values[place];
      if (value !== null && value !== undefined) {
        return place;
      }
    }
  }
  return null;
}

/** Names that hold every word of `filter`, whatever their case; at most `most`, and how many there are in all. */
export function matching(names: readonly string[], filter: string, most: number): { names: string[]; count: number } {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found: string[] = [];
  let count = 0;
  for (const name of names) {
    const text = words.length > 0 ? name.toLowerCase() : '';
    if (words.every(word => text.includes(word))) {
      count += 1;
      if (found.length < most) {
        found.push(name);
      }
    }
  }
  return { names: found, count };
}
