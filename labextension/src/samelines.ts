/** Finds lines that every rank wrote at about the same time. */
import type { LogStore } from './logstore';

/** Lines that come later than this are not of the same moment. Seconds. */
const MOMENT = 5;
/**
 * Lines that wait for their likes: a table by hash, whose places are used again from the oldest on. Nearly every line
 * waits in vain, so that it costs some numbers and no object. A text may wait as often as a bucket has places.
 */
const BUCKETS = 1024;
const PLACES = 32;

export class SameLines {
  private readonly hash = new Uint32Array(BUCKETS * PLACES);
  private readonly first = new Uint32Array(BUCKETS * PLACES);
  private readonly time = new Float64Array(BUCKETS * PLACES);
  /** When a line began to wait, in lines; 0: the place is free. */
  private readonly since = new Uint32Array(BUCKETS * PLACES);
  /** The row of each rank, where more than one has said it. */
  private readonly said = new Map<number, Map<number, number>>();
  private lines = 0;

  /** `ranks`: how many there are. */
  constructor(
    private readonly store: LogStore,
    readonly ranks: number
  ) {}

  /** One more line. Gives the rows of all ranks when it is the last of them, the first to come at the front. */
  offer(row: number): number[] | null {
    this.lines++;
    const hash = this.store.rows.hash(row);
    const place = this.placeOf(row, hash);
    if (place < 0) {
      this.wait(row, hash);
      return null;
    }
    const rows = this.said.get(place) ?? new Map([[this.rankOf(this.first[place]!), this.first[place]!]]);
    rows.set(this.rankOf(row), row);
    if (rows.size < this.ranks) {
      this.said.set(place, rows);
      return null;
    }
    this.since[place] = 0;
    this.said.delete(place);
    return [...rows.values()];
  }

  private rankOf(row: number): number {
    return this.store.fileOf(row).rank;
  }

  /** Where the longest waiting line like this one is that the row's rank has not said yet, or -1. */
  private placeOf(row: number, hash: number): number {
    const begin = (hash % BUCKETS) * PLACES;
    const time = this.store.rows.time[row]!;
    let best = -1;
    for (let place = begin; place < begin + PLACES; place++) {
      if (this.hash[place] === hash && this.since[place]! > 0 && Math.abs(time - this.time[place]!) <= MOMENT) {
        const older = best < 0 || this.since[place]! < this.since[best]!;
        best = older && this.isLike(place, row) ? place : best;
      }
    }
    return best;
  }

  private isLike(place: number, row: number): boolean {
    const first = this.first[place]!;
    const [one, other] = [this.store.fileOf(first), this.store.fileOf(row)];
    const said = this.said.get(place)?.has(other.rank) ?? one.rank === other.rank;
    return !said && one.stream === other.stream && this.store.text(first) === this.store.text(row);
  }

  private wait(row: number, hash: number): void {
    const begin = (hash % BUCKETS) * PLACES;
    let place = begin;
    for (let other = begin + 1; other < begin + PLACES; other++) {
      place = this.since[other]! < this.since[place]! ? other : place;
    }
    this.hash[place] = hash;
    this.first[place] = row;
    this.time[place] = this.store.rows.time[row]!;
    this.since[place] = this.lines;
    this.said.delete(place);
  }
}
