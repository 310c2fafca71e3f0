/** How fast something counts, and how long it will go on: from what was seen of it in the last seconds. */
import type { Progress } from '../source';
import { grouped, ticking } from './format';
import { trans } from './translate';

/** Seconds. */
const WINDOW = 20;

export class Pace {
  private seen: { n: number; t: number }[] = [];

  /** It was at `n` at `t` (seconds). What counts from its beginning again is another one. */
  take(n: number, t: number): void {
    const last = this.seen.at(-1);
    if (last && n < last.n) {
      this.seen = [];
    }
    if (n !== this.seen.at(-1)?.n) {
      this.seen.push({ n, t });
    }
  }

  /** Counts a second; null before it was seen to count. It falls while nothing comes. */
  rate(now: number): number | null {
    while (this.seen.length > 2 && this.seen[0]!.t < now - WINDOW) {
      this.seen.shift();
    }
    const [first, last] = [this.seen[0], this.seen.at(-1)];
    if (!first || !last || first === last) {
      return null;
    }
    return (last.n - first.n) / Math.max(last.t - first.t, now - last.t, 1e-3);
  }

  /** `800 samples/s`; empty before it was seen to count. */
  samples(now: number): string[] {
    const rate = this.rate(now);
    return rate === null ? [] : [trans('%1 samples/s', short(rate))];
  }

  /** `12.5 it/s`, and `3 min 05 s left` where it is known how much there is; empty before it was seen to count. */
  words(now: number, of: Progress | null = null): string[] {
    const rate = this.rate(now);
    if (rate === null) {
      return [];
    }
    const left = of?.total ? (of.total - of.n) / rate : 0;
    const fast = trans('%1 it/s', short(rate));
    return left > 0 ? [fast, trans('%1 left', ticking(left))] : [fast];
  }
}

/** Three digits, and all in front of the point. */
function short(rate: number): string {
  return rate < 99.95 ? String(Number(rate.toPrecision(3))) : grouped(Math.round(rate));
}
