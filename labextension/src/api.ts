/** The routes of the server extension, typed. */
import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

import { decode } from './codec';
import type { Row as JobSummary } from './protocol';
import { make } from './view/dom';
import { trans } from './view/translate';

export type { JobSummary };

/** What the server answered instead of what was asked for; the message is a sentence for the user. */
export class ServerError extends Error {
  constructor(
    readonly status: number,
    message: string,
    /** Said by our extension, not by a proxy or a server without it. */
    readonly ours = false
  ) {
    super(message);
  }

  /** Asking again cannot help: refused, or not there. */
  get final(): boolean {
    return this.status >= 400 && this.status < 500 && this.status !== 408 && this.status !== 429;
  }
}

export const ROOT = 'torchdist/api/jobs';

/** Below the server's base address. */
export function jobAddress(job: string): string {
  return `${ROOT}/${encodeURIComponent(job)}`;
}

/** With the token where JupyterLab's own sockets have it. */
export function socketAddress(settings: ServerConnection.ISettings, path: string): string {
  const address = URLExt.join(settings.wsUrl, path);
  return settings.appendToken && settings.token ? `${address}?token=${encodeURIComponent(settings.token)}` : address;
}

/**
 * The JSON of an answer, or null for none. Rejects with `ServerError`, or `ServerConnection.NetworkError` where
 * nobody answers.
 */
export async function request(
  settings: ServerConnection.ISettings,
  path: string,
  init: RequestInit = {}
): Promise<unknown> {
  const response = await ServerConnection.makeRequest(URLExt.join(settings.baseUrl, path), init, settings);
  const text = await response.text();
  if (!response.ok) {
    throw whatWentWrong(response, text);
  }
  return text ? decode(text) : null;
}

function whatWentWrong({ status, statusText }: Response, text: string): ServerError {
  try {
    const { message, hint } = decode(text) as { message?: string; hint?: string };
    if (message) {
      return new ServerError(status, hint ? `${message}; ${hint}` : message, hint !== undefined);
    }
  } catch {
    // A page, for people.
  }
  if (status === 401 || status === 403) {
    return new ServerError(status, trans('This server refused access: reload the page and sign in again'));
  }
  if (status === 404) {
    return new ServerError(
      status,
      trans('This server does not have jupyter_torchdist: install it where JupyterLab runs')
    );
  }
  return new ServerError(status, trans('The server answered %1 %2', status, statusText));
}

/** What can be done with jobs from the outside. Every call rejects as `request` does. */
export class JobsApi {
  constructor(readonly settings: ServerConnection.ISettings) {}

  async list(): Promise<JobSummary[]> {
    return ((await request(this.settings, ROOT)) as { jobs: JobSummary[] }).jobs;
  }

  /** A sentence that says what was done. */
  async cancel(job: string, kill: boolean): Promise<string> {
    const body = JSON.stringify({ kill });
    const answer = await request(this.settings, `${jobAddress(job)}/cancel`, { method: 'POST', body });
    return (answer as { said?: string } | null)?.said ?? '';
  }

  /** The id of the new job. */
  async rerun(job: string): Promise<string> {
    const answer = await request(this.settings, `${jobAddress(job)}/rerun`, { method: 'POST', body: '{}' });
    return (answer as { job: string }).job;
  }

  /** Its files, for good. */
  async delete(job: string): Promise<void> {
    await request(this.settings, jobAddress(job), { method: 'DELETE' });
  }

  /** What one types to run it again in a shell. */
  async command(job: string): Promise<string> {
    return ((await request(this.settings, jobAddress(job))) as { command: string }).command;
  }
}

/** Has the browser save a rank's whole log (`3.out`). */
export function downloadLog(settings: ServerConnection.ISettings, job: string, file: string): void {
  const address = URLExt.join(settings.baseUrl, jobAddress(job), 'files', encodeURIComponent(file));
  const token = settings.appendToken && settings.token ? `?token=${encodeURIComponent(settings.token)}` : '';
  make('a', { href: address + token, download: `${job}-${file}.txt` }).click();
}

/** Below the server's base address: the WebSocket that tells of changes of the list. */
export const LIST_FEED = `${ROOT}/feed`;
