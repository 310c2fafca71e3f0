/** Where a view gets its job from: the server's WebSocket or a widget's comm. See protocol/feed.py for the words. */

import type { Gauges } from './protocol';

export interface SourceHandlers {
  /** The transport is up (again): the session says `open`. */
  connected(): void;
  /** One message of the feed, decoded, in order. */
  message(message: FromFeed): void;
  /** The transport is down; it is tried again, unless `final`. `why` is a sentence for the user. */
  lost(why: string, final: boolean): void;
}

export interface JobSource {
  /** Called once. Everything ends with the signal. */
  connect(handlers: SourceHandlers, signal: AbortSignal): void;
  /** Dropped while the transport is down: the session asks again after `connected`. */
  send(message: ToFeed): void;
}

export interface Segment {
  file: string;
  start: number;
  end: number;
  t: number | null;
  text: string;
}

export interface Hit {
  file: string;
  start: number;
  t: number | null;
  text: string;
}

export interface Series {
  name: string;
  rank: number | null;
  x: number[];
  y: number[];
  low: number[];
  high: number[];
}

export interface Progress {
  desc: string;
  n: number;
  total: number | null;
}

export type FileOffsets = Record<string, number>;

export interface Status {
  effective: string;
  progress: Progress | null;
  ranks: Record<string, { step: number | null; last: Record<string, number> }>;
  curves: { version: number; names: string[]; note: string };
  /** By rank. A server that runs on after an update says none. */
  gauges?: Record<string, Gauges>;
}

/** Messages of the feed; the values of `spec`, `plan`, `state`, `events` are typed in protocol.ts. */
export type FromFeed = { n: number } & (
  | {
      type: 'hello';
      version: number;
      now: number;
      job: string;
      spec: unknown;
      plan: unknown;
      receipt: unknown[];
      notes: string[];
      command: string;
      state: unknown;
      sizes: FileOffsets;
    }
  | { type: 'events'; events: unknown[] }
  | { type: 'lines'; segments: Segment[] }
  | ({ type: 'status' } & Status)
  | { type: 'answer'; id: number; error?: string; [key: string]: unknown }
  | { type: 'gone'; reason: string }
);

export type Question =
  | { what: 'older'; at: FileOffsets; files: string[]; limit: number }
  | { what: 'around'; file: string; offset: number; limit: number }
  | { what: 'search'; pattern: string; regex: boolean; case: boolean; files: string[]; at: FileOffsets | null }
  | {
      what: 'curves';
      names: string[];
      mode: 'rank0' | 'ranks' | 'band';
      ranks: number[];
      x: 'step' | 'time';
      low: number | null;
      high: number | null;
      width: number;
    }
  | { what: 'cancel'; kill: boolean };

export interface Answers {
  older: { segments: Segment[]; at: FileOffsets };
  around: { segments: Segment[] };
  search: { hits: Hit[]; at: FileOffsets | null; searched: number };
  curves: { version: number; complete: boolean; series: Series[] };
  cancel: { said: string };
}

export type ToFeed =
  | { type: 'open'; logs: FileOffsets }
  | { type: 'ack'; n: number }
  | ({ type: 'ask'; id: number } & Question);
