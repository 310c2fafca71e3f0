/**
 * Lines that have come and do not stand in the store yet. They are taken in for a few milliseconds at a time: however
 * many come at once, the page is never busy for long.
 */
import type { LogStore } from './logstore';
import { cutAfter } from './logtext';
import type { FileOffsets, Segment } from './source';

/** Characters that are taken in without a look at the clock: some hundred lines, or some thousand very short ones. */
const PIECE = 16 * 1024;

interface Waiting {
  segment: Segment;
  /** The message it came with; 0: one of a connection that is over. */
  n: number;
}

export class LineQueue {
  private waiting: Waiting[] = [];

  constructor(private readonly store: LogStore) {}

  get empty(): boolean {
    return this.waiting.length === 0;
  }

  add(segments: readonly Segment[], n: number): void {
    segments.forEach(segment => this.waiting.push({ segment, n }));
  }

  /** Into the store, in order, for about so many milliseconds. Whether there were any. */
  takeIn(ms: number): boolean {
    const until = performance.now() + ms;
    let taken = 0;
    while (taken < this.waiting.length) {
      const next = this.waiting[taken]!;
      const [piece, rest] = cutAfter(next.segment, PIECE);
      this.store.append([piece]);
      if (rest) {
        next.segment = rest;
      } else {
        taken++;
      }
      if (performance.now() >= until) {
        this.waiting.splice(0, taken);
        return true;
      }
    }
    this.waiting = [];
    return taken > 0;
  }

  /** Everything up to this message of the connection is in the store; `last` is the last that came. */
  done(last: number): number {
    const first = this.waiting.find(({ n }) => n > 0);
    return first ? first.n - 1 : last;
  }

  /** The end of each file's lines, those that wait included. */
  offsets(): FileOffsets {
    return {
      ...this.store.offsets(),
      ...Object.fromEntries(this.waiting.map(({ segment }) => [segment.file, segment.end]))
    };
  }

  /** Another connection counts its messages from 1. */
  reconnected(): void {
    this.waiting.forEach(waiting => (waiting.n = 0));
  }
}
