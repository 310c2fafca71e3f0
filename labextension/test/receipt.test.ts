import { afterEach, describe, expect, it, vi } from 'vitest';
import { ReceiptTab } from '../src/view/receipt';
import { aPage, aRank, aState, find, frames, hello, PLAN, played, SPEC } from './played';

const page = aPage();

afterEach(() => void vi.unstubAllGlobals());

async function receipt(more: Record<string, unknown> = {}): Promise<void> {
  const { session } = await played(page.signal, hello(aState([aRank(0)]), more));
  new ReceiptTab(page.root, session, page.signal).show();
}

describe('the receipt', () => {
  it('lists what was captured, in the words of Python', async () => {
    await receipt();
    const row = find(page.root, 'table[class] tbody tr', 'model');
    expect([...row.children].map(cell => cell.textContent)).toEqual([
      'model',
      'model',
      'Linear(1, 1)',
      '2 MB',
      'line 3'
    ]);
    expect(page.root.textContent).toContain('forked from a warm process');
    expect(page.root.textContent).toContain('rank 0, names auto');
    expect(page.root.textContent).toContain('2 ranks, backend gloo, OMP_NUM_THREADS=1');
  });

  it('says what a strategy came to', async () => {
    const strategy = {
      ...PLAN.strategy,
      name: 'fsdp+tp',
      degrees: { tp: 2, dp_shard: 4 },
      options: { cpu_offload: true },
      compile: true,
      checkpoint: '/c',
      notes: ['auto chose fsdp: it is large']
    };
    await receipt({ plan: { ...PLAN, strategy } });
    expect(page.root.textContent).toContain('fsdp+tp, dp_shard=4 × tp=2, fp32');
    expect(page.root.textContent).toContain('cpu_offload=true, --compile, --checkpoint /c');
    expect(page.root.textContent).toContain('auto chose fsdp: it is large');
  });

  it('says nothing of a strategy where there is none, nor in a plan of an earlier version', async () => {
    for (const strategy of [PLAN.strategy, undefined]) {
      page.root.replaceChildren();
      await receipt({ plan: { ...PLAN, strategy } });
      expect(page.root.textContent).toContain('rank 0, names auto');
      expect(page.root.textContent).not.toContain('strategy');
    }
  });

  it('says that nothing was captured', async () => {
    await receipt({ receipt: [] });
    expect(page.root.textContent).toContain('nothing: the cell uses no name of the notebook');
  });

  it('keeps names, notes and source as text', async () => {
    const bad = '<script>alert(1)</script>';
    const captured = [{ name: bad, kind: bad, what: bad, size: 0, needed: bad }];
    await receipt({ receipt: captured, notes: [bad], command: bad, spec: { ...SPEC, source: bad, label: bad } });
    expect(page.root.querySelector('script')).toBeNull();
    expect(page.root.textContent!.split(bad).length).toBeGreaterThan(7);
  });

  it('shows the plan of another attempt when the feed tells it', async () => {
    const { feed, session } = await played(page.signal, hello(aState([aRank(0), aRank(1)])));
    new ReceiptTab(page.root, session, page.signal).show();
    expect(page.root.textContent).toContain('127.0.0.1 (lo)');
    const nodes = [{ ...PLAN.nodes[0], ranks: [0], address: '10.0.0.7', interface: 'eth1' }];
    feed.say(hello(aState([aRank(0)], { attempt: 2 }), { plan: { ...PLAN, nodes, world_size: 1 } }));
    await frames();
    expect(page.root.textContent).toContain('10.0.0.7 (eth1)');
    expect(page.root.textContent).not.toContain('127.0.0.1 (lo)');
  });

  it('numbers the source as its tracebacks do', async () => {
    await receipt();
    expect(find(page.root, '.td-source-numbers').textContent).toBe('2\n3\n4');
    expect(find(page.root, '.td-source code').textContent).toBe(SPEC.source);
  });

  it('shows the options that were chosen, and no others', async () => {
    await receipt();
    const terms = [...page.root.querySelectorAll('dt')].map(term => term.textContent);
    expect(terms).toContain('--ranks');
    expect(terms).not.toContain('--gpus');
    expect(terms).not.toContain('--background');
  });

  it('copies the command', async () => {
    const writeText = vi.fn().mockResolvedValue(undefined);
    vi.stubGlobal('navigator', { clipboard: { writeText } });
    await receipt();
    find(page.root, 'button', 'Copy').click();
    await frames();
    expect(writeText).toHaveBeenCalledWith('torchdist rerun 20260101-000000-0a1b2c');
    expect(find(page.root, '.td-said').textContent).toBe('copied');
  });

  it('bounds a receipt of ten thousand names', async () => {
    const captured = Array.from({ length: 10_000 }, (_, at) => ({
      name: `n${at}`,
      kind: 'data',
      what: '',
      size: 1,
      needed: ''
    }));
    await receipt({ receipt: captured });
    expect(page.root.textContent).toContain('and 9000 more rows');
  });

  it('waits in words for what is not there yet', async () => {
    const { session } = await played(page.signal);
    new ReceiptTab(page.root, session, page.signal).show();
    expect(page.root.textContent).toContain('not told yet');
  });
});
