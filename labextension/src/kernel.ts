/**
 * A job's feed from the kernel, by the messages of a widget's model. What travels, both ways as custom messages:
 *   here → kernel   {view, binary, message}: one message of the view as text; {view, ping}: is anybody there?
 *                   {view, bye}: the view has closed
 *   kernel → here   {view, messages}: several of the feed as text, or {view} and a buffer with that text in UTF-8
 * Several views may show one model; each has a feed of its own. What was sent before a view was there is not for it:
 * it says `open`, and gets everything. Two messages are the comm's own, not the feed's: `alive` in return for a ping,
 * and `forgotten` to a view whose feed was taken for dead and that asks on.
 */
import { decode, encode } from './codec';
import type { JobState } from './protocol';
import type { FromFeed, JobSource, SourceHandlers, ToFeed } from './source';
import { isFinal } from './state';
import { trans } from './view/translate';

/** What anywidget gives for a model, as far as it is used here. */
export interface Model {
  get(name: string): unknown;
  on(event: string, callback: (...args: never[]) => void): void;
  off(event: string, callback: (...args: never[]) => void): void;
  send(content: unknown): void;
}

/** The messages that are not of the feed. */
type OfComm = { type: 'forgotten' } | { type: 'alive' };

/** After this time without a word the kernel is asked whether it is there, and after as much again taken for dead. */
const PULSE_MS = 5000;

let views = 0;

export class KernelSource implements JobSource {
  private readonly view = `${Math.random().toString(36).slice(2)}-${++views}`;
  /** Colab's messages have no buffers. */
  private readonly binary = !isColab();
  private signal: AbortSignal | null = null;
  /** Whether the kernel ever spoke to this view, and whether it did since the last look. */
  private met = false;
  private heard = false;
  private pinged = false;
  private down = false;
  /** Whether the kernel has something to say: the job goes on, or a question is open. */
  private running = true;
  private asked = false;

  constructor(private readonly model: Model) {}

  connect(handlers: SourceHandlers, signal: AbortSignal): void {
    if (signal.aborted) {
      return;
    }
    this.signal = signal;
    const pulse = setInterval(() => this.pulse(handlers), PULSE_MS);
    const heard = (content: unknown, buffers?: readonly (DataView | ArrayBuffer)[]): void => {
      const text = this.read(content, buffers);
      if (text !== null) {
        this.deliver(text, handlers);
      }
    };
    const closed = (): void => {
      clearInterval(pulse);
      handlers.lost(trans('The kernel has ended, or has closed this view. %1', this.remedy()), true);
    };
    const events = { 'msg:custom': heard, 'comm:close': closed, comm_live_update: closed };
    for (const [event, callback] of Object.entries(events)) {
      this.model.on(event, callback);
    }
    signal.addEventListener(
      'abort',
      () => {
        clearInterval(pulse);
        for (const [event, callback] of Object.entries(events)) {
          this.model.off(event, callback);
        }
        this.post({ view: this.view, bye: true });
      },
      { once: true }
    );
    handlers.connected();
  }

  send(message: ToFeed): void {
    if (!this.signal?.aborted) {
      this.asked ||= message.type === 'ask';
      this.post({ view: this.view, binary: this.binary, message: encode(message) });
    }
  }

  /** The text that is for this view, if any is. */
  private read(content: unknown, buffers?: readonly (DataView | ArrayBuffer)[]): string | null {
    const { view, messages } = (content ?? {}) as { view?: unknown; messages?: unknown };
    if (view !== this.view) {
      return null;
    }
    const buffer = buffers?.[0];
    return typeof messages === 'string' ? messages : buffer ? new TextDecoder().decode(buffer) : null;
  }

  /** A dead kernel says nothing, and no front end tells of it in the same way: only its silence is sure. */
  private pulse(handlers: SourceHandlers): void {
    const silent = !this.heard && (this.running || this.asked);
    this.heard = false;
    if (!silent) {
      this.pinged = false;
    } else if (!this.met) {
      // A kernel that hears nothing while it runs a cell answers after it.
      handlers.lost(trans('The kernel does not answer while it is busy; ■ above the notebook cancels the cell'), false);
      handlers.connected();
    } else {
      if (this.pinged && !this.down) {
        this.down = true;
        handlers.lost(trans('The kernel does not answer: it is busy, or it has died. %1', this.remedy()), false);
      }
      this.pinged = true;
      this.post({ view: this.view, ping: true });
    }
  }

  private remedy(): string {
    const { job } = (this.model.get('snapshot') ?? {}) as { job?: string };
    return trans(
      'The job goes on without it; in a terminal, `torchdist attach %1` shows it, `torchdist cancel %1` ends it',
      job ?? ''
    );
  }

  private deliver(text: string, handlers: SourceHandlers): void {
    const back = this.down;
    this.met = this.heard = true;
    this.down = false;
    const messages = decode(text) as (FromFeed | OfComm)[];
    if (back || messages.some(message => message.type === 'forgotten')) {
      handlers.connected(); // what was said meanwhile comes again
      return;
    }
    for (const message of messages) {
      if (message.type !== 'alive' && message.type !== 'forgotten') {
        this.note(message);
        handlers.message(message);
      }
    }
  }

  private note(message: FromFeed): void {
    if (message.type === 'hello') {
      this.running = !isFinal(message.state as JobState);
    } else if (message.type === 'events') {
      const ends = message.events.some(event => (event as { kind?: unknown } | null)?.kind === 'job.ended');
      this.running = this.running && !ends;
    } else if (message.type === 'answer') {
      this.asked = false;
    }
  }

  /** A model whose comm is closed throws: what was to be said has no hearer any more. */
  private post(content: unknown): void {
    try {
      this.model.send(content);
    } catch (error) {
      console.warn('torchdist: the kernel cannot be reached', error);
    }
  }
}

function isColab(): boolean {
  return (globalThis as { google?: { colab?: unknown } }).google?.colab !== undefined;
}
