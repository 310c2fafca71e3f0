/**
 * A job's feed from the server extension, over a WebSocket that is opened again when it breaks; until it is open, by
 * requests.
 */
import { ServerConnection } from '@jupyterlab/services';

import { jobAddress, request, ServerError, socketAddress } from './api';
import { decode, encode } from './codec';
import { BEAT } from './protocol';
import type { FromFeed, JobSource, SourceHandlers, ToFeed } from './source';
import { trans } from './view/translate';

const SHORTEST_WAIT = 200;
const LONGEST_WAIT = 5000;
/** Without even an empty message for this long, the line is cut: no network told the browser so. */
const SILENCE = 3 * BEAT * 1000;
/** A page that was busy or asleep first hears what has come meanwhile. */
const DOUBT = 1000;
/**
 * A socket may take longer than this to be opened: a browser opens those of one address one after the other, and a
 * Jupyter server leaves a kernel's unanswered while that kernel starts.
 */
const SLOW = 500;
/** Between two requests that stand for a socket. */
export const TURN = 1000;
/** How long an ordinary request may take that only asks what is wrong; a line that is cut never answers. */
export const ANSWER = 10_000;

export interface SocketHandlers {
  opened(): void;
  /** It was not open after `SLOW`; `signal` ends with the attempt, be it that it is open at last. */
  slow(signal: AbortSignal): Promise<void>;
  message(text: string): void;
  /** Down; `opened`: it had been up; `reason` is the server's, if it gave one. Whether to try again. */
  closed(opened: boolean, reason: string): Promise<boolean>;
}

/**
 * A WebSocket that is opened again after 0.2, 0.4, … 5 s, and at once when the computer is on line again, until
 * `signal` ends it or `closed` says that there is no use. One that is silent for `SILENCE` is down, too.
 */
export class LastingSocket {
  constructor(
    private readonly settings: ServerConnection.ISettings,
    private readonly path: string,
    private readonly handlers: SocketHandlers,
    private readonly signal: AbortSignal
  ) {
    signal.addEventListener('abort', () => this.end(), { once: true });
    window.addEventListener('online', () => this.hurry(), { signal });
    if (!signal.aborted) {
      this.open();
    }
  }

  /** Dropped while the socket is down. */
  send(text: string): void {
    if (this.socket?.readyState === 1) {
      this.socket.send(text);
    }
  }

  private open(): void {
    this.timer = undefined;
    const socket = new this.settings.WebSocket(socketAddress(this.settings, this.path));
    this.socket = socket;
    this.opened = false;
    this.listen();
    this.opening = new AbortController();
    const { signal } = this.opening;
    this.impatience = window.setTimeout(() => void this.handlers.slow(signal), SLOW);
    socket.onopen = () => {
      this.opened = true;
      this.settled();
      this.listen();
      this.handlers.opened();
    };
    socket.onmessage = event => {
      this.listen();
      if (event.data !== '') {
        this.wait = SHORTEST_WAIT;
        this.handlers.message(String(event.data));
      }
    };
    socket.onclose = event => this.closed(event.reason);
  }

  /** The attempt is over, well or not. */
  private settled(): void {
    window.clearTimeout(this.impatience);
    this.opening.abort();
  }

  /** Something was heard: the silence begins anew. */
  private listen(): void {
    window.clearTimeout(this.listening);
    this.listening = window.setTimeout(() => {
      this.listening = window.setTimeout(() => this.closed(''), DOUBT);
    }, SILENCE);
  }

  private closed(reason: string): void {
    this.drop();
    void this.again(reason);
  }

  private async again(reason: string): Promise<void> {
    const again = await this.handlers.closed(this.opened, reason);
    if (!again || this.signal.aborted) {
      return;
    }
    this.timer = window.setTimeout(() => this.open(), this.wait);
    this.wait = Math.min(this.wait * 2, LONGEST_WAIT);
  }

  private hurry(): void {
    if (this.timer !== undefined) {
      window.clearTimeout(this.timer);
      this.wait = SHORTEST_WAIT;
      this.open();
    }
  }

  end(): void {
    window.clearTimeout(this.timer);
    this.drop();
  }

  /** Does not wait for the other end, which may not answer. */
  private drop(): void {
    window.clearTimeout(this.listening);
    this.settled();
    if (this.socket) {
      this.socket.onopen = this.socket.onmessage = this.socket.onclose = null;
      this.socket.close();
      this.socket = null;
    }
  }

