import { describe, expect, it } from 'vitest';
import {
  aPage,
  aRank,
  anError,
  aState,
  event,
  find,
  frames,
  hello,
  played,
  SPEC,
  status,
  type PlayedFeed
} from './played';
import type { ErrorRecord } from '../src/protocol';
import { JobView } from '../src/view/job';
import { others } from '../src/view/describe';
import { sourceAround } from '../src/view/failure';

const page = aPage();

async function view(
  messages: Record<string, unknown>[],
  still: HTMLElement | null = null
): Promise<{ feed: PlayedFeed; view: JobView }> {
  const { feed, session } = await played(page.signal, ...messages);
  return { feed, view: new JobView(page.root, session, { signal: page.signal, still }) };
}

const running = aState([aRank(0), aRank(1)]);
const curves = { curves: { version: 1, names: ['loss'], note: '' } };
const current = () => find(page.root, '[role=tab][aria-selected=true]').dataset.tab;
const press = (key: string) =>
  document.activeElement!.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));

function failedState(message = 'batch 3 is empty') {
  const ranks = [aRank(0, { state: 'stopped' }), aRank(1, { state: 'failed', error: anError({ message }), ended: 9 })];
  return aState(ranks, { state: 'failed', ended: running.submitted + 9, first_failure: 1, reason: 'rank 1 failed' });
}

describe('the keyboard', () => {
  it('goes on at the tabs when the job ends while a button of the cancel has it', async () => {
    const { feed } = await view([hello({ ...running, state: 'stopping' }), status()]);
    find(page.root, '.td-cancel button', 'Kill now').focus();
    feed.say(event(2, 'job.ended', { state: 'cancelled', reason: '' }));
    await frames();
    expect(page.root.querySelector('.td-cancel button')).toBeNull();
    expect(document.activeElement).toBe(find(page.root, '[role=tab][aria-selected=true]'));
  });
});

