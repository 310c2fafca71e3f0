/** What the browser holds of each log, and what goes when that is too much. */
import type { LogScreen } from './logscreen';
import { GAP, type LogRows, type RowList } from './logrows';

export interface LogFile {
  name: string;
  rank: number;
  stream: string;
  /** Bytes: what is held lies between these, but for the gaps. */
  first: number;
  end: number;
}

export interface HeldFile extends LogFile {
  index: number;
  /** The line that has no end yet, and what was written of it since its last carriage return. */
  open: number | null;
  tail: string;
  /** While bars stand inside one another: the lines that can change. None of them is `open` then. */
  screen: LogScreen | null;
  gaps: number[];
  time: number;
}

export interface Limits {
  /** Lines of one rank, lines of all, characters of all. */
  rank: number;
  all: number;
  characters: number;
  /** Characters of one line. */
  line: number;
}

export const LIMITS: Limits = { rank: 200_000, all: 1_500_000, characters: 400e6, line: 16 * 1024 * 1024 };
/** Over a limit by this part, it is dropped at once: single lines would each cost a walk. */
const SLACK = 1.05;

/** How many of the oldest lines go: so many of all, and of each rank what is above `most`. */
export interface Over {
  all: number;
  most: number;
}

/** Null while there is room; `reading`: someone reads older lines, so twice as many are kept. */
export function overLimits(
  limits: Limits,
  reading: boolean,
  length: number,
  characters: number,
  counts: ReadonlyMap<number, number>
): Over | null {
  const room = reading ? 2 : 1;
  const [rank, all, full] = [limits.rank * room, limits.all * room, characters / limits.characters];
  if (Math.max(0, ...counts.values()) <= rank * SLACK && length <= all * SLACK && full <= SLACK) {
    return null;
  }
  const tooLong = full > SLACK ? Math.ceil(length * (1 - 1 / full)) : 0;
  return { all: Math.max(length - all, tooLong, 0), most: rank };
}

/** The first rows, as far as one looks for what goes: those that stay, and those that go. */
export function oldest(
  order: RowList,
  rows: LogRows,
  held: readonly HeldFile[],
  counts: ReadonlyMap<number, number>,
  over: Over
): [number[], number[]] {
  let { all } = over;
  const ranks = new Map([...counts].map(([rank, count]) => [rank, { over: count - over.most }]));
  const byFile = held.map(file => ranks.get(file.rank) ?? { over: 0 });
  let full = [...ranks.values()].filter(rank => rank.over > 0).length;
  const [kept, dropped]: [number[], number[]] = [[], []];
  for (const row of order.view()) {
    if (all <= 0 && full === 0) {
      break;
    }
    const rank = byFile[rows.file[row]!]!;
    const goes = rank.over > 0 || all > 0;
    (goes ? dropped : kept).push(row);
    if (goes) {
      all--;
      rank.over -= rows.kind[row] === GAP ? 0 : 1;
      full -= rank.over === 0 && rows.kind[row] !== GAP ? 1 : 0;
    }
  }
  return [kept, dropped];
}
