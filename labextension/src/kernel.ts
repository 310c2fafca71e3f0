/**
 * A job's feed from the kernel, by the messages of a widget's model. What travels, both ways as custom messages:
 *   here → kernel   {view, binary, message}: one message of the view as text; {view, bye}: the view has closed
 *   kernel → here   {view, messages}: several of the feed as text, or {view} and a buffer with that text in UTF-8
 * Several views may show one model; each has a feed of its own. What was sent before a view was there is not for it:
 * it says `open`, and gets everything. A feed that is taken for dead says `forgotten` to a view that asks on.
 */
import { decode, encode } from './codec';
import type { FromFeed, JobSource, SourceHandlers, ToFeed } from './source';
import { trans } from './view/translate';

/** What anywidget gives for a model, as far as it is used here. */
export interface Model {
  get(name: string): unknown;
  on(event: string, callback: (...args: never[]) => void): void;
  off(event: string, callback: (...args: never[]) => void): void;
  send(content: unknown): void;
}

const KNOCK_MS = 5000;

let views = 0;

export class KernelSource implements JobSource {
  private readonly view = `${Math.random().toString(36).slice(2)}-${++views}`;
  /** Colab's messages have no buffers. */
  private readonly binary = !isColab();
  private signal: AbortSignal | null = null;

  constructor(private readonly model: Model) {}

  connect(handlers: SourceHandlers, signal: AbortSignal): void {
    if (signal.aborted) {
      return;
    }
    this.signal = signal;
    // A kernel that hears nothing while it runs a cell answers after it.
    const knock = setInterval(() => {
      handlers.lost(trans('The kernel does not answer while it is busy; ■ above the notebook cancels the cell'), false);
      handlers.connected();
    }, KNOCK_MS);
    const heard = (content: unknown, buffers?: readonly (DataView | ArrayBuffer)[]): void => {
      const text = this.read(content, buffers);
      if (text !== null) {
        clearInterval(knock);
        this.deliver(text, handlers);
      }
    };
    const closed = (): void =>
      handlers.lost(trans('The kernel has closed this view; the job is not touched by that'), true);
    this.model.on('msg:custom', heard);
    this.model.on('comm:close', closed);
    signal.addEventListener(
      'abort',
      () => {
        clearInterval(knock);
        this.model.off('msg:custom', heard);
        this.model.off('comm:close', closed);
        this.post({ view: this.view, bye: true });
      },
      { once: true }
    );
    handlers.connected();
  }

  send(message: ToFeed): void {
    if (!this.signal?.aborted) {
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

  private deliver(text: string, handlers: SourceHandlers): void {
    for (const message of decode(text) as (FromFeed | { type: 'forgotten' })[]) {
      if (message.type === 'forgotten') {
        handlers.connected();
      } else {
        handlers.message(message);
      }
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
