/** What a rank takes of its node, in words: processor, memory, GPU. Pure. */
import type { Gauges } from '../protocol';
import { size, sizeOf } from './format';
import { trans } from './translate';

/** As it is shown and sorted: of a rank that has ended only the most that it held. */
export interface Taken {
  /** In per cent: of a core, and of the time in which the GPU computed. */
  cpu: number | null;
  gpu: number | null;
  /** In bytes. */
  memory: number | null;
  gpuMemory: number | null;
  gpuTotal: number | null;
  ended: boolean;
  /** The GPU's memory is that of all who use it. */
  shared: boolean;
}

export function taken(gauges: Gauges | undefined, live: boolean): Taken {
  return {
    cpu: (live ? gauges?.cpu : null) ?? null,
    gpu: (live ? gauges?.gpu : null) ?? null,
    memory: (live ? gauges?.memory : gauges?.memory_peak) ?? null,
    gpuMemory: (live ? gauges?.gpu_memory : gauges?.gpu_memory_peak) ?? null,
    gpuTotal: gauges?.gpu_total ?? null,
    ended: !live,
    shared: gauges?.gpu_shared ?? false
  };
}

export function percent(value: number | null): string {
  return value === null ? '' : `${value} %`;
}

export function memoryWords({ memory, ended }: Taken): string {
  return memory === null ? '' : ended ? trans('peak %1', size(memory)) : size(memory);
}

export function gpuMemoryWords({ gpuMemory, gpuTotal, ended }: Taken): string {
  if (gpuMemory === null) {
    return '';
  }
  const words = gpuTotal === null ? size(gpuMemory) : sizeOf(gpuMemory, gpuTotal);
  return ended ? trans('peak %1', words) : words;
}
