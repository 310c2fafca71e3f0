/** Where a view gets its job from: the server's WebSocket or a widget's comm. See protocol/feed.py for the words. */

import type {
  Around,
  Communication,
  Drawn,
  Events,
  Found,
  Gone,
  Hello,
  Lines,
  Older,
  Said,
  Shown,
  Status
} from './protocol';

export type { Hit, Progress, Segment, Series, Status } from './protocol';

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

export type FileOffsets = Record<string, number>;

/** Messages of the feed; `spec`, `plan`, `state` and `events` are records, whose types stand in protocol.ts too. */
export type FromFeed = { n: number } & (
  | ({ type: 'hello' } & Hello)
  | ({ type: 'events' } & Events)
  | ({ type: 'lines' } & Lines)
  | ({ type: 'status' } & Status)
  | { type: 'answer'; id: number; error?: string; [key: string]: unknown }
  | ({ type: 'gone' } & Gone)
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
  | { what: 'display'; rank: number; number: number }
  | { what: 'communication'; fresh: boolean }
  | { what: 'cancel'; kill: boolean };

export interface Answers {
  older: Older;
  around: Around;
  search: Found;
  curves: Drawn;
  display: Shown;
  communication: Communication;
  cancel: Said;
}

export type ToFeed =
  | { type: 'open'; logs: FileOffsets }
  | { type: 'ack'; n: number }
  | ({ type: 'ask'; id: number } & Question);