  private socket: WebSocket | null = null;
  private timer: number | undefined;
  private listening: number | undefined;
  private impatience: number | undefined;
  private opening = new AbortController();
  private opened = false;
  private wait = SHORTEST_WAIT;
}

export class ServerSource implements JobSource {
  constructor(
    private readonly settings: ServerConnection.ISettings,
    private readonly job: string,
    /** What to say besides where the server has no such job. */
    private readonly elsewhere = ''
  ) {}

  connect(handlers: SourceHandlers, signal: AbortSignal): void {
    this.socket = new LastingSocket(
      this.settings,
      `${jobAddress(this.job)}/feed`,
      {
        opened: () => {
          this.turned = false;
          return this.gone ? this.socket?.end() : handlers.connected();
        },
        slow: attempt => this.takeTurns(handlers, attempt),
        message: text => this.take(decode(text) as FromFeed, handlers),
        closed: async (opened, reason) => {
          if (this.gone) {
            return false;
          }
          if (this.turned) {
            this.turned = false;
            return true; // the view has what there is: that the socket is tried anew is nobody's trouble
          }
          const { why, final } = await this.whyClosed(opened, reason);
          if (!signal.aborted) {
            handlers.lost(why, final);
          }
          return !final;
        }
      },
      signal
    );
  }

  send(message: ToFeed): void {
    if (this.turn) {
      this.turn.push(message);
    } else {
      this.socket?.send(encode(message));
    }
  }

  private take(message: FromFeed, handlers: SourceHandlers): void {
    this.gone ||= message.type === 'gone';
    handlers.message(message);
  }

  /** The feed by requests, for as long as the socket is not open: each says what a session says to an open one. */
  private async takeTurns(handlers: SourceHandlers, attempt: AbortSignal): Promise<void> {
    while (!attempt.aborted && !this.gone) {
      const body = encode({ messages: this.sayings(handlers) });
      try {
        const init = { method: 'POST', body, signal: attempt };
        const answer = (await request(this.settings, `${jobAddress(this.job)}/turn`, init)) as { messages: FromFeed[] };
        if (!attempt.aborted) {
          this.turned = true;
          answer.messages.forEach(message => this.take(message, handlers));
        }
      } catch (error) {
        if (error instanceof ServerError && error.final) {
          if (error.ours) {
            this.socket?.end();
            handlers.lost(this.inWords(error), true);
          }
          return; // nothing comes by requests; the socket may be opened yet
        }
      }
      await pause(TURN, attempt);
    }
  }

  private sayings(handlers: SourceHandlers): ToFeed[] {
    const said = (this.turn = [] as ToFeed[]);
    handlers.connected();
    this.turn = null;
    return said;
  }

  /** A browser tells nothing of a refused WebSocket: the job is asked for by an ordinary request. */
  private async whyClosed(opened: boolean, reason: string): Promise<{ why: string; final: boolean }> {
    if (opened) {
      const broke = trans('The connection to the server was lost; trying again');
      return { why: reason ? `${broke} (${reason})` : broke, final: false };
    }
    try {
      await request(this.settings, jobAddress(this.job), { signal: AbortSignal.timeout(ANSWER) });
    } catch (error) {
      if (error instanceof ServerError) {
        return { why: this.inWords(error), final: error.final };
      }
      return { why: trans('The server does not answer; trying again'), final: false };
    }
    return { why: trans('The server refused the live connection; trying again'), final: false };
  }

  private inWords(error: ServerError): string {
    if (!error.ours || error.status !== 404) {
      return error.message;
    }
    const unknown = trans('This server has no such job: it ran elsewhere, or was deleted.');
    return this.elsewhere ? `${unknown} ${this.elsewhere}` : unknown;
  }

  /** What is being said in a turn; null: what is said goes to the socket. */
  private turn: ToFeed[] | null = null;
  /** A turn was taken in this attempt to open the socket. */
  private turned = false;
  /** The feed has said its last word. */
  private gone = false;
  private socket: LastingSocket | null = null;
}

/** Resolves after `ms`, or with the signal. */
export function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise(resolve => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener('abort', () => (clearTimeout(timer), resolve()), { once: true });
  });
}
