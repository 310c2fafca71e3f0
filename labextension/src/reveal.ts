/** From a job to the cell that ran it. */
import { PageConfig } from '@jupyterlab/coreutils';
import type { IDocumentManager } from '@jupyterlab/docmanager';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import type { JobSummary } from './api';
import { MIME_TYPE } from './protocol';
import { trans } from './view/translate';

/** Opens the notebook of `job` and scrolls to its cell. Rejects with a sentence where that cannot be. */
export async function revealCell(
  job: JobSummary,
  notebooks: INotebookTracker | null,
  documents: IDocumentManager | null
): Promise<void> {
  const panel = await shownNotebook(job, notebooks, documents);
  const index = cellOf(panel, job);
  if (index < 0) {
    throw new Error(trans('%1 is open; the output of this job is no longer in it.', panel.context.path));
  }
  panel.content.activeCellIndex = index;
  await panel.content.scrollToItem(index, 'center');
}

/** Opens the notebook of `job` with the cursor in a line of one of its cells (`Cell In[5]`). Rejects as `revealCell`. */
export async function revealLine(
  job: JobSummary,
  cell: string,
  line: number,
  notebooks: INotebookTracker | null,
  documents: IDocumentManager | null
): Promise<void> {
  const panel = await shownNotebook(job, notebooks, documents);
  await showLine(panel, cell === job.label ? cellOf(panel, job) : -1, cell, line);
}

/**
 * Puts the cursor into `line` (from 1) of the cell at `index`, or, where that is -1, of the one that ran as `cell`.
 * Rejects with a sentence where there is none.
 */
export async function showLine(panel: NotebookPanel, index: number, cell: string, line: number): Promise<void> {
  const at = index >= 0 ? index : cellThatRanAs(panel, cell);
  if (at < 0) {
    throw new Error(trans('No cell here ran as %1: the cell was run again, or deleted.', cell));
  }
  const { content } = panel;
  content.activeCellIndex = at;
  await content.scrollToItem(at, 'smart');
  const widget = content.widgets[at]!;
  await widget.ready;
  widget.inputHidden = false;
  content.mode = 'edit';
  const { editor } = widget;
  if (editor) {
    const position = { line: Math.min(line, editor.lineCount) - 1, column: 0 };
    editor.setCursorPosition(position);
    editor.focus();
    editor.revealPosition(position);
  }
}

async function shownNotebook(
  job: JobSummary,
  notebooks: INotebookTracker | null,
  documents: IDocumentManager | null
): Promise<NotebookPanel> {
  const panel = openPanel(job, notebooks) ?? (await open(job, documents));
  await panel.context.ready;
  await panel.revealed;
  documents?.openOrReveal(panel.context.path);
  return panel;
}

/** The notebook that shows the job, else the one with its path. */
function openPanel(job: JobSummary, notebooks: INotebookTracker | null): NotebookPanel | undefined {
  return (
    notebooks?.find(panel => cellOf(panel, job) >= 0) ??
    notebooks?.find(panel => job.notebook.endsWith(`/${panel.context.path}`))
  );
}

async function open(job: JobSummary, documents: IDocumentManager | null): Promise<NotebookPanel> {
  for (const path of pathsBelowRoot(job.notebook)) {
    try {
      await documents?.services.contents.get(path, { content: false });
    } catch {
      continue; // not below this server's root
    }
    const panel = documents?.openOrReveal(path) as NotebookPanel | undefined;
    if (panel) {
      return panel;
    }
    throw new Error(trans('%1 was opened in another window.', path));
  }
  throw new Error(trans('%1 is not among the files of this server.', job.notebook));
}

/** What the notebook's absolute path may be among the server's files, whose root may be given with a `~`. */
export function pathsBelowRoot(notebook: string, root = PageConfig.getOption('serverRoot')): string[] {
  const paths: string[] = [];
  const base = root.replace(/\/+$/, '');
  if (base.startsWith('~')) {
    const below = base.slice(1);
    const at = below ? notebook.indexOf(`${below}/`) : -1;
    const parts = notebook.split('/');
    paths.push(at >= 0 ? notebook.slice(at + below.length + 1) : parts.slice(3).join('/'), parts.slice(2).join('/'));
  } else if (notebook.startsWith(`${base}/`)) {
    paths.push(notebook.slice(base.length + 1));
  } else if (!notebook.startsWith('/')) {
    paths.push(notebook);
  }
  return [...new Set(paths.filter(Boolean))];
}

/** The cell that shows the job, or the one that it ran again; -1: none does. */
function cellOf(panel: NotebookPanel, { job, rerun_of }: JobSummary): number {
  return cellWith(panel, job) >= 0 || !rerun_of ? cellWith(panel, job) : cellWith(panel, rerun_of);
}

function cellWith(panel: NotebookPanel, job: string): number {
  return cellWhere(panel, ({ outputs }) => Array.isArray(outputs) && outputs.some(output => isOf(output, job)));
}

function cellThatRanAs(panel: NotebookPanel, cell: string): number {
  return cellWhere(panel, ({ execution_count }) => `Cell In[${String(execution_count)}]` === cell);
}

function cellWhere(panel: NotebookPanel, is: (cell: Record<string, unknown>) => boolean): number {
  const cells = panel.content.model?.cells;
  for (let index = 0; index < (cells?.length ?? 0); index++) {
    if (is(cells!.get(index).toJSON())) {
      return index;
    }
  }
  return -1;
}

function isOf(output: unknown, job: string): boolean {
  const data = (output as { data?: Record<string, { job?: string }> } | null)?.data;
  return data?.[MIME_TYPE]?.job === job;
}
