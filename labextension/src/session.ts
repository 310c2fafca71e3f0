/** One job as a view sees it: what its feed said, folded. Transport losses, repeats and gaps end here. */
import { LineQueue } from './linequeue';
import { LoadHistory } from './loadhistory';
import { LogStore } from './logstore';
import { VERSION, type Captured, type JobSpec, type JobState, type Plan } from './protocol';
import type { Answers, FromFeed, JobSource, Question, Status, ToFeed } from './source';
import { apply, eventFrom, newJobState } from './state';
import { trans } from './view/translate';

export type Change = 'connection' | 'state' | 'status' | 'lines';
export type Connection = 'connecting' | 'live' | 'lost' | 'gone';

/** What the feed says once, first. */
export interface Hello {
  version: number;
  now: number;
  job: string;
  spec: JobSpec;
  plan: Plan | null;
  receipt: Captured[];
  notes: string[];
  command: string;
  sizes: Record<string, number>;
}

type Callback = (changes: Set<Change>) => void;

interface Open {
  question: Question;
  resolve(answer: never): void;
  reject(error: Error): void;
  timer: ReturnType<typeof setTimeout>;
}

const ANSWER_MS = 30_000;
const HELLO_MS = 5_000;
const REOPEN_MS = [0, 250, 1000, 4000];
/** Messages that are acknowledged together, and how long fewer may wait for more (the feed waits at 8). */
const ACK_EVERY = 3;
const ACK_MS = 250;
/** A page in the background has no frames; it goes on at this pace. */
const NO_FRAME_MS = 250;
/** For so long lines are taken in in one frame, or where there is none. */
const LINES_MS = 8;
const LINES_BEHIND_MS = 40;

export class JobSession {
  readonly logs = new LogStore();
  /** What hosts and GPUs did while this page was open. */
  readonly load = new LoadHistory();
  private readonly lines = new LineQueue(this.logs);

  private _connection: Connection = 'connecting';
  private _reason = '';
  private _hello: Hello | null = null;
  private _state: JobState = newJobState();
  private _status: Status | null = null;
  private _clockSkew = 0;

  private up = false;
  /** The number of the next message; null: a `hello` is awaited, and all that comes before it is of the past. */
  private next: number | null = null;
  private reopened = 0;
  private reopenTimer: ReturnType<typeof setTimeout> | undefined;
  private readonly questions = new Map<number, Open>();
  private lastQuestion = 0;
  private readonly callbacks = new Set<Callback>();
  private changes = new Set<Change>();
  private last = 0;
  private acked = 0;
  private ackTimer?: ReturnType<typeof setTimeout>;
  private cancelFrame: (() => void) | null = null;

  /** `signal` ends the session: questions are rejected, nothing is called any more. */
  constructor(
    readonly job: string,
    private readonly source: JobSource,
    private readonly signal: AbortSignal
  ) {
    signal.addEventListener('abort', () => this.end(trans('The view was closed.')), { once: true });
    source.connect(
      {
        connected: () => this.connected(),
        message: message => this.message(message),
        lost: (why, final) => this.lost(why, final)
      },
      signal
    );
  }

  get connection(): Connection {
    return this._connection;
  }

  /** A sentence for the user when not live. */
  get reason(): string {
    return this._reason;
  }

  get hello(): Hello | null {
    return this._hello;
  }

  get state(): JobState {
    return this._state;
  }

  get status(): Status | null {
    return this._status;
  }

  /** Seconds: the feed's clock minus the browser's. */
  get clockSkew(): number {
    return this._clockSkew;
  }

  /** `callback` is called at most once a frame, with all that changed since. */
  onChange(callback: Callback, signal: AbortSignal): void {
    if (signal.aborted) {
      return;
    }
    // A wrapper: the same function may be given twice, each time with its own lifetime.
    const own: Callback = changes => callback(changes);
    this.callbacks.add(own);
    signal.addEventListener('abort', () => this.callbacks.delete(own), { once: true });
  }

  /**
   * The feed's answer. Rejects with a sentence: the feed's own, that there was no answer for 30 s, or that the job is
   * gone. While the transport is down the question waits, and what was under way is asked again.
   */
  ask<W extends keyof Answers>(question: Extract<Question, { what: W }>): Promise<Answers[W]> {
    if (this.signal.aborted || this._connection === 'gone') {
      return Promise.reject(new Error(this._reason || trans('The view was closed.')));
    }
    const id = ++this.lastQuestion;
    return new Promise<Answers[W]>((resolve, reject) => {
      const timer = setTimeout(() => {
        this.questions.delete(id);
        reject(new Error(this._reason || trans('There was no answer for %1 s. Try again.', ANSWER_MS / 1000)));
      }, ANSWER_MS);
      this.questions.set(id, { question, resolve, reject, timer });
      if (this.up) {
        this.send({ type: 'ask', id, ...question });
      }
    });
  }

  private connected(): void {
    if (this.isOver()) {
      return;
    }
    this.up = true;
    this.open();
    for (const [id, { question }] of this.questions) {
      this.send({ type: 'ask', id, ...question });
    }
  }

  private lost(why: string, final: boolean): void {
    if (this.isOver()) {
      return;
    }
    this.up = false;
    clearTimeout(this.reopenTimer);
    if (final) {
      this.gone(why);
    } else {
      this.become('lost', why);
    }
  }

  private isOver(): boolean {
    return this.signal.aborted || this._connection === 'gone';
  }

  /** Asks for everything after what the store holds. An unanswered one is repeated. */
  private open(): void {
    this.next = null;
    this.last = this.acked = 0;
    this.lines.reconnected();
    clearTimeout(this.reopenTimer);
    this.send({ type: 'open', logs: this.lines.offsets() });
    this.reopenTimer = setTimeout(() => this.open(), HELLO_MS);
  }