describe('what comes first', () => {
  it('is the log of a job without curves, the curves of one with', async () => {
    const { feed } = await view([hello(running), status()]);
    expect(current()).toBe('logs');
    feed.say(status(curves));
    await frames();
    expect(current()).toBe('curves');
  });

  it('is nothing before it is known whether an ended job has curves, and then its curves', async () => {
    const { feed } = await view([hello({ ...running, state: 'succeeded', ended: running.submitted + 9 })]);
    expect(page.root.querySelector('[role=tab][aria-selected=true]')).toBeNull();
    feed.say(status());
    await frames();
    expect(current()).toBe('logs');
    feed.say(status(curves)); // a large file of metrics takes a while to be read
    await frames();
    expect(current()).toBe('curves');
  });

  it('comes to the front, too, where the reader touched the view before there was anything', async () => {
    const { feed } = await view([]);
    page.root.firstElementChild!.dispatchEvent(new Event('pointerdown'));
    feed.say(hello(running));
    feed.say(status());
    await frames();
    expect(current()).toBe('logs');
    feed.say(status(curves));
    await frames();
    expect(current()).toBe('logs');
  });

  it('says what an exception says without its colours', async () => {
    const error = anError({
      message: '\x1b[31mred\x1b[0m and \x07\nmore \x1b[1mbold\x1b[0m',
      text: 'Traceback\nValueError: \x1b[31mred\x1b[0m'
    });
    const state = aState([aRank(0, { state: 'failed', error, ended: 5 }), aRank(1)], {
      state: 'failed',
      reason: 'ValueError: \x1b[31mred\x1b[0m'
    });
    await view([hello(state), status(curves)]);
    expect(page.root.textContent).not.toContain('\x1b');
    expect(find(page.root, '.td-failure-title').textContent).toBe('ValueError: red and \\x07');
    expect(find(page.root, '.td-failure').textContent).toContain('more bold');
  });

  it('is the error of the rank that failed, with the line of the notebook', async () => {
    await view([hello(failedState()), status(curves)]);
    expect(current()).toBe('logs');
    const failure = find(page.root, '.td-failure');
    expect(failure.hidden).toBe(false);
    expect(failure.textContent).toContain('ValueError: batch 3 is empty');
    expect(failure.textContent).toContain('rank 1 on box');
    expect(find(failure, '.td-here').textContent).toBe('→ 3train(model)\n');
    expect(find(failure, '.td-failure-others').textContent).toBe('1 other rank was stopped because of this');
    expect(find(failure, 'details.td-fold summary', 'functional.py').textContent).toBe(
      '1 frame in torch/nn/functional.py'
    );
  });

  it('says once what failed', async () => {
    await view([hello(failedState()), status(curves)]);
    expect(find(page.root, '.td-reason').hidden).toBe(true);
    expect(page.root.textContent!.split('batch 3 is empty')).toHaveLength(3); // the title, and the whole traceback
  });

  it.each(['waits', 'failed', 'idle'] as const)('leaves the traceback to a cell that has it (%s)', async cell => {
    const { session } = await played(page.signal, hello(failedState()));
    new JobView(page.root, session, { signal: page.signal, cell: () => cell });
    expect(find(page.root, 'details.td-traceback').hasAttribute('open')).toBe(cell === 'idle');
    const head = find(page.root, '.td-failure-head').textContent;
    expect(head).toContain('ValueError: batch 3 is empty');
    expect(head!.includes('Cell In[2], line 3')).toBe(cell !== 'idle');
  });

  it('leads from a line of the traceback to the line of the cell', async () => {
    const seen: [string, number][] = [];
    const { session } = await played(page.signal, hello(failedState()));
    const reveal = async (cell: string, line: number): Promise<void> => {
      seen.push([cell, line]);
      if (seen.length > 1) {
        throw new Error('It is gone.');
      }
    };
    new JobView(page.root, session, { signal: page.signal, reveal });
    const links = [...page.root.querySelectorAll<HTMLElement>('.td-frame-place .td-link')];
    expect(links.map(link => link.textContent)).toEqual(['Cell In[2], line 3']);
    links[0]!.click();
    links[0]!.click();
    await frames();
    expect(seen).toEqual([
      ['Cell In[2]', 3],
      ['Cell In[2]', 3]
    ]);
    expect(find(page.root, '.td-frame-place').textContent).toContain('It is gone.');
  });

  it('does not move under the hands of a reader, whose screen reader may send a click alone', async () => {
    const { feed } = await view([hello(running)]);
    find(page.root, '[role=tab][data-tab=receipt]').click();
    feed.say(status(curves));
    await frames();
    expect(current()).toBe('receipt');
  });

  it('keeps an error as text', async () => {
    await view([hello(failedState('<img src=x onerror=alert(1)>'))]);
    expect(page.root.querySelector('img')).toBeNull();
  });

  it('counts the other ranks that failed and those that were stopped', () => {
    const ranks = Array.from({ length: 8 }, (_, rank) => aRank(rank, { state: rank > 5 ? 'done' : 'stopped' }));
    ranks[3] = aRank(3, { state: 'failed', error: anError({ type: 'KeyError' }) });
    const state = aState(ranks, { state: 'failed' });
    expect(others(state, 0)).toBe(
      '1 other rank failed too: rank 3 KeyError; 4 other ranks were stopped because of this'
    );
  });

  it('shows only the line of the rank where the source is another', () => {
    expect(sourceAround('Cell In[2]', 3, 'other()', SPEC, 2)).toEqual([{ number: 3, text: 'other()' }]);
    expect(sourceAround('Cell In[2]', 3, 'train(model)', SPEC, 2).map(row => row.number)).toEqual([2, 3, 4]);
  });

  it('shows neighbours of the innermost line alone, so that it is in sight', async () => {
    const frames: ErrorRecord['frames'] = [
      ['Cell In[2]', 2, '<module>', 'import torch'],
      ['Cell In[2]', 3, 'load', 'train(model)'],
      ['/opt/env/lib/python3.11/site-packages/torch/nn/functional.py', 10, 'linear', 'return _linear(x)']
    ];
    const error = anError({ frames });
    await view([hello(aState([aRank(0), aRank(1, { state: 'failed', error, ended: 9 })], { state: 'failed' }))]);
    const numbers = [...find(page.root, '.td-failure').querySelectorAll('.td-source-number')].map(
      each => each.textContent
    );
    expect(numbers).toEqual(['→ 2', '2', '→ 3', '4', '→ 10']);
  });
});

