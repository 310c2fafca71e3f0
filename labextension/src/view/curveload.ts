/** Which curves are asked for together. Pure. */
import type { CurveCard } from './curvecard';

/** Points that one answer may hold (of all series together): parsing it stays far below a long task. */
const POINTS = 16_000;

/** Cards of the same range, so many that an answer stays small; `series` is how many lines each has. */
export function batches(cards: readonly CurveCard[], width: number, series: number): CurveCard[][] {
  const most = Math.max(Math.floor(POINTS / (width * Math.max(series, 1))), 1);
  const byRange = new Map<string, CurveCard[]>();
  for (const card of cards) {
    const range = card.range?.join() ?? '';
    const same = byRange.get(range);
    if (same) {
      same.push(card);
    } else {
      byRange.set(range, [card]);
    }
  }
  return [...byRange.values()].flatMap(same =>
    Array.from({ length: Math.ceil(same.length / most) }, (_, part) => same.slice(part * most, (part + 1) * most))
  );
}
