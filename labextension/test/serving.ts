/** A server on a free port that speaks as ours does: tests decide what it answers, and when it is not there. */
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import type { Duplex } from 'node:stream';

import { ServerConnection } from '@jupyterlab/services';
import { afterEach, beforeEach, vi } from 'vitest';
import { type WebSocket, WebSocketServer } from 'ws';

export type Answer = { status: number; body?: unknown };

export class Serving {
  /** `METHOD path`, in order. */
  readonly asked: string[] = [];
  readonly bodies: string[] = [];
  readonly sockets: WebSocket[] = [];
  readonly heard: unknown[] = [];
  /** What an ordinary request is answered with. */
  answer: (method: string, path: string) => Answer = () => ({
    status: 404,
    body: { message: 'no such job', hint: '' }
  });
  /** Status that a WebSocket is refused with; 0: it is let in. */
  refuse = 0;
  /** WebSockets are not answered, until `hear`. */
  deaf = false;
  /** What a WebSocket is told first. */
  greeting: unknown[] = [];

  static async start(port = 0): Promise<Serving> {
    const serving = new Serving();
    await new Promise<void>(resolve => serving.http.listen(port, '127.0.0.1', resolve));
    return serving;
  }

  get port(): number {
    return (this.http.address() as AddressInfo).port;
  }

  get settings(): ServerConnection.ISettings {
    return ServerConnection.makeSettings({
      baseUrl: `http://127.0.0.1:${this.port}/user/ann/`,
      wsUrl: `ws://127.0.0.1:${this.port}/user/ann/`,
      token: 'a/token',
      appendToken: true
    });
  }

  /** WebSockets that are there, answered or not. */
  get lines(): number {
    return this.streams.size;
  }

  /** An empty message to all; resolves when they have heard it. */
  async beat(): Promise<void> {
    for (const socket of this.sockets) {
      const heard = new Promise(resolve => socket.once('pong', resolve));
      socket.send('');
      socket.ping();
      await heard;
    }
  }

  /** WebSockets that were left unanswered are answered now. */
  hear(): void {
    this.deaf = false;
    this.unanswered.splice(0).forEach(answer => answer());
  }

  drop(): void {
    this.unanswered.length = 0;
    this.sockets.length = 0;
    this.streams.forEach(stream => stream.destroy());
  }

  async stop(): Promise<void> {
    this.drop();
    this.http.closeAllConnections();
    await new Promise(resolve => this.http.close(resolve));
  }

  private constructor() {
    this.http = createServer((request, response) => void this.reply(request, response));
    const sockets = new WebSocketServer({ noServer: true });
    this.http.on('upgrade', (request: IncomingMessage, stream, head: Buffer) => {
      this.asked.push(`WS ${request.url}`);
      const answer = (): void => {
        sockets.handleUpgrade(request, stream, head, socket => {
          this.sockets.push(socket);
          socket.on('message', data => this.heard.push(JSON.parse(String(data))));
          this.greeting.forEach(message => socket.send(JSON.stringify(message)));
        });
      };
      this.streams.add(stream);
      stream.on('close', () => this.streams.delete(stream));
      if (this.deaf) {
        stream.resume(); // else nobody hears that the other end has closed
        stream.once('end', () => stream.end());
        this.unanswered.push(() => !stream.destroyed && answer());
      } else if (this.refuse) {
        stream.end(`HTTP/1.1 ${this.refuse} Refused\r\nContent-Length: 0\r\nConnection: close\r\n\r\n`);
      } else {
        answer();
      }
    });
  }

  private async reply(request: IncomingMessage, response: ServerResponse): Promise<void> {
    this.asked.push(`${request.method} ${request.url!.split('?')[0]}`);
    let body = '';
    for await (const part of request) {
      body += part;
    }
    this.bodies.push(body);
    const answer = this.answer(request.method!, request.url!.split('?')[0]!);
    response.writeHead(answer.status, { 'Content-Type': 'application/json' });
    response.end(answer.body === undefined ? undefined : JSON.stringify(answer.body));
  }

  private readonly unanswered: (() => void)[] = [];
  /** Those of WebSockets, which the server does not count as its own. */
  private readonly streams = new Set<Duplex>();
  private readonly http: Server;
}

/**
 * In the file that calls this, timers pass by turns of the event loop: 20 ms in one, however long it took. Both ends of a
 * connection live in this process; on a busy machine what waits half a second for an answer would be asked before
 * the answer could be given.
 */
export function timeByTurns(): void {
  beforeEach(() => {
    vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'], shouldAdvanceTime: true });
  });
  afterEach(() => {
    vi.useRealTimers();
  });
}

/** Resolves when `condition` holds; rejects after twenty seconds. */
export async function until(condition: () => boolean, what: string): Promise<void> {
  const end = Date.now() + 20_000;
  while (!condition()) {
    if (Date.now() > end) {
      throw new Error(`not within 20 s: ${what}`);
    }
    await new Promise(resolve => setTimeout(resolve, 5));
  }
}

export function aSummary(job: string, more: Record<string, unknown> = {}): Record<string, unknown> & { job: string } {
  return {
    job,
    name: null,
    label: 'Cell In[1]',
    notebook: '/home/ann/work/train.ipynb',
    state: 'running',
    effective: 'running',
    world_size: 2,
    submitted: 1000,
    ended: 0,
    reason: '',
    progress: null,
    samples: null,
    spark: [],
    broken: [],
    wait: null,
    stall: null,
    gpus: [],
    gpu_memory: null,
    rerun_of: '',
    damaged: false,
    ...more
  };
}
