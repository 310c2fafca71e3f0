/** A job's feed from the server extension, over a WebSocket that is opened again when it breaks. */
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
/** How long an ordinary request may take that only asks what is wrong; a line that is cut never answers. */
export const ANSWER = 10_000;

export interface SocketHandlers {
  opened(): void;
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
    socket.onopen = () => {
      this.opened = true;
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

  private end(): void {
    window.clearTimeout(this.timer);
    this.drop();
  }

  /** Does not wait for the other end, which may not answer. */
  private drop(): void {
    window.clearTimeout(this.listening);
    if (this.socket) {
      this.socket.onopen = this.socket.onmessage = this.socket.onclose = null;
      this.socket.close();
      this.socket = null;
    }
  }

  private socket: WebSocket | null = null;
  private timer: number | undefined;
  private listening: number | undefined;
  private opened = false;
  private wait = SHORTEST_WAIT;
}

export class ServerSource implements JobSource {
  constructor(
    private readonly settings: ServerConnection.ISettings,
    private readonly job: string
  ) {}

  connect(handlers: SourceHandlers, signal: AbortSignal): void {
    let gone = false;
    this.socket = new LastingSocket(
      this.settings,
      `${jobAddress(this.job)}/feed`,
      {
        opened: () => handlers.connected(),
        message: text => {
          const message = decode(text) as FromFeed;
          gone ||= message.type === 'gone';
          handlers.message(message);
        },
        closed: async (opened, reason) => {
          if (gone) {
            return false;
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
    this.socket?.send(encode(message));
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
        return { why: error.ours && error.status === 404 ? unknownJob() : error.message, final: error.final };
      }
      return { why: trans('The server does not answer; trying again'), final: false };
    }
    return { why: trans('The server refused the live connection; trying again'), final: false };
  }

  private socket: LastingSocket | null = null;
}

function unknownJob(): string {
  return trans('This server has no such job: it ran elsewhere, or was deleted.');
}