  /** A message is missing or came out of order. Soon repeated ones wait longer: each costs the feed a whole state. */
  private reopen(): void {
    this.next = null;
    clearTimeout(this.reopenTimer);
    const wait = REOPEN_MS[Math.min(this.reopened++, REOPEN_MS.length - 1)]!;
    this.reopenTimer = setTimeout(() => this.open(), wait);
  }

  private message(message: FromFeed): void {
    if (this.isOver()) {
      return;
    }
    if (message.type === 'hello') {
      clearTimeout(this.reopenTimer);
      this.next = message.n + 1;
    } else if (message.type === 'gone' || message.type === 'answer') {
      // Neither needs what came before: an answer has its id, and after the last message nothing matters.
      if (message.n === this.next) {
        this.next++;
      }
    } else if (this.next === null || message.n < this.next) {
      return;
    } else if (message.n > this.next) {
      this.reopen();
      return;
    } else {
      this.next++;
      this.reopened = message.n % 100 === 0 ? 0 : this.reopened;
    }
    try {
      this.take(message);
    } catch (error) {
      console.error('torchdist: a message of the feed could not be read', error);
    }
    this.last = Math.max(this.last, message.n);
    this.schedule();
  }

  private take(message: FromFeed): void {
    switch (message.type) {
      case 'hello':
        this.greet(message);
        break;
      case 'events':
        for (const value of message.events) {
          const event = eventFrom(value);
          this._state = event ? apply(this._state, event) : this._state;
        }
        this.changes.add('state');
        break;
      case 'lines':
        this.lines.add(message.segments, message.n);
        break;
      case 'status':
        this._status = message;
        this.load.take(message, this._hello?.plan ?? null, Date.now() / 1000);
        this.changes.add('status');
        break;
      case 'answer':
        this.answer(message);
        break;
      case 'gone':
        this.gone(message.reason);
        break;
      // Other kinds are of a later version: they pass.
    }
  }

  private greet(message: Extract<FromFeed, { type: 'hello' }>): void {
    if (message.version !== VERSION) {
      const words =
        'This page and the job speak different versions (%1 and %2). Reload the page, or restart the server.';
      this.gone(trans(words, VERSION, message.version));
      return;
    }
    this._hello = message as unknown as Hello;
    this._state = message.state as JobState;
    this._clockSkew = message.now - Date.now() / 1000;
    this.changes.add('state');
    this.become('live', '');
  }

  private answer(message: Extract<FromFeed, { type: 'answer' }>): void {
    const open = this.questions.get(message.id);
    if (!open) {
      return;
    }
    this.questions.delete(message.id);
    clearTimeout(open.timer);
    if (message.error !== undefined && message.error !== null) {
      open.reject(new Error(message.error));
    } else {
      open.resolve(message as never);
    }
  }

  private gone(reason: string): void {
    this.become('gone', reason);
    this.end(reason);
  }

  private end(reason: string): void {
    clearTimeout(this.reopenTimer);
    clearTimeout(this.ackTimer);
    for (const { reject, timer } of this.questions.values()) {
      clearTimeout(timer);
      reject(new Error(reason));
    }
    this.questions.clear();
    if (this.signal.aborted) {
      this.cancelFrame?.();
      this.callbacks.clear();
    }
  }

  private become(connection: Connection, reason: string): void {
    this._connection = connection;
    this._reason = reason;
    this.changes.add('connection');
    this.schedule();
  }

  private send(message: ToFeed): void {
    this.source.send(message);
  }

  private schedule(): void {
    if (!this.cancelFrame && !this.signal.aborted) {
      this.cancelFrame = onFrame(seen => {
        this.cancelFrame = null;
        this.frame(seen ? LINES_MS : LINES_BEHIND_MS);
      });
    }
  }

  /** Takes lines in for `ms`, tells the views, then acknowledges: a browser that draws slowly is sent less. */
  private frame(ms: number): void {
    if (this.lines.takeIn(ms)) {
      this.changes.add('lines');
    }
    const changes = this.changes;
    this.changes = new Set();
    if (changes.size > 0) {
      for (const callback of [...this.callbacks]) {
        try {
          callback(changes);
        } catch (error) {
          console.error('torchdist: a view failed', error);
        }
      }
    }
    if (!this.lines.empty) {
      this.schedule();
    }
    const seen = this.lines.done(this.last) - this.acked;
    if (seen >= ACK_EVERY) {
      this.acknowledge();
    } else if (seen > 0) {
      this.ackTimer ??= setTimeout(() => this.acknowledge(), ACK_MS);
    }
  }

  /** Each word to a kernel goes through three of its threads: several messages are acknowledged at once. */
  private acknowledge(): void {
    clearTimeout(this.ackTimer);
    this.ackTimer = undefined;
    const seen = this.lines.done(this.last);
    if (this.up && seen > this.acked && this._connection === 'live') {
      this.acked = seen;
      this.send({ type: 'ack', n: this.acked });
    }
  }
}

/** The next frame, or soon where the page has none (`seen`: it had one). Gives what calls it off. */
function onFrame(callback: (seen: boolean) => void): () => void {
  const cancel = (): void => {
    cancelAnimationFrame(frame);
    clearTimeout(timer);
  };
  const call = (seen: boolean): void => {
    cancel();
    callback(seen);
  };
  const frame = requestAnimationFrame(() => call(true));
  const timer = setTimeout(() => call(false), NO_FRAME_MS);
  return cancel;
}
