// Generated from Python by scripts/protocol_types.py: change the classes there and run it, not this file.
// The shapes are those of the JSON after codec.ts: times in seconds since the epoch, sizes in bytes.

export const FINAL_STATES = ['succeeded', 'failed', 'cancelled', 'timed_out', 'lost'] as const;

export const RANK_ENDS = ['done', 'failed', 'interrupted', 'killed', 'stopped', 'lost'] as const;

export const VERSION = 1;

/** An output that is a view: `{job, host}`; `host` is where the job directory is. */
export const MIME_TYPE = 'application/vnd.torchdist.job+json';

export const LINE_LIMIT = 65536;

/** Of each file, for a view that begins in the middle of a job. */
export const FIRST_BYTES = 262144;

/** Seconds between two empty messages of a WebSocket of ours: without them, silence could be a line that was cut. */
export const BEAT = 5;

/** One change. `t` is in seconds since the epoch, on the clock of the process that wrote it. */
export interface Event {
  kind: string;
  t: number;
  node: string | null;
  rank: number | null;
  seq: number;
  /** What belongs to the kind, beside the names above. */
  [data: string]: unknown;
}

/** An exception of a rank, in words that need nothing of its class. `frames` run from outer to inner. */
export interface ErrorRecord {
  type: string;
  module: string;
  message: string;
  /** The whole traceback, causes and notes, as Python prints it (user's frames only). */
  text: string;
  /** (file, line as the user counts, function, source line). */
  frames: [string, number, string, string][];
  t: number;
}

/** The collective that a rank waits in: the `number`-th of its `group`. */
export interface Waiting {
  /** Such as `all_reduce`. */
  operation: string;
  /** Backend and name, the same on every rank: `gloo:0`. */
  group: string;
  number: number;
  since: number;
  /** Bytes that this rank put in; 0 where that is not known. */
  size: number;
  /** The ranks of the group: null is all of the job, none at all that they are not known. */
  members: number[] | null;
}

/** One rank. Times in seconds since the epoch, on its node's clock. */
export interface RankState {
  rank: number;
  node: string;
  host: string;
  pid: number;
  /** starting, running, or one of `RANK_ENDS`; `stopped` because another rank failed or the job was ended. */
  state: string;
  started: number;
  ready: number;
  ended: number;
  error: ErrorRecord | null;
  code: number | null;
  /** How it ended, where that needs words: `was killed (SIGKILL)`. */
  why: string;
  results: string[];
  /** Names that did not come back, each with the reason. */
  left: [string, string][];
  /** Lines that it printed and a full disk did not take. */
  dropped: number;
  /** It stays when the rank ends in it. */
  waiting: Waiting | null;
  /** How many collectives of each group it had entered at `counted`; of a group that is not there, none. */
  entered: Record<string, number>;
  counted: number;
}

/** A job at one point of its journal; `seq` is that point. */
export interface JobState {
  job: string;
  name: string | null;
  label: string;
  /** submitted, starting, running, stopping, or one of `FINAL_STATES`. */
  state: string;
  world_size: number;
  submitted: number;
  ended: number;
  reason: string;
  first_failure: number | null;
  ranks: Record<string, RankState>;
  notes: string[];
  driver: Record<string, unknown> | null;
  attempt: number;
  /** While the launcher's nodes are not there: `position 3: waiting for GPUs`, as far as the launcher says. */
  queued: string;
  seq: number;
}

/** What one rank took when its node's agent last looked. Sizes in bytes; null is not known. */
export interface Gauges {
  /** Of the rank and its children, in per cent of one core. */
  cpu: number | null;
  /** Of the rank and its children, without what it has in common with other ranks: files that are mapped. */
  memory: number | null;
  /** The most of the looks so far. */
  memory_peak: number | null;
  /** Per cent of the time in which its GPU computed, for whomever. */
  gpu: number | null;
  gpu_memory: number | null;
  gpu_memory_peak: number | null;
  gpu_total: number | null;
  /** `gpu_memory` is that of all processes on the GPU: NVML does not tell which of it is the rank's. */
  gpu_shared: boolean;
}

/** One field an option; the defaults are what happens without any. */
export interface Options {
  gpus: number | null;
  ranks: number | null;
  launcher: string;
  backend: string | null;
  numa_binding: string | null;
  strategy: string | null;
  /** `key=value` each, of a file first, then of the line: the last one of a key holds. */
  option: string[];
  config: string | null;
  precision: string;
  compile: boolean;
  activation_checkpointing: boolean;
  grad_accumulation: number;
  checkpoint: string | null;
  resume: boolean;
  /** What a configuration file said that needs a word. */
  remarks: string[];
  out: string[];
  collect: string;
  exclude: string[];
  background: boolean;
  name: string | null;
  timeout: number | null;
  grace: number;
  env: string[];
  fresh: boolean;
  replace: boolean;
  plan: boolean;
  watch: string;
  /** What torchrun's options of the shell say (`verbs/torchrun.py`), as are the next two: the ranks' ROLE_NAME. */
  role: string;
  /** TORCHELASTIC_RUN_ID; else the job's id. */
  run_id: string;
  /** MASTER_PORT; else one that is free. */
  port: number;
}

/** One job, as asked for. `source` is the cell without the magic's line. */
export interface JobSpec {
  job: string;
  /** `cell` (the source runs in `__main__`), `function`, `script` (a file's text) or `module` (its name). */
  kind: string;
  source: string;
  /** The file name in tracebacks, such as `Cell In[12]` or a script's path. */
  label: string;
  /** Line of `source`'s first line as the user sees it: 2 under a magic. */
  first_line: number;
  options: Options;
  /** Seconds since the epoch. */
  created: number;
  /** `sys.argv` of a program: the script as it was typed, or `-m`, and its arguments. */
  argv: string[];
  /** Where it was asked for: the notebook's path or the kernel's, for the panel and `%dist`. */
  notebook: string;
  /** The job that is run again; empty for one that was captured anew. */
  rerun_of: string;
}