describe('tabs', () => {
  it('are reached by arrows, Home and End, and are one stop for Tab', async () => {
    await view([hello(running), status()]);
    find(page.root, '[role=tab][aria-selected=true]').focus();
    press('ArrowRight');
    expect(current()).toBe('ranks');
    expect((document.activeElement as HTMLElement).dataset.tab).toBe('ranks');
    press('End');
    expect(current()).toBe('receipt');
    press('ArrowRight');
    expect(current()).toBe('curves');
    press('ArrowLeft');
    press('Home');
    expect(current()).toBe('curves');
    expect(page.root.querySelectorAll('[role=tab][tabindex="0"]')).toHaveLength(1);
  });

  it('name their panels, of which one is shown', async () => {
    await view([hello(running), status()]);
    for (const tab of page.root.querySelectorAll('[role=tab]')) {
      const panel = document.getElementById(tab.getAttribute('aria-controls')!)!;
      expect(panel.getAttribute('aria-labelledby')).toBe(tab.id);
      expect(panel.hidden).toBe(tab.getAttribute('aria-selected') !== 'true');
    }
  });

  it('are read with the numbers beside them as words of their own', async () => {
    await view([hello(running), status({ curves: { version: 1, names: ['a', 'b'], note: '' } })]);
    const read = [...page.root.querySelectorAll('[role=tab]')].map(tab => tab.textContent);
    expect(read).toEqual(['Curves, 2', 'Logs', 'Ranks', 'Communication', 'Receipt']);
  });

  it('keep their names apart in two views of one page', async () => {
    await view([hello(running)]);
    await view([hello(running)]);
    const ids = [...page.root.querySelectorAll('[id]')].map(element => element.id);
    expect(new Set(ids).size).toBe(ids.length);
  });

  it('open the log of a rank from the grid of ranks', async () => {
    const { view: shown } = await view([hello(running)]);
    shown.show('ranks');
    find(page.root, 'tbody button', 'rank 1').click();
    expect(current()).toBe('logs');
  });
});

describe('the connection', () => {
  const bar = () => find(page.root, '.td-connection');

  it('is silent while all is well', async () => {
    await view([hello(running)]);
    expect(bar().hidden).toBe(true);
  });

  it('says that it was lost, and goes on when it is back', async () => {
    const { feed } = await view([hello(running)]);
    feed.handlers.lost('the server does not answer', false);
    await frames();
    expect(bar().textContent).toBe('the server does not answer');
    feed.handlers.connected();
    feed.say(hello(running));
    await frames();
    expect(bar().hidden).toBe(true);
  });

  it('shows the still picture where there is no such job', async () => {
    const still = document.createElement('div');
    still.textContent = 'the picture';
    const { feed } = await view([], still);
    feed.handlers.lost('There is no such job on this host.', true);
    await frames();
    expect(bar().textContent).toContain('There is no such job on this host.');
    expect(still.isConnected && !still.hidden).toBe(true);
    expect(find(page.root, '.td-body').hidden).toBe(true);
  });

  it('keeps what it has when the job is deleted under it', async () => {
    const { feed } = await view([hello(running)]);
    feed.say({ type: 'gone', reason: 'The files of this job were deleted.' });
    await frames();
    expect(bar().textContent).toContain('The files of this job were deleted.');
    expect(find(page.root, '.td-body').hidden).toBe(false);
    expect(find(page.root, '.td-cancel button').getAttribute('aria-disabled')).toBe('true');
  });

  it('leaves nothing behind', async () => {
    await view([hello(running)]);
    page.end();
    expect(page.root.childElementCount).toBe(0);
  });
});