/** One node's part: its global ranks in order of local rank, and the GPU of each (empty on CPUs). */
export interface NodePlan {
  name: string;
  ranks: number[];
  gpus: string[];
  /** Where the node's peers reach it: loopback on one node, else the chosen interface's IP. */
  address: string;
  interface: string;
  /** Its name, as people know it; empty where it is not known yet. */
  host: string;
}

/** One job's strategy, decided. The degrees of all dimensions multiply to the world size. */
export interface StrategyPlan {
  /** As asked for, `fsdp+tp`; what `auto` chose, once it has. */
  name: string;
  /** Ranks along each of `DIMENSIONS`; a dimension that is not named has 1. */
  degrees: Record<string, number>;
  /** What `-O` and the configuration file set, converted; the defaults are not in it. */
  options: Record<string, unknown>;
  precision: string;
  compile: boolean;
  activation_checkpointing: boolean;
  grad_accumulation: number;
  /** Directory of the automatic way's checkpoints. */
  checkpoint: string | null;
  resume: boolean;
  /** What was decided and why, for `--plan` and the receipt. */
  notes: string[];
}

/** One job, decided. The first node hosts the rendezvous store. */
export interface Plan {
  job: string;
  world_size: number;
  backend: string;
  nodes: NodePlan[];
  /** `OMP_NUM_THREADS` of each rank, unless the user set it. */
  threads: number;
  fresh: boolean;
  numa_binding: string | null;
  timeout: number | null;
  grace: number;
  collect: string;
  out: string[];
  env_names: string[];
  strategy: StrategyPlan;
  role: string;
  /** What ranks know the job by; empty: by its id and attempt. */
  run_id: string;
  /** On which the store listens; 0: one that is free. */
  port: number;
}

/** One line of the receipt: a name, what it is, how large (bytes), and which line needs it. */
export interface Captured {
  name: string;
  /** `module`, `function`, `class`, `tensor`, `array`, `model`, `data`… */
  kind: string;
  /** Such as `torch as import` or `Tensor float32 (60000, 784)`. */
  what: string;
  size: number;
  /** Such as `line 4` or `function evaluate (Cell In[3], line 2)`. */
  needed: string;
}

/** A piece of one file: whole lines, or a part of a very long one. */
export interface Segment {
  file: string;
  start: number;
  end: number;
  t: number | null;
  text: string;
}

/** A line that a search found, from its `start`. */
export interface Hit {
  file: string;
  start: number;
  t: number | null;
  text: string;
}

/** A curve of one rank, or of several (`rank` is null) as a band. */
export interface Series {
  name: string;
  rank: number | null;
  x: number[];
  y: number[];
  low: number[];
  high: number[];
}

/** A bar; `total` is null where it is not known. */
export interface Progress {
  desc: string;
  n: number;
  total: number | null;
}

/** How far a rank is, and the last value of each of its curves. */
export interface RankStatus {
  step: number | null;
  last: Record<string, number>;
}

/** What curves there are. */
export interface CurveNames {
  version: number;
  names: string[];
  note: string;
}

/** The first message. `spec`, `plan`, `receipt` and `state` are the records' own JSON. */
export interface Hello {
  version: number;
  now: number;
  job: string;
  spec: unknown;
  plan: unknown;
  receipt: unknown[];
  notes: string[];
  command: string;
  state: unknown;
  sizes: Record<string, number>;
}

/** `Event` as in the journal. */
export interface Events {
  events: unknown[];
}

/** In order of time. */
export interface Lines {
  segments: Segment[];
}

/** What changes often. `gauges` are missing where a server runs on after an update. */
export interface Status {
  gauges?: Record<string, Gauges>;
  effective: string;
  progress: Progress | null;
  ranks: Record<string, RankStatus>;
  curves: CurveNames;
}

/** The last message. */
export interface Gone {
  reason: string;
}

/** The answer to `older`. */
export interface Older {
  segments: Segment[];
  at: Record<string, number>;
}

/** The answer to `around`. */
export interface Around {
  segments: Segment[];
}

/** The answer to `search`. */
export interface Found {
  hits: Hit[];
  at: Record<string, number> | null;
  searched: number;
}

/** The answer to `curves`. */
export interface Drawn {
  version: number;
  complete: boolean;
  series: Series[];
}

/** The answer to `cancel`. */
export interface Said {
  said: string;
}

/** One job. Times in seconds since the epoch, 0 for what has not happened. */
export interface Row {
  job: string;
  name: string | null;
  label: string;
  /** Its path, or the kernel's; empty for a job from a shell. */
  notebook: string;
  state: string;
  /** `state`, or `orphaned` or `unreachable`. */
  effective: string;
  world_size: number;
  submitted: number;
  ended: number;
  reason: string;
  progress: Progress | null;
  /** The latest values of the job's first curve. */
  spark: number[];
  /** The UUIDs of those the plan has. */
  gpus: string[];
  /** Bytes in use on them, and all that they have; None where nothing is known, and after its end. */
  gpu_memory: [number, number] | null;
  /** The job that was run again as this one; empty for one of its own. */
  rerun_of: string;
  /** It cannot be opened (`reason` says why), only deleted. */
  damaged: boolean;
}
